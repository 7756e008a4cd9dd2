"""What figures say of claims on made-up runs: as stored in ``verdicts.json``, to the last word.

Every other test of a verdict says why it is right; this one says that none changes by the way. One that is meant to change is
stored anew by ``python tests/figures/test_verdicts.py``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from support.figure_runs import figure_runs

from repro.families.platforms import platform
from repro.reports.claims import judge_all, load_claims
from repro.reports.figures import FIGURES, View, default_reading

STORED = Path(__file__).with_name("verdicts.json")
NUM_RUNS = 3
DECIDING = [(name, where) for name, entry in FIGURES.items() for where in entry.load().deciding]
"""Figures that decide claims, and where."""


def verdicts(name: str, where: str) -> dict[str, Any]:
    module, here = FIGURES[name].load(), platform(where)
    view = View(platform=here, reading=default_reading(here), num_runs=NUM_RUNS)
    findings, found = module.findings(figure_runs(module, view), view), dict[str, Any]()
    # Refuses unknown claims, numbers of values that do not fit, and orderings that do not say whether they hold.
    judge_all(load_claims(name.partition("/")[0]), findings)
    for each in findings:
        found[each.claim] = {
            "values": [float(f"{value:.6g}") for value in each.values],
            "holds": each.holds,
            "of": list(each.of),
            "how": each.how,
            "obtained": each.obtained,
            "comparable": each.comparable,
        }
    return found


@pytest.mark.parametrize(("name", "where"), DECIDING)
def test_a_verdict_changes_only_where_it_is_stored_anew(name, where):
    stored, found = json.loads(STORED.read_text(encoding="utf-8"))[f"{name} {where}"], verdicts(name, where)
    assert list(found) == list(stored)
    for claim, own in stored.items():
        assert found[claim].pop("values") == pytest.approx(own.pop("values"), rel=2e-5, nan_ok=True), claim
        assert found[claim] == own, claim


if __name__ == "__main__":
    everything = {f"{name} {where}": verdicts(name, where) for name, where in DECIDING}
    STORED.write_text(json.dumps(everything, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
