"""Curves over the arrival rate, and what is read off them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engines.errors import UserError
from paper_figures.common.caption import dataset_title, how_obtained
from paper_figures.common.runs import Against, Measure, Of, Runs, paired
from paper_figures.common.style import Look
from paper_figures.dllm_serve.comparison import BASELINES, CONTENDERS, DATASETS, OURS, SYSTEMS, contender_of, look_of
from repro.runs.statistics import Interval, mean_interval
from repro.runs.store import StoredRun

FOLLOWS_LOAD = 0.9
"""A throughput of at least this share of the offered load is not saturated."""
THROUGHPUT = Measure(path="throughput_tok_s", column="throughput_tok_s", label="throughput (tok/s)", better="higher")
P99_LATENCY = Measure(path="e2el_s/p99")
LONGEST_WAIT = Measure(path="queue_wait_s/max")
"""Beside a mean, which hides a request that starves."""
MEAN_LATENCY = Measure(path="e2el_s/mean", column="mean_latency_s", label="mean latency (s)", better="lower")


def per_processor_second(run: StoredRun) -> float | None:
    """Which a busy machine changes less than tokens a second."""
    return run.tokens_per_processor_s


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A contender, which ``system`` names, on one data set: its repeats by rate, the least rate first."""

    dataset: str
    system: str
    by_rate: Mapping[float, tuple[StoredRun, ...]]
    _known: dict[tuple[float, Of], Interval] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Its highest point is asked for by every comparison of a figure."""

    @property
    def look(self) -> Look:
        return look_of(self.system)

    @property
    def label(self) -> str:
        return self.look.title

    @property
    def where(self) -> str:
        return f"{dataset_title(self.dataset)} {self.label}"

    @property
    def runs(self) -> list[StoredRun]:
        return [run for repeats in self.by_rate.values() for run in repeats]

    @property
    def last_runs(self) -> tuple[StoredRun, ...]:
        """Repeats at the highest rate."""
        return self.by_rate[max(self.by_rate)]

    def values(self, rate: float, of: Of) -> dict[int, float]:
        """By seed, of the valid repeats that have one."""
        runs = [run for run in self.by_rate.get(rate, ()) if run.validity.valid]
        return {run.cell.seed: value for run in runs if (value := of(run)) is not None}

    def at(self, rate: float, of: Of) -> Interval:
        if (found := self._known.get((rate, of))) is None:
            found = self._known[rate, of] = mean_interval(list(self.values(rate, of).values()))
        return found

    def last(self, of: Of) -> Interval:
        return self.at(max(self.by_rate), of)

    def usable(self, of: Of) -> dict[float, Interval]:
        """By rate, where there is a mean."""
        found = {rate: self.at(rate, of) for rate in self.by_rate}
        return {rate: interval for rate, interval in found.items() if interval.mean is not None}

    @property
    def peak(self) -> tuple[float, float] | None:
        """(rate, throughput) of the highest point; the lowest such rate."""
        means = [(rate, interval.mean or 0.0) for rate, interval in self.usable(THROUGHPUT).items()]
        return max(means, key=lambda pair: (pair[1], -pair[0]), default=None)

    @property
    def peak_rate(self) -> float:
        return max(self.by_rate) if self.peak is None else self.peak[0]

    def gen_length(self, rate: float) -> float:
        """Mean tokens asked for per request."""
        nums, sums = zip(*(run.sum_of("gen_length") for run in self.by_rate[rate]), strict=True)
        return sum(sums) / sum(nums) if sum(nums) else 0.0

    @property
    def is_saturated(self) -> bool:
        """Whether the highest rate asked for more than was delivered."""
        rate = max(self.by_rate)
        mean = self.at(rate, THROUGHPUT).mean
        return mean is not None and mean < FOLLOWS_LOAD * rate * self.gen_length(rate)

    @property
    def batch_sizes(self) -> list[int]:
        """Static batch sizes its runs used; none under continuous batching."""
        found = {run.facts.get("batch_size") for run in self.runs}
        return sorted(size for size in found if size is not None)


@dataclass(frozen=True, kw_only=True)
class Curves:
    """In the order of the paper, by data set and system; without those that have no run."""

    by_name: Mapping[tuple[str, str], Curve]

    @property
    def all(self) -> list[Curve]:
        return list(self.by_name.values())

    @property
    def runs(self) -> list[StoredRun]:
        return [run for curve in self.all for run in curve.runs]

    @property
    def rates(self) -> list[float]:
        return sorted({rate for curve in self.all for rate in curve.by_rate})

    def of(self, dataset: str) -> list[Curve]:
        return [curve for curve in self.all if curve.dataset == dataset]

    def versus(
        self, dataset: str, one: str, other: str, of: Of, rate: float | None = None, how: Against = "ratio"
    ) -> Interval:
        """One system's repeats over another's, paired by seed, at a rate, or each at its own peak."""

        def values(system: str) -> dict[int, float]:
            curve = self.by_name.get((dataset, system))
            return {} if curve is None else curve.values(curve.peak_rate if rate is None else rate, of)

        return paired(values(one), values(other), how)

    def best_of(self, dataset: str, systems: Sequence[str], of: Of, rate: float | None = None) -> str | None:
        """The system with the highest mean of all; None where one is missing."""
        means = {}
        for system in systems:
            curve = self.by_name.get((dataset, system))
            means[system] = None if curve is None else curve.at(curve.peak_rate if rate is None else rate, of).mean
        known = {system: mean for system, mean in means.items() if mean is not None}
        return max(known, key=known.__getitem__) if known and len(known) == len(means) else None

    def at(self, dataset: str, system: str, rate: float, of: Of) -> Interval:
        curve = self.by_name.get((dataset, system))
        return mean_interval([]) if curve is None else curve.at(rate, of)

    def last(self, dataset: str, system: str, of: Of) -> Interval:
        curve = self.by_name.get((dataset, system))
        return mean_interval([]) if curve is None else curve.last(of)


def curves_of(runs: Runs) -> Curves:
    """Runs of other data sets and systems than the paper's are an error."""
    grouped: dict[tuple[str, str], dict[float, list[StoredRun]]] = {}
    for run in runs.all:
        cell = run.cell
        if cell.dataset not in DATASETS or cell.system not in SYSTEMS or cell.rate is None:
            raise UserError(
                f"run {cell.folder_name} has system={cell.system!r}, dataset={cell.dataset!r} and rate={cell.rate}: "
                f"give runs of {', '.join(SYSTEMS)} on {', '.join(DATASETS)} at a rate"
            )
        grouped.setdefault((cell.dataset, contender_of(cell)), {}).setdefault(cell.rate, []).append(run)
    names = [(dataset, system) for dataset in DATASETS for system in CONTENDERS if (dataset, system) in grouped]
    return Curves(
        by_name={
            (dataset, system): Curve(
                dataset=dataset,
                system=system,
                by_rate={
                    rate: tuple(sorted(repeats, key=lambda run: run.cell.seed))
                    for rate, repeats in sorted(grouped[dataset, system].items())
                },
            )
            for dataset, system in names
        }
    )


