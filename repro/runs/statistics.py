"""Confidence intervals of means over repeats, of ratios paired by seed, and of shares of right answers. Tests whether two runs on the same
problems differ."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from engines.errors import UserError

Key = TypeVar("Key")
"""Pairs values of two runs: a seed, or a place."""


_Z = 1.959963984540054
"""Standard deviations on either side of a normal mean that hold 95 % of its values."""


def wilson_interval(successes: int, n: int, z: float = _Z) -> tuple[float, float]:
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


def points_apart(pair: Discordance) -> "Interval":
    """Percentage points by which the first run solves more problems. The 95 % interval is that of a paired difference of shares (Agresti
    and Min, 2005: add half a problem to each of four cells)."""
    more, fewer, n = pair.only_first + 0.5, pair.only_second + 0.5, pair.n + 2
    centre, half = (more - fewer) / n, _Z * math.sqrt(more + fewer - (more - fewer) ** 2 / n) / n
    low, high = 100 * max(-1.0, centre - half), 100 * min(1.0, centre + half)
    mean = 100 * (pair.only_first - pair.only_second) / pair.n
    return Interval(mean=mean, half_width=(high - low) / 2, n=pair.n, confidence=0.95, bounds=(low, high))


# -- repeats ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Interval:
    """mean +- half_width. half_width is None with fewer than two repeats, and mean with none."""

    mean: float | None
    half_width: float | None
    """For an asymmetric interval, half its length."""
    n: int
    confidence: float
    bounds: tuple[float, float] | None = None
    """The ends of an asymmetric interval."""

    @property
    def low(self) -> float | None:
        if self.bounds is not None:
            return self.bounds[0]
        return None if self.mean is None or self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        if self.bounds is not None:
            return self.bounds[1]
        return None if self.mean is None or self.half_width is None else self.mean + self.half_width

    @property
    def arms(self) -> tuple[float, float]:
        """Distances from the mean to the lower and upper end; 0 if there is no interval."""
        if self.mean is None or self.low is None or self.high is None:
            return 0.0, 0.0
        return self.mean - self.low, self.high - self.mean


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


def crossed_interval(table: Sequence[Sequence[float]], confidence: float = 0.95) -> Interval:
    """Interval of the mean of a table, such as models by traces, as if rows and columns were samples. Cells of one row share its effect, so
    they are no independent repeats. An effect that is no larger than the residual counts as none. The degrees of freedom are
    Satterthwaite's; with two effects, at least those of the effect with the fewest."""
    data = np.asarray(table, dtype=np.float64)
    num_rows, num_columns = data.shape
    mean, rows, columns = float(data.mean()), data.mean(axis=1), data.mean(axis=0)
    if min(data.shape) < 2:
        return Interval(mean=mean, half_width=None, n=data.size, confidence=confidence)
    residuals = data - rows[:, None] - columns[None, :] + mean
    free = (num_rows - 1) * (num_columns - 1)
    residual = float((residuals**2).sum()) / free
    effects = [
        (float(num * ((means - mean) ** 2).sum()) / (means.size - 1), means.size - 1)
        for num, means in ((num_columns, rows), (num_rows, columns))
    ]
    large = [(square, degrees) for square, degrees in effects if square > residual]
    if len(large) == 2:
        square = sum(effect for effect, _ in large) - residual
        spread = sum(effect**2 / degrees for effect, degrees in (*large, (residual, free)))
        degrees = max(int(square**2 / spread), min(degrees for _, degrees in large))
    else:
        square, degrees = large[0] if large else (float(((data - mean) ** 2).sum()) / (data.size - 1), data.size - 1)
    half = student_t_two_sided(confidence, degrees) * math.sqrt(square / data.size)
    return Interval(mean=mean, half_width=half, n=data.size, confidence=confidence)


def paired_ratio(
    ours: Mapping[Key, float], theirs: Mapping[Key, float], *, confidence: float = 0.95, percent: bool = False
) -> Interval:
    """Ratio of ours to theirs over the seeds that both have, or by how many percent ours exceed theirs. It is Student's interval of the
    mean logarithm, converted back. Arrivals and lengths, which a seed fixes, cancel, and a half is as far from 1 as a double. If a value is
    not positive, this is the ratio of the means, without an interval."""
    seeds = [seed for seed in ours if seed in theirs]
    pairs = [(ours[seed], theirs[seed]) for seed in seeds]
    if not pairs or any(a <= 0 or b <= 0 for a, b in pairs):
        above, below = sum(a for a, _ in pairs), sum(b for _, b in pairs)
        ratio = Interval(mean=above / below if below else None, half_width=None, n=len(pairs), confidence=confidence)
    else:
        ratio = from_logarithms(mean_interval([math.log(a / b) for a, b in pairs], confidence))
    return as_percent(ratio) if percent else ratio


def from_logarithms(logs: Interval) -> Interval:
    """The ratio whose logarithm lies in ``logs``."""
    if logs.mean is None:
        return logs
    mean = math.exp(logs.mean)
    if logs.low is None or logs.high is None:
        return replace(logs, mean=mean)
    low, high = math.exp(logs.low), math.exp(logs.high)
    return replace(logs, mean=mean, half_width=(high - low) / 2, bounds=(low, high))


def as_percent(ratio: Interval) -> Interval:
    """A ratio's excess over 1, in percent."""
    if ratio.mean is None:
        return ratio
    half = None if ratio.half_width is None else 100 * ratio.half_width
    bounds = None if ratio.bounds is None else (100 * (ratio.bounds[0] - 1), 100 * (ratio.bounds[1] - 1))
    return replace(ratio, mean=100 * (ratio.mean - 1), half_width=half, bounds=bounds)


def decimals(interval: Interval, max_decimals: int = 2) -> int:
    """Decimals that suit an interval: to the first digit of the half width, or to the second if the first is 3 or less."""
    half = interval.half_width
    if not half or not math.isfinite(half):
        return max_decimals
    exponent = math.floor(math.log10(half))
    return min(max_decimals, max(0, (1 if half / 10**exponent < 4 else 0) - exponent))


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
