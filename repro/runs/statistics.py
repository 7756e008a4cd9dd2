"""Intervals: of means over repeats, of shares of right answers, and whether two runs on the same problems differ."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.errors import UserError


def wilson_interval(successes: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson score interval of a proportion, 95 % by default; undefined for n = 0."""
    share = successes / n
    centre = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


@dataclass(frozen=True, kw_only=True)
class Discordance:
    """Problems that exactly one of two runs solves."""

    n: int
    only_first: int
    only_second: int

    @property
    def p_value(self) -> float:
        """McNemar's exact test, two-sided: each discordant problem is a fair coin under the null hypothesis."""
        discordant, fewer = self.only_first + self.only_second, min(self.only_first, self.only_second)
        tail = sum(math.comb(discordant, k) for k in range(fewer + 1))
        return min(1.0, 2 * tail / 2**discordant)


def discordance(first: Sequence[bool], second: Sequence[bool]) -> Discordance:
    """Compare two runs over the same problems, in the same order."""
    pairs = list(zip(first, second, strict=True))
    return Discordance(
        n=len(pairs), only_first=sum(a and not b for a, b in pairs), only_second=sum(b and not a for a, b in pairs)
    )


# -- repeats ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Interval:
    """mean +- half_width; half_width is None with fewer than two repeats, mean with none."""

    mean: float | None
    half_width: float | None
    n: int
    confidence: float


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's interval of the mean over independent repeats: t(n-1) * s / sqrt(n), s with ddof 1."""
    if not 0 < confidence < 1:
        raise UserError(f"confidence={confidence} must be in (0, 1)")
    data = np.asarray(values, dtype=np.float64)
    if not np.isfinite(data).all():
        raise ValueError("an interval needs finite values")
    n = int(data.size)
    mean = float(data.mean()) if n else None
    if n < 2:
        return Interval(mean=mean, half_width=None, n=n, confidence=confidence)
    quantile = student_t_two_sided(confidence, n - 1)
    return Interval(mean=mean, half_width=quantile * float(data.std(ddof=1)) / math.sqrt(n), n=n, confidence=confidence)


@functools.cache
def student_t_two_sided(confidence: float, degrees: int) -> float:
    """t with P(|T| <= t) = confidence, by bisection on the angle atan(t / sqrt(degrees))."""
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        if _student_central_mass(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _student_central_mass(theta: float, degrees: int) -> float:
    """P(|T| <= t) for whole degrees of freedom: Abramowitz and Stegun 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(theta), math.cos(theta)
    is_odd = degrees % 2 == 1
    term = cosine if is_odd else 1.0
    total = 0.0
    for k in range(2 if is_odd else 1, degrees, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    return 2 / math.pi * (theta + sine * total) if is_odd else sine * total
