"""Prompt-length distributions, in tokens, and how their parameters follow from published statistics.

Draws use the inverse distribution function on one uniform per request: draw i depends on the seed
and on i alone, so the first n lengths of a longer workload are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.errors import UserError, require
from engines.knobs import Range
from repro.workloads.schema import Part

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Length = Annotated[int, Range(1, 2**31 - 1)]

NORMAL = NormalDist()
SMALLEST_UNIFORM = 2.0**-53
"""Generator.random() can return 0, whose quantile is minus infinity."""


class LogNormalParameters(NamedTuple):
    """exp(Normal(mu, sigma)); mu and sigma are of the logarithm of a token count."""

    mu: float
    sigma: float

    def at(self, uniforms: Floats) -> Floats:
        """Returns the quantiles of these shares."""
        normals = np.array([NORMAL.inv_cdf(each) for each in uniforms.tolist()], dtype=np.float64)
        return np.exp(self.mu + self.sigma * normals)


@dataclass(frozen=True, kw_only=True)
class LogNormalLengths(Part):
    """offset + exp(Normal(mu, sigma)), clipped to [low, high] and rounded to whole tokens.

    Clipped draws stay, at the bound: they are not drawn again.
    """

    distribution: Literal["lognormal"] = "lognormal"
    mu: Annotated[float, Range(-100, 100)]
    sigma: Annotated[float, Range(above=0, most=100)]
    low: Length
    high: Length
    offset: Annotated[int, Range(0, 2**31 - 1)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.offset < self.low <= self.high:
            raise UserError(f"low={self.low}, high={self.high}: need offset={self.offset} < low <= high")

    def draw(self, num: int, rng: np.random.Generator) -> Ints:
        uniforms = np.maximum(rng.random(num), SMALLEST_UNIFORM)
        lengths = self.offset + LogNormalParameters(self.mu, self.sigma).at(uniforms)
        return np.rint(np.clip(lengths, self.low, self.high)).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class EmpiricalLengths(Part):
    """Draws the observed lengths themselves, with replacement."""

    distribution: Literal["empirical"] = "empirical"
    values: tuple[Length, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.values), "values must be a list of lengths, each at least 1 token")
        object.__setattr__(self, "values", tuple(sorted(self.values)))

    def draw(self, num: int, rng: np.random.Generator) -> Ints:
        table = np.array(self.values, dtype=np.int64)
        return table[(rng.random(num) * len(table)).astype(np.int64)]


LengthDistribution = LogNormalLengths | EmpiricalLengths


def fit_quantiles(p_low: float, x_low: float, p_high: float, x_high: float) -> LogNormalParameters:
    """Fits two quantiles: P(X <= x_low) = p_low and P(X <= x_high) = p_high."""
    if not (0 < p_low < p_high < 1 and 0 < x_low < x_high):
        raise UserError(f"quantiles ({p_low}, {x_low}) and ({p_high}, {x_high}) must rise in both")
    z_low, z_high = NORMAL.inv_cdf(p_low), NORMAL.inv_cdf(p_high)
    sigma = math.log(x_high / x_low) / (z_high - z_low)
    return LogNormalParameters(math.log(x_low) - sigma * z_low, sigma)


_SIGMA: Mapping[frozenset[str], Callable[[Mapping[str, float]], float]] = {
    frozenset({"mean", "std"}): lambda s: math.sqrt(math.log1p((s["std"] / s["mean"]) ** 2)),
    frozenset({"mean", "median"}): lambda s: math.sqrt(2 * math.log(s["mean"] / s["median"])),
    frozenset({"mean", "sigma"}): lambda s: s["sigma"],
}
"""The spread of the logarithm beside a mean: by the method of moments, by the median, or taken from elsewhere."""
_QUANTILES = frozenset({"p10", "p90"})


def fit_statistics(statistics: Mapping[str, float]) -> LogNormalParameters:
    """Makes the fit that a card's named statistics call for."""
    given = frozenset(statistics)
    if given not in {*_SIGMA, _QUANTILES}:
        options = "; ".join(" and ".join(sorted(names)) for names in (*_SIGMA, _QUANTILES))
        raise UserError(f"statistics={sorted(statistics)} determine no log-normal: give one of {options}")
    require(min(statistics.values()) > 0, f"statistics={dict(statistics)} must all be above 0")
    if given == _QUANTILES:
        return fit_quantiles(0.1, statistics["p10"], 0.9, statistics["p90"])
    mean = statistics["mean"]
    if statistics.get("median", 0) >= mean:
        raise UserError(f"median={statistics['median']} must be below mean={mean}: use another fit")
    sigma = _SIGMA[given](statistics)
    return LogNormalParameters(math.log(mean) - sigma**2 / 2, sigma)
