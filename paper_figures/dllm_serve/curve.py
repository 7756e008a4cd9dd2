"""Curves over the arrival rate, and numbers read off them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engines.errors import UserError
from paper_figures.common.caption import dataset_title
from paper_figures.common.runs import Against, Measure, Of, Runs, paired
from paper_figures.common.style import Look
from paper_figures.dllm_serve.comparison import BASELINES, CONTENDERS, DATASETS, OURS, SYSTEMS, contender_of, look_of
from repro.runs.statistics import Interval, mean_interval
from repro.runs.store import StoredRun, by_seed

FOLLOWS_LOAD = 0.9
"""A throughput below this share of the offered load is saturated."""
THROUGHPUT = Measure(path="throughput_tok_s", column="throughput_tok_s", label="throughput (tok/s)", better="higher")
P99_LATENCY = Measure(path="e2el_s/p99")
LONGEST_WAIT = Measure(path="queue_wait_s/max")
"""Shown beside a mean, which hides a request that starves."""
MEAN_LATENCY = Measure(path="e2el_s/mean", column="mean_latency_s", label="mean latency (s)", better="lower")


def per_processor_second(run: StoredRun) -> float | None:
    """Tokens per processor second, which a busy machine changes less than tokens a second."""
    return run.tokens_per_processor_s


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A contender, named by ``system``, on one data set: its repeats by rate, the lowest rate first."""

    dataset: str
    system: str
    by_rate: Mapping[float, Sequence[StoredRun]]
    _known: dict[tuple[float, Of], Interval] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Caches intervals, as every comparison of a figure asks for the highest point."""

    @property
    def look(self) -> Look:
        return look_of(self.system)

    @property
    def label(self) -> str:
        return self.look.title

    @property
    def runs(self) -> list[StoredRun]:
        return [run for repeats in self.by_rate.values() for run in repeats]

    @property
    def last_rate(self) -> float:
        """The highest rate; 0 without runs."""
        return max(self.by_rate, default=0.0)

    @property
    def last_runs(self) -> Sequence[StoredRun]:
        """Repeats at the highest rate."""
        return self.by_rate.get(self.last_rate, ())

    def values(self, rate: float, of: Of) -> dict[int, float]:
        return by_seed(self.by_rate.get(rate, ()), of)

    def at(self, rate: float, of: Of) -> Interval:
        if (interval := self._known.get((rate, of))) is None:
            interval = self._known[rate, of] = mean_interval(list(self.values(rate, of).values()))
        return interval

    def last(self, of: Of) -> Interval:
        return self.at(self.last_rate, of)

    def usable(self, of: Of) -> dict[float, Interval]:
        """Return intervals by rate, if they have a mean."""
        intervals = {rate: self.at(rate, of) for rate in self.by_rate}
        return {rate: interval for rate, interval in intervals.items() if interval.mean is not None}

    @property
    def peak(self) -> tuple[float, float] | None:
        """(rate, throughput) of the highest point; of equal ones, the lowest rate."""
        means = [(rate, interval.mean or 0.0) for rate, interval in self.usable(THROUGHPUT).items()]
        return max(means, key=lambda pair: (pair[1], -pair[0]), default=None)

    def gen_length(self, rate: float) -> float:
        """Mean number of tokens asked for per request."""
        counts, totals = zip(*(run.sum_of("gen_length") for run in self.by_rate[rate]), strict=True)
        return sum(totals) / sum(counts) if sum(counts) else 0.0

    @property
    def is_saturated(self) -> bool:
        """Whether the highest rate offers more than was delivered."""
        mean = self.last(THROUGHPUT).mean
        return mean is not None and mean < FOLLOWS_LOAD * self.last_rate * self.gen_length(self.last_rate)

    @property
    def batch_sizes(self) -> list[int]:
        """Static batch sizes that its runs used; none under continuous batching."""
        sizes = {run.facts.get("batch_size") for run in self.runs}
        return sorted(size for size in sizes if size is not None)


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Curves by data set and system, in the order of the paper, without those that have no run."""

    by_name: Mapping[tuple[str, str], Curve]

    @property
    def all(self) -> list[Curve]:
        return list(self.by_name.values())

    @property
    def runs(self) -> list[StoredRun]:
        return [run for curve in self.all for run in curve.runs]

    def of(self, dataset: str, system: str) -> Curve:
        """Return the curve, or one without runs."""
        return self.by_name.get((dataset, system)) or Curve(dataset=dataset, system=system, by_rate={})

    def versus(
        self, dataset: str, one: str, other: str, of: Of, rate: float | None = None, how: Against = "ratio"
    ) -> Interval:
        """Compare one system's repeats with another's, paired by seed, at a rate, or each at its own peak."""
        ours, theirs = (
            curve.values(_peak_rate(curve) if rate is None else rate, of)
            for curve in (self.of(dataset, one), self.of(dataset, other))
        )
        return paired(ours, theirs, how)

    def best_baseline(self, dataset: str, rate: float | None = None) -> str | None:
        """Return the baseline with the highest mean throughput at a rate, or each at its own peak. None if one is missing."""
        means = {}
        for curve in (self.of(dataset, system) for system in BASELINES):
            mean = curve.at(_peak_rate(curve) if rate is None else rate, THROUGHPUT).mean
            if mean is None:
                return None
            means[curve.system] = mean
        return max(means, key=means.__getitem__)


