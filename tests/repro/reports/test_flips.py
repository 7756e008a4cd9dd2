"""A choice that turns a verdict is listed, and one that turns none is not."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.stored_runs import stored

from repro.reports.evidence import sources
from repro.reports.figures import figure
from repro.reports.flips import as_csv, changes, flips
from repro.reports.paper import load_claims
from repro.runs.cell import Cell
from repro.runs.store import StoredRun

SPEED = {"dllm-serve": 76.6, "fast-dllm": 42.4}


@pytest.fixture(scope="module")
def source():
    (found,) = (each for each in sources([figure("dllm-serve/fig3")]) if each.view.platform.name == "rtx4090")
    view = replace(found.view, num_runs=1)
    return replace(found, view=view, cells=tuple(view.applied(cell) for cell in found.figure.cells(view)))


def made(planted: tuple[str, object] | None):
    def make(cells: Sequence[Cell]) -> Sequence[StoredRun]:
        runs = []
        for cell in cells:
            is_planted = planted is not None and dict(cell.knobs).get(planted[0]) == planted[1]
            speed = SPEED.get(cell.system, 30.0) * (2.0 if is_planted and cell.system == "fast-dllm" else 1.0)
            runs.append(stored(cell, tok_s=speed))
        return runs

    return make


def test_a_planted_flip_is_listed(source):
    found = list(flips(load_claims("dllm-serve"), [source], made(("reading", "policy")), lambda text: None))
    assert {each.change for each in found} == {"reading=policy"}
    by_claim = {each.claim: each for each in found}
    fast = by_claim["dllm-4090-burst-fast"]
    assert (fast.default, fast.changed, fast.default_value, fast.changed_value) == (
        "reproduced",
        "not reproduced",
        "42.4",
        "84.8",
    )
    assert as_csv([fast]).splitlines()[1] == "reading=policy,dllm-4090-burst-fast,reproduced,not reproduced,42.4,84.8"


def test_nothing_is_listed_where_nothing_flips(source):
    assert not list(flips(load_claims("dllm-serve"), [source], made(None), lambda text: None))


def test_what_a_system_declares_free_is_changed_one_at_a_time():
    cells = [cell for each in sources([figure("laps/fig6")]) for cell in each.cells]
    found = list(changes(cells))
    texts = [each.text for each in found]
    assert len(texts) == len(set(texts))
    assert "laps: chunk_tokens=8192" in texts
    assert "kappa=0.3" in texts
    chunk = next(each for each in found if each.text == "laps: chunk_tokens=8192")
    ours, theirs = (next(cell for cell in cells if cell.system == name) for name in ("laps", "sglang-pd"))
    assert dict(chunk.of(ours).knobs)["chunk_tokens"] == 8192
    assert chunk.of(theirs) == theirs
