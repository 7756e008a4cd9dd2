"""How well the configurations answer whose speeds a figure compares."""

from collections.abc import Iterator, Sequence

from paper_figures.common.style import system_look
from repro.reports.figures import DENSE, SINGLE_REFRESH, TASKS, Solved, accuracies, configuration_of, solved_by
from repro.runs.statistics import wilson_interval
from repro.runs.store import StoredRun
from repro.tasks.registry import task_entry


def title_of(contender: str) -> str:
    return "dLLM-Serve with one refresh" if contender == SINGLE_REFRESH else system_look(contender).title


def verdicts(runs: Sequence[StoredRun], column: str = "correct") -> list[bool]:
    """Return verdicts of valid runs, by seed and problem; empty if one was not graded."""
    graded = [verdict for run in runs if run.validity.valid for verdict in run.record.requests[column]]
    return [] if None in graded else graded


def share(runs: Sequence[StoredRun], column: str = "correct") -> Solved | None:
    """Return the share solved over all repeats; None if one was not graded."""
    graded = verdicts(runs, column)
    if not graded:
        return None
    low, high = wilson_interval(sum(graded), len(graded))
    return Solved(share=sum(graded) / len(graded), low=low, high=high, n=len(graded))


def numbers_of(solved: Solved | None) -> tuple[float | None, ...]:
    """Return share, low, high and count for a CSV."""
    return (None,) * 4 if solved is None else (solved.share, solved.low, solved.high, solved.n)


def by_criterion(runs: Sequence[StoredRun], task: str) -> Iterator[tuple[str | None, bool, tuple[float | None, ...]]]:
    """Yield, for each criterion of a task, its name, whether it is the strict one, and the numbers for a CSV."""
    entry = task_entry(task)
    for column, criterion in (("correct", entry.criterion), ("correct_strict", entry.strict)):
        yield criterion, column == "correct_strict", numbers_of(share(runs, column))


def answer_notes(runs: Sequence[StoredRun]) -> list[str]:
    """Tell the accuracy of every measured configuration among the runs, and of the model without a cache."""
    cells = [(run.cell.system, run.cell.knob_values) for run in runs]
    configs = dict.fromkeys(
        config for system, knobs in cells if (config := configuration_of(system, knobs)) is not None
    )
    texts = [
        f"{title_of(config.contender)} ({config.rule}) {_said([solved_by(config, task) for task in TASKS])}"
        for config in configs
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
