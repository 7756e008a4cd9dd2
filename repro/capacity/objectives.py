"""Objectives of a capacity: ``ttft:p95:2000 itl:p95:50``, the metric, the percentile that has to keep the limit, and the limit in ms.

As at the client of a server, each round of a session is a request. TTFT runs from when a round was ready to its first token, E2EL to its
last. ITL has two names: ``itl-gap`` (or ``itl``) is every gap between tokens of every round, ``itl-request`` (or ``tpot``) is the mean gap of
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
"""As the longest of a good request (``--goodput``)."""
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
        """Samples that put one beyond the percentile; 1 of the maximum."""
        return 1 if self.percentile == 100 else math.ceil(round(100 / (100 - self.percentile), 6))


def parse_objectives(text: str, metrics: Sequence[str] = METRICS) -> tuple[Objective, ...]:
    """Raises UserError for what is none, or of a metric that is not among ``metrics``, which a system has."""
    found: dict[tuple[str, float], Objective] = {}
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
            (metric, percentile) not in found, f"slo={text!r}: {metric} at p{percentile:g} is given twice: keep one"
        )
        found[metric, percentile] = Objective(metric=metric, percentile=percentile, limit_s=limit_ms / 1e3)
    require(bool(found), f"slo={text!r} has no objective: write some, like {EXAMPLE}")
    return tuple(found.values())


def tightest(objectives: Sequence[Objective], *metrics: str) -> float | None:
    """The least limit of these metrics, in seconds."""
    return min((each.limit_s for each in objectives if each.metric in metrics), default=None)


class Times(NamedTuple):
    """``values[i]`` seconds, ``counts[i]`` times, at least once each; what never came took for ever."""

    values: Floats
    counts: Ints

    @classmethod
    def of(cls, values: Floats) -> "Times":
        return cls(np.where(np.isnan(values), np.inf, values), np.ones(len(values), dtype=np.int64))

    @classmethod
    def joined(cls, parts: "Sequence[Times]") -> "Times":
        return cls(np.concatenate([each.values for each in parts]), np.concatenate([each.counts for each in parts]))

    @property
    def num(self) -> int:
        return int(self.counts.sum())

    def beyond(self, limit_s: float) -> int:
        return int(self.counts[self.values > limit_s].sum())

    def percentile(self, percentile: float) -> float | None:
        """Interpolates linearly between order statistics, as numpy does and as ``repro bench`` reports; None of nothing."""
        num = self.num
        if not num:
            return None
        place = (num - 1) * percentile / 100
        below = int(np.floor(place))
        # Those from there on are among as many of the largest, as each counts at least once.
        least = max(0, len(self.values) - (num - below))
        largest = np.argpartition(self.values, least)[least:]
        order = largest[np.argsort(self.values[largest])]
        ends = np.cumsum(self.counts[order])
        ends += num - ends[-1]
        low, high = (
            float(self.values[order[int(np.searchsorted(ends, min(index, num - 1), side="right"))]])
            for index in (below, below + 1)
        )
        part = place - below
        return low if part == 0 or low == high else low + (high - low) * part


LOAD = "load"
"""What binds where work comes faster than it is done, so that latencies grow with the length of a run."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    times: Mapping[str, Times]
    """By metric."""
    num_rounds: int
    num_good: int
    """Rounds that keep the limit of every objective, with the P95 of their own gaps where it is of ITL."""
    num_sessions: int
    num_good_sessions: int
    """Sessions of which every round is good; where turns are served, turns."""
    longest_s: float
    """The longest TTFT."""
    load: float
    """Above 1 the run is none that could go on."""
    span_s: float
    """From the first arrival to the last."""
    stay_s: float
    """Mean time of a session, or of a turn, from its arrival to its end."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the runs of some seeds say together of a plan at a rate."""

    ratios: Mapping[str, float]
    """By objective, and of the load: how many times its limit a percentile is."""
    values: Mapping[str, float | None]
    """Seconds, by objective."""
    attainment: float
    """Share of rounds that keep every limit themselves."""
    session_attainment: float
    """Share of sessions of which every round does."""
    longest_s: float
    stays: float
    """How many times as long as a session arrivals last; the fewest of any seed."""

    @property
    def worst(self) -> float:
        """How many times its limit is what is nearest to it, or farthest beyond."""
        return max(self.ratios.values())

    @property
    def serves(self) -> bool:
        return self.worst <= 1

    @property
    def binds(self) -> str:
        """What is nearest to its limit, or farthest beyond."""
        return max(self.ratios, key=lambda name: self.ratios[name])


def judged(samples: Sequence[Sample], objectives: Sequence[Objective]) -> Verdict:
    """Percentiles are of the rounds of all seeds together; the load is that of the busiest seed."""
    values = {
        str(each): Times.joined([sample.times[each.metric] for sample in samples]).percentile(each.percentile)
        for each in objectives
    }
    ratios = {str(each): (values[str(each)] or 0.0) / each.limit_s for each in objectives}
    num, num_sessions = (sum(getattr(each, name) for each in samples) for name in ("num_rounds", "num_sessions"))
    return Verdict(
        ratios=ratios | {LOAD: max(sample.load for sample in samples)},
        values=values,
        attainment=sum(sample.num_good for sample in samples) / num if num else 0.0,
        session_attainment=sum(sample.num_good_sessions for sample in samples) / num_sessions if num_sessions else 0.0,
        longest_s=max(sample.longest_s for sample in samples),
        stays=min(sample.span_s / sample.stay_s if sample.stay_s else math.inf for sample in samples),
    )


SPARE = 1.1
"""Rounds of a seed whose sessions are drawn from a file, over those of another: no more than this."""


def is_lost(samples: Sequence[Sample], objectives: Sequence[Objective], num_seeds: float) -> bool:
    """Whether the seeds that are left can no longer make up for these: more times are beyond a limit than its percentile allows of
    all together. Then these alone do not serve either."""
    if any(sample.load > 1 for sample in samples):
        return True
    for each in objectives:
        times = [sample.times[each.metric] for sample in samples]
        num = SPARE * sum(part.num for part in times) * num_seeds / len(samples)
        if sum(part.beyond(each.limit_s) for part in times) > (1 - each.percentile / 100) * num + 1:
            return True
    return False
