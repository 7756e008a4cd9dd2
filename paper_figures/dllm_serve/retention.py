"""Accuracy curves over the retention ratio: stored runs grouped by task and selection, and pairs of them compared."""

from collections.abc import Sequence
from dataclasses import dataclass

from paper_figures.dllm_serve.layout import printed_in
from repro.runs.statistics import Discordance, discordance, wilson_interval
from repro.runs.store import StoredRun

HEAD, UNIFORM, DENSE = "head", "uniform", "dense"
SELECTIONS = (HEAD, UNIFORM)
TASKS = ("mini-code", "mini-gsm")
"""Panels, in the paper's order: code, then math."""
PAPER_DATASETS = {"mini-code": "HumanEval", "mini-gsm": "GSM8K"}
"""What the paper's panel shows where ours shows the embedded model's task."""


@dataclass(frozen=True, kw_only=True)
class SolvedShare:
    """Share of ``n`` problems; ``low`` and ``high`` are Wilson's 95 % interval."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, kw_only=True)
class AccuracyPoint:
    """All repeats of one cell, in the order of their seeds."""

    task: str
    selection: str
    ratio: float | None
    """None for ``dense``, which keeps every row."""
    runs: tuple[StoredRun, ...]

    def share(self, column: str = "correct") -> SolvedShare | None:
        verdicts = self.verdicts(column)
        if not verdicts:
            return None
        low, high = wilson_interval(sum(verdicts), len(verdicts))
        return SolvedShare(value=sum(verdicts) / len(verdicts), low=low, high=high, n=len(verdicts))

    @property
    def asked(self) -> list[str]:
        """Digests of the valid runs' requests."""
        return [run.record.manifest["dataset"]["checksum"] for run in self.runs if run.validity.valid]

    def verdicts(self, column: str = "correct") -> list[bool]:
        """Verdicts of valid runs, by seed and problem; empty where one was not graded."""
        found = [verdict for run in self.runs if run.validity.valid for verdict in run.record.requests[column]]
        return [] if None in found else found


@dataclass(frozen=True, kw_only=True)
class PaperAccuracy:
    task: str
    selection: str
    ratio: float
    percent: float


@dataclass(frozen=True, kw_only=True)
class RetentionPoints:
    """Ordered by panel, selection and ratio, dense last."""

    all: tuple[AccuracyPoint, ...]

    def of(self, task: str, selection: str, ratio: float | None = None) -> AccuracyPoint | None:
        return next((p for p in self.all if (p.task, p.selection, p.ratio) == (task, selection, ratio)), None)

    def share(self, task: str, selection: str, ratio: float | None = None) -> SolvedShare | None:
        point = self.of(task, selection, ratio)
        return None if point is None else point.share()


def load_points(runs: Sequence[StoredRun]) -> RetentionPoints:
    order = (*SELECTIONS, DENSE)
    grouped: dict[tuple[int, int, float], list[StoredRun]] = {}
    for run in sorted(runs, key=lambda run: run.cell.seed):
        knobs = run.cell.knob_values
        ratio = float(knobs.get("retention_ratio") or 0)
        grouped.setdefault((TASKS.index(run.cell.dataset), order.index(str(knobs["selection"])), ratio), []).append(run)
    return RetentionPoints(
        all=tuple(
            AccuracyPoint(task=TASKS[task], selection=order[selection], ratio=ratio or None, runs=tuple(own))
            for (task, selection, ratio), own in sorted(grouped.items(), key=lambda item: item[0])
        )
    )


def compare(first: AccuracyPoint | None, second: AccuracyPoint | None) -> Discordance | None:
    """Compare two points, problem by problem; None where they have not asked the same ones."""
    if first is None or second is None or first.asked != second.asked or not first.verdicts():
        return None
    return discordance(first.verdicts(), second.verdicts())


def paper_values() -> list[PaperAccuracy]:
    """The points that the paper's text prints, of LLaDA-8B-Instruct."""
    values = printed_in("fig6")
    return [
        PaperAccuracy(task=task, selection=selection, ratio=float(percent) / 100, percent=float(printed[selection]))
        for task, dataset in PAPER_DATASETS.items()
        for percent, printed in values[dataset].items()
        for selection in SELECTIONS
    ]
