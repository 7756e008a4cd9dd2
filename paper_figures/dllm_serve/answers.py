"""How well the configurations answer whose speeds a figure compares, in words."""

from collections.abc import Sequence

from paper_figures.common.style import system_look
from repro.reports.accuracy import DENSE, SINGLE_REFRESH, TASKS, Solved, accuracies, configuration_of, solved_by
from repro.runs.store import StoredRun


def title_of(contender: str) -> str:
    return "dLLM-Serve with one refresh" if contender == SINGLE_REFRESH else system_look(contender).title


def answer_notes(runs: Sequence[StoredRun]) -> list[str]:
    """Accuracy of every configuration among the runs that was measured, and of the model without a cache."""
    asked = [(run.cell.system, run.cell.knob_values) for run in runs]
    found = dict.fromkeys(each for system, knobs in asked if (each := configuration_of(system, knobs)) is not None)
    texts = [
        f"{title_of(each.contender)} ({each.rule}) {_said([solved_by(each, task) for task in TASKS])}" for each in found
    ]
    if not texts:
        return []
    table = accuracies()
    dense = _said([table.get((DENSE, "no cache", task)) for task in TASKS])
    return [
        f"The embedded model solves, % of {' / '.join(TASKS)} [Wilson's 95 %]: {'; '.join(texts)}; no cache {dense}."
    ]


def _said(solved: Sequence[Solved | None]) -> str:
    return " / ".join("-" if each is None else str(each) for each in solved)