# -- what captions say of them ------------------------------------------------------------------------------


def curves_obtained(curves: Curves) -> list[str]:
    return how_obtained(curves.runs, [curve.label for curve in curves.all for _ in curve.runs])


def batch_sentence(curves: Curves) -> list[str]:
    """Static batch sizes, by system; where the panels agree they are said once."""
    texts = []
    for system in SYSTEMS:
        own = [curve for curve in curves.all if curve.system == system and curve.batch_sizes]
        sizes = [" or ".join(map(str, curve.batch_sizes)) for curve in own]
        if len(set(sizes)) > 1:
            sizes = [f"{size} ({dataset_title(curve.dataset)})" for size, curve in zip(sizes, own, strict=True)]
        if own:
            texts.append(f"{own[0].label} {', '.join(dict.fromkeys(sizes))}")
    return [f"Static batches: {'; '.join(texts)}."] if texts else []


def gains_of(curves: Curves, rate: float | None = None) -> dict[str, Interval]:
    """dLLM-Serve's throughput over that of the baseline with the highest mean, by data set, where all are known."""
    best = {dataset: curves.best_of(dataset, BASELINES, THROUGHPUT, rate) for dataset in DATASETS}
    found = {
        dataset: curves.versus(dataset, OURS, system, THROUGHPUT, rate)
        for dataset, system in best.items()
        if system is not None
    }
    return {dataset: gain for dataset, gain in found.items() if gain.mean is not None}
