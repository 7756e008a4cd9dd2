"""Every figure's findings can be judged: known claims, the right number of values, orderings that say whether they hold."""

import pytest
from support.stored_runs import stored

from repro.families.platforms import platform
from repro.reports.claims import judge_all
from repro.reports.evidence import FigureSource
from repro.reports.figures import FIGURES, View, default_reading
from repro.reports.paper import load_claims
from repro.runs.cell import Cell

SPEED = {"dllm-serve": 80.0, "fast-dllm": 40.0, "dllm-cache": 16.0, "sparse-dllm": 20.0}
WITH_ANSWERS = ("dllm-serve/fig6",)
"""Their runs carry grades; tested with them."""


def speed(cell: Cell) -> float:
    return SPEED[cell.system]


@pytest.mark.parametrize(
    "name", [name for name in FIGURES if name.startswith("dllm-serve/") and name not in WITH_ANSWERS]
)
def test_findings_can_be_judged(name):
    module = FIGURES[name].load()
    found = []
    for where in map(platform, module.platforms):
        view = View(platform=where, reading=default_reading(where))
        if where.executor == "torch":
            continue
        cells = tuple(module.cells(view))
        runs = [stored(cell, tok_s=speed(cell), n=128, stretch=0.5) for cell in cells]
        found += FigureSource(entry=FIGURES[name], figure=module, view=view, cells=cells).findings(runs)
    judged = [each for each in judge_all(load_claims("dllm-serve"), found) if each.finding is not None]
    assert len(judged) == len({finding.claim for finding in found})
    partly = {each.claim.id for each in judged if each.verdict == "not run"}
    assert partly <= {"dllm-serve-best-tput", "dllm-token-cap"}  # both cards are needed
    assert all(
        each.claim.untestable or "spans" in str(each.reason) for each in judged if each.verdict == "not testable here"
    )