def _peak_rate(curve: Curve) -> float:
    return curve.last_rate if curve.peak is None else curve.peak[0]


def curves_of(runs: Runs) -> Curves:
    """Group runs into curves. Raises UserError for data sets and systems that the paper does not compare."""
    grouped: dict[tuple[str, str], dict[float, list[StoredRun]]] = {
        (dataset, system): {} for dataset in DATASETS for system in CONTENDERS
    }
    for run in sorted(runs.all, key=lambda run: (run.cell.rate or 0.0, run.cell.seed)):
        cell = run.cell
        if cell.dataset not in DATASETS or cell.system not in SYSTEMS or cell.rate is None:
            raise UserError(
                f"run {cell.folder_name} has system={cell.system!r}, dataset={cell.dataset!r} and rate={cell.rate}: "
                f"give runs of {', '.join(SYSTEMS)} on {', '.join(DATASETS)} at a rate"
            )
        grouped[cell.dataset, contender_of(cell)].setdefault(cell.rate, []).append(run)
    return Curves(
        by_name={
            (dataset, system): Curve(dataset=dataset, system=system, by_rate=by_rate)
            for (dataset, system), by_rate in grouped.items()
            if by_rate
        }
    )


def batch_sentence(curves: Curves) -> list[str]:
    """Tell static batch sizes by system, once if the panels agree."""
    texts = []
    for system in SYSTEMS:
        batched = [curve for curve in curves.all if curve.system == system and curve.batch_sizes]
        sizes = [" or ".join(map(str, curve.batch_sizes)) for curve in batched]
        if len(set(sizes)) > 1:
            sizes = [f"{size} ({dataset_title(curve.dataset)})" for size, curve in zip(sizes, batched, strict=True)]
        if batched:
            texts.append(f"{batched[0].label} {', '.join(dict.fromkeys(sizes))}")
    return [f"Static batches: {'; '.join(texts)}."] if texts else []


def gains_of(curves: Curves, rate: float | None = None) -> dict[str, Interval]:
    """Return dLLM-Serve's throughput over that of the baseline with the highest mean, by data set, where all are known."""
    gains = {}
    for dataset in DATASETS:
        best = curves.best_baseline(dataset, rate)
        gain = mean_interval([]) if best is None else curves.versus(dataset, OURS, best, THROUGHPUT, rate)
        if gain.mean is not None:
            gains[dataset] = gain
    return gains
