"""Single sessions through the cluster, every time by hand. A token is prefilled in 1 ms, a decode step takes 10 ms."""

import numpy as np
import pytest
from support.clusters import LinearCost, Scripted, links, serve, session, simulation
from support.tables import data_beside

from engines.cluster.record import ClusterRun, observe
from engines.policies.batching import Chunked, PrefillFirst


def gaps_of(run: ClusterRun, row: int) -> list[float]:
    """One by one, in milliseconds."""
    mine = run.gaps.row == row
    return [round(1e3 * gap, 6) for gap in np.repeat(run.gaps.gap_s[mine], run.gaps.tokens[mine]).tolist()]


RUNS = data_beside(__file__, "timelines")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_by_hand(name):
    options, entries = dict(RUNS[name]["with"]), RUNS[name]["sessions"]
    makes = {
        "kv_links": ("kv_s", links),
        "router": ("places", lambda places: Scripted(places=tuple(places))),
        "batching": (
            "batching",
            lambda given: {"chunked": Chunked, "prefill-first": PrefillFirst}[given.pop("is")](**given),
        ),
        "cost": ("cost", lambda given: LinearCost(**given)),
    }
    for option, (key, make) in makes.items():
        if key in options:
            options[option] = make(options.pop(key))
    run = serve(simulation(**options), *(session(index, *entry) for index, entry in enumerate(entries)))
    for column, values in RUNS[name]["shows"].items():
        table, field = column.split(".")
        if table == "gaps":
            found = gaps_of(run, int(field))
        else:
            found = observe(run).ttft_s.tolist() if table == "observed" else getattr(run, table)[field]
        is_time = field.endswith("_s")
        assert found == (pytest.approx(values) if is_time else values), column
