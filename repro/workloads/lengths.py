"""Prompt-length distributions, in tokens, and how their parameters follow from published statistics.

Draws use the inverse distribution function on one uniform per request: draw i depends on the seed
and on i alone, so the first n lengths of a longer workload are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from engines.errors import UserError

_NORMAL = NormalDist()
_SMALLEST_UNIFORM = 2.0**-53  # Generator.random() can return 0, whose quantile is minus infinity


@dataclass(frozen=True, kw_only=True)
class LogNormalParameters:
    """exp(Normal(mu, sigma)); mu and sigma are of the logarithm of a token count."""

    mu: float
    sigma: float


@dataclass(frozen=True, kw_only=True)
class LogNormalLengths:
    """offset + exp(Normal(mu, sigma)), clipped to [low, high] and rounded to whole tokens.

    Clipped draws stay, at the bound: they are not drawn again.
    """

    mu: float
    sigma: float
    low: int
    high: int
    offset: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mu) and math.isfinite(self.sigma) and self.sigma > 0):
            raise UserError(f"mu={self.mu}, sigma={self.sigma}: both must be finite and sigma above 0")
        if self.offset < 0:
            raise UserError(f"offset={self.offset} must not be negative")
        if not self.offset < self.low <= self.high:
            raise UserError(f"low={self.low}, high={self.high}: need offset={self.offset} < low <= high")

    def draw(self, num: int, rng: np.random.Generator) -> NDArray[np.int64]:
        uniforms = np.maximum(rng.random(num), _SMALLEST_UNIFORM)
        normals = np.array([_NORMAL.inv_cdf(u) for u in uniforms.tolist()], dtype=np.float64)
        lengths = self.offset + np.exp(self.mu + self.sigma * normals)
        return np.rint(np.clip(lengths, self.low, self.high)).astype(np.int64)

    def mean_clipped_at(self, high: float) -> float:
        """E[min(max(X, low), high)] in closed form (before rounding)."""
        bottom, top = self.low - self.offset, high - self.offset
        z_bottom = (math.log(bottom) - self.mu) / self.sigma
        z_top = (math.log(top) - self.mu) / self.sigma
        inside = math.exp(self.mu + self.sigma**2 / 2) * (
            _NORMAL.cdf(z_top - self.sigma) - _NORMAL.cdf(z_bottom - self.sigma)
        )
        return self.offset + bottom * _NORMAL.cdf(z_bottom) + inside + top * (1 - _NORMAL.cdf(z_top))

    @property
    def mean(self) -> float:
        return self.mean_clipped_at(self.high)

    def quantile(self, p: float) -> float:
        return min(max(self.offset + math.exp(self.mu + self.sigma * _NORMAL.inv_cdf(p)), self.low), self.high)


@dataclass(frozen=True, kw_only=True)
class EmpiricalLengths:
    """Draws the observed lengths themselves, with replacement."""

    values: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.values or min(self.values) < 1:
            raise UserError("values must be a list of lengths, each at least 1 token")
        object.__setattr__(self, "values", tuple(sorted(self.values)))

    def draw(self, num: int, rng: np.random.Generator) -> NDArray[np.int64]:
        table = np.array(self.values, dtype=np.int64)
        return table[(rng.random(num) * len(table)).astype(np.int64)]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    def quantile(self, p: float) -> float:
        return float(self.values[min(int(p * len(self.values)), len(self.values) - 1)])


LengthDistribution = LogNormalLengths | EmpiricalLengths


def fit_mean_std(mean: float, std: float) -> LogNormalParameters:
    """Method of moments: sigma^2 = ln(1 + std^2/mean^2), mu = ln(mean) - sigma^2/2."""
    variance = math.log1p((std / mean) ** 2)
    return LogNormalParameters(mu=math.log(mean) - variance / 2, sigma=math.sqrt(variance))


def fit_mean_median(mean: float, median: float) -> LogNormalParameters:
    """mu = ln(median), sigma^2 = 2 ln(mean/median); a log-normal's mean is above its median."""
    if not 0 < median < mean:
        raise UserError(f"median={median} must be above 0 and below mean={mean}: use another fit")
    return LogNormalParameters(mu=math.log(median), sigma=math.sqrt(2 * math.log(mean / median)))


def fit_quantiles(p_low: float, x_low: float, p_high: float, x_high: float) -> LogNormalParameters:
    """Through two quantiles: P(X <= x_low) = p_low and P(X <= x_high) = p_high."""
    if not (0 < p_low < p_high < 1 and 0 < x_low < x_high):
        raise UserError(f"quantiles ({p_low}, {x_low}) and ({p_high}, {x_high}) must rise in both")
    z_low, z_high = _NORMAL.inv_cdf(p_low), _NORMAL.inv_cdf(p_high)
    sigma = math.log(x_high / x_low) / (z_high - z_low)
    return LogNormalParameters(mu=math.log(x_low) - sigma * z_low, sigma=sigma)


def fit_mean_sigma(mean: float, sigma: float) -> LogNormalParameters:
    """A mean, and the spread of the logarithm taken from elsewhere."""
    return LogNormalParameters(mu=math.log(mean) - sigma**2 / 2, sigma=sigma)


def fit_statistics(statistics: Mapping[str, float]) -> LogNormalParameters:
    """The fit that a card's named statistics call for."""
    known = {
        frozenset({"mean", "std"}): lambda s: fit_mean_std(s["mean"], s["std"]),
        frozenset({"mean", "median"}): lambda s: fit_mean_median(s["mean"], s["median"]),
        frozenset({"p10", "p90"}): lambda s: fit_quantiles(0.1, s["p10"], 0.9, s["p90"]),
        frozenset({"mean", "sigma"}): lambda s: fit_mean_sigma(s["mean"], s["sigma"]),
    }
    fit = known.get(frozenset(statistics))
    if fit is None:
        options = "; ".join(" and ".join(sorted(names)) for names in known)
        raise UserError(f"statistics={sorted(statistics)} determine no log-normal: give one of {options}")
    if min(statistics.values()) <= 0:
        raise UserError(f"statistics={dict(statistics)} must all be above 0")
    return fit(statistics)
