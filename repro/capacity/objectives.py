"""Objectives of a capacity, like ``ttft:p95:2000 itl:p95:50``: metric, percentile that has to keep the limit, and limit in ms.

Like at a server's client, each round of a session is a request. TTFT runs from when a round was ready to its first token, E2EL to its last.
ITL has two names: ``itl-gap`` (or ``itl``) is every gap between tokens of every round, ``itl-request`` (or ``tpot``) is the mean gap of
each round.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engines.errors import UserError, require
from repro.runs.family import SYNONYMS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

METRICS = ("ttft", "tpot", "itl", "e2el")
MOST_LIMIT_MS = 1e9
"""The largest limit, as for good requests (``--goodput``)."""
EXAMPLE = "'ttft:p95:2000 itl:p95:50'"
_WORD = re.compile(r"([a-z0-9-]+):p(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)")


@dataclass(frozen=True, kw_only=True)
class Objective:
    metric: str
    percentile: float
    limit_s: float

    def __str__(self) -> str:
        return f"{self.metric}:p{self.percentile:g}:{1e3 * self.limit_s:g}"

    @property
    def fewest(self) -> int:
        """The fewest samples of which one lies beyond the percentile; 1 for the maximum."""
        return 1 if self.percentile == 100 else math.ceil(round(100 / (100 - self.percentile), 6))


def parse_objectives(text: str, metrics: Sequence[str] = METRICS) -> tuple[Objective, ...]:
    """Parse objectives. Raises UserError for text that is no objective, or a metric not among ``metrics``, which the system has."""
    parsed: dict[tuple[str, float], Objective] = {}
    for word in text.split():
        match = _WORD.fullmatch(word)
        if match is None:
            raise UserError(f"slo={text!r}: {word!r} is no objective: write METRIC:pQ:MS, like {EXAMPLE}")
        metric, percentile, limit_ms = SYNONYMS.get(match[1], match[1]), float(match[2]), float(match[3])
        require(
            metric in METRICS,
            f"slo={text!r}: metric {metric!r} is unknown: use one of {', '.join((*METRICS, *SYNONYMS))}",
        )
        require(metric in metrics, f"slo={text!r}: {metric} has no value here: use {', '.join(metrics)}")
        require(
            0 < percentile <= 100,
            f"slo={text!r}: percentile p{match[2]} must be above 0 and at most 100: use p95, or p100 for the maximum",
        )
        require(
            0 < limit_ms <= MOST_LIMIT_MS,
            f"slo={text!r}: the limit of {word!r} must be above 0 ms and at most {MOST_LIMIT_MS:g}: give it in milliseconds",
        )
        require(
            (metric, percentile) not in parsed, f"slo={text!r}: {metric} at p{percentile:g} is given twice: keep one"
        )
        parsed[metric, percentile] = Objective(metric=metric, percentile=percentile, limit_s=limit_ms / 1e3)
    require(bool(parsed), f"slo={text!r} has no objective: write some, like {EXAMPLE}")
    return tuple(parsed.values())


def tightest(objectives: Sequence[Objective], *metrics: str) -> float | None:
    """The smallest limit of these metrics, in seconds; None if they have none."""
    return min((objective.limit_s for objective in objectives if objective.metric in metrics), default=None)


class Times(NamedTuple):
    """Samples of times: ``values[i]`` seconds, ``counts[i]`` times, at least once each. Times that never came are infinite."""

    values: Floats
    counts: Ints

    @classmethod
    def of(cls, values: Floats) -> "Times":
        return cls(np.where(np.isnan(values), np.inf, values), np.ones(len(values), dtype=np.int64))

    @classmethod
    def joined(cls, parts: "Sequence[Times]") -> "Times":
        return cls(np.concatenate([part.values for part in parts]), np.concatenate([part.counts for part in parts]))

    @property
    def num(self) -> int:
        return int(self.counts.sum())

    def num_beyond(self, limit_s: float) -> int:
        return int(self.counts[self.values > limit_s].sum())

    def percentile(self, percentile: float) -> float | None:
        """Interpolate linearly between order statistics, as numpy and ``repro bench`` do; None without samples."""
        num = self.num
        if not num:
            return None
        rank = (num - 1) * percentile / 100
        lower = int(np.floor(rank))
        # The samples from rank ``lower`` on are among that many largest values, as each value counts at least once.
        start = max(0, len(self.values) - (num - lower))
        largest = np.argpartition(self.values, start)[start:]
        order = largest[np.argsort(self.values[largest])]
        ends = np.cumsum(self.counts[order])
        ends += num - ends[-1]
        low, high = (
            float(self.values[order[int(np.searchsorted(ends, min(index, num - 1), side="right"))]])
            for index in (lower, lower + 1)
        )
        fraction = rank - lower
        return low if fraction == 0 or low == high else low + (high - low) * fraction


LOAD = "load"
"""Name of the limit that binds if work comes faster than it is done, so that latencies grow with the length of a run."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    times: Mapping[str, Times]
    """Samples by metric."""
    num_rounds: int
    num_good: int
    """Rounds that keep the limit of every objective; an ITL objective is kept by the P95 of their own gaps."""
    num_sessions: int
    num_good_sessions: int
    """Sessions in which every round is good; if turns are served, turns."""
    longest_s: float
    """The longest TTFT."""
    load: float
    """How busy the system is; above 1 it cannot keep up."""
    span_s: float
    """Seconds from the first arrival to the last."""
    stay_s: float
    """Mean seconds of a session, or of a turn, from its arrival to its end."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The joint verdict of some seeds' runs on a plan at a rate."""

    ratios: Mapping[str, float]
    """By objective, and for the load: the percentile divided by its limit."""
    values: Mapping[str, float | None]
    """Percentiles in seconds, by objective; None without samples."""
    attainment: float
    """Share of rounds that keep every limit."""
    session_attainment: float
    """Share of sessions in which every round does."""
    longest_s: float
    stays: float
    """How many times as long as a session the arrivals last; the smallest of any seed."""

    @property
    def worst(self) -> float:
        """The largest ratio of a value to its limit; above 1, a limit is missed."""
        return max(self.ratios.values())

    @property
    def serves(self) -> bool:
        return self.worst <= 1

    @property
    def binds(self) -> str:
        """The objective, or the load, with the largest ratio to its limit."""
        return max(self.ratios, key=lambda name: self.ratios[name])


def verdict_of(samples: Sequence[Sample], objectives: Sequence[Objective]) -> Verdict:
    """Judge some seeds together. Percentiles are over the rounds of all seeds, and the load is that of the busiest seed."""
    values = {
        str(goal): Times.joined([sample.times[goal.metric] for sample in samples]).percentile(goal.percentile)
        for goal in objectives
    }
    ratios = {str(goal): (values[str(goal)] or 0.0) / goal.limit_s for goal in objectives}
    num_rounds, num_sessions = (sum(getattr(each, name) for each in samples) for name in ("num_rounds", "num_sessions"))
    return Verdict(
        ratios=ratios | {LOAD: max(sample.load for sample in samples)},
        values=values,
        attainment=sum(sample.num_good for sample in samples) / num_rounds if num_rounds else 0.0,
        session_attainment=sum(sample.num_good_sessions for sample in samples) / num_sessions if num_sessions else 0.0,
        longest_s=max(sample.longest_s for sample in samples),
        stays=min(sample.span_s / sample.stay_s if sample.stay_s else math.inf for sample in samples),
    )


SPARE = 1.1
"""If sessions come from a file, one seed has at most this many times the rounds of another."""


def is_lost(samples: Sequence[Sample], objectives: Sequence[Objective], num_seeds: float) -> bool:
    """Whether the remaining seeds cannot make up for these: more times are beyond a limit than its percentile allows for all seeds
    together. Then these seeds alone do not serve either."""
    if any(sample.load > 1 for sample in samples):
        return True
    for goal in objectives:
        times = [sample.times[goal.metric] for sample in samples]
        expected = SPARE * sum(part.num for part in times) * num_seeds / len(samples)
        if sum(part.num_beyond(goal.limit_s) for part in times) > (1 - goal.percentile / 100) * expected + 1:
            return True
    return False
