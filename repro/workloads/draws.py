"""The random draws of a workload: independent streams from its one seed, arrival times in seconds from the first request, and prompt
lengths in tokens.

Request 0 always arrives at 0. We draw random gaps at one request per second and divide them by
the rate. So runs that differ only in the rate see the same pattern, stretched (common random
numbers). A difference between two rates is not the luck of two draws. Lengths use the inverse
distribution function on one uniform per request. Draw i depends only on the seed and on i, so the
first n lengths of a longer workload are the same.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from statistics import NormalDist
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.errors import UserError, require
from engines.knobs import Checked, Range
from repro.workloads.card import Section
from repro.workloads.knobs import ArrivalKind, ArrivalKnobs, Burstiness, Rate, TimeScale


def derive_seed(seed: int, *labels: str | int) -> int:
    """Make a 32-bit seed for the named stream. It is the same on every machine and with every library version.

    Streams have names instead of numbers in order of use. So a new stream (or a longer workload)
    never shifts the draws of the others.
    """
    text = "/".join([str(seed), *(str(label) for label in labels)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def shuffled(num_rows: int, seed: int, *labels: str, step: int = 1) -> Iterator[int]:
    """Yield row numbers in random order, and then again and again in other orders, without end. Lap n uses stream n * ``step``."""
    for lap in count():
        rng = np.random.default_rng(derive_seed(seed, *labels, lap * step))
        yield from rng.permutation(num_rows).tolist()


_DECIMALS = 6  # microseconds: hides the last bits of exp and log, which differ between machines


@dataclass(frozen=True, kw_only=True)
class ArrivalConfig(Checked):
    """How requests arrive. ``rate`` is in requests per second.

    ``gamma`` takes ``burstiness`` as vLLM's benchmark does. It is the shape of the gaps' gamma
    distribution: 1 is Poisson, below 1 is burstier, above 1 is more even (the coefficient of variation
    of the gaps is burstiness ** -0.5). With ``burst`` all requests arrive at 0. ``trace`` replays the
    timestamps of the workload's own file, divided by ``time_scale``, or rescales the trace's own mean
    rate to ``rate``.
    """

    kind: ArrivalKind
    rate: Rate | None = None
    burstiness: Burstiness = 1.0
    time_scale: TimeScale | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.time_scale is not None:
            require(
                self.kind == "trace",
                f"time_scale={self.time_scale:g} has no effect when arrivals={self.kind!r}: use 'trace', or leave it out",
            )
            require(
                self.rate is None,
                f"time_scale={self.time_scale:g} and request_rate={self.rate} both say how fast a trace comes: leave one out",
            )
        if self.kind in ("poisson", "gamma", "constant") and self.rate is None:
            raise UserError(f"rate=None: arrivals={self.kind!r} need a rate in requests/s")
        if self.kind == "burst" and self.rate is not None:
            raise UserError(f"request_rate={self.rate} has no effect when arrivals='burst': leave it out")
        if self.kind != "gamma" and self.burstiness != 1.0:
            raise UserError(
                f"burstiness={self.burstiness} has no effect when arrivals={self.kind!r}: use 'gamma', or leave it out"
            )


def arrivals_of(rate: float | None, knobs: ArrivalKnobs) -> ArrivalConfig:
    """Make Poisson arrivals at a rate, or a burst without one, unless the knobs say otherwise."""
    kind = knobs.arrivals or ("burst" if rate is None else "poisson")
    burstiness = 1.0 if knobs.burstiness is None else knobs.burstiness
    return ArrivalConfig(kind=kind, rate=rate, burstiness=burstiness, time_scale=knobs.time_scale)


def arrival_times(
    config: ArrivalConfig, num: int, seed: int, *, trace_s: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Return ``num`` non-decreasing times in seconds. The first n times of a longer call are the same.

    ``trace_s`` are the trace's timestamps in rising order, which only kind ``trace`` needs.
    """
    if config.kind == "trace":
        if trace_s is None:
            raise ValueError("trace_s is needed for trace arrivals")
        times = _replay(trace_s, num, config.rate)
        if config.time_scale is not None:
            times = times / config.time_scale
    elif config.kind == "burst":
        times = np.zeros(num)
    else:
        assert config.rate is not None
        # Poisson and gamma have their own streams: burstiness 1 gives Poisson's distribution, but not the same draws.
        rng, num_gaps = np.random.default_rng(derive_seed(seed, "arrivals", config.kind)), max(num - 1, 0)
        if config.kind == "constant":
            gaps = np.ones(num_gaps)
        elif config.kind == "poisson":
            gaps = -np.log1p(-rng.random(num_gaps))
        else:
            gaps = rng.standard_gamma(config.burstiness, size=num_gaps) / config.burstiness
        times = np.zeros(num)
        times[1:] = np.cumsum(gaps) / config.rate
    return np.round(times, _DECIMALS)


def _replay(trace_s: NDArray[np.float64], num: int, rate: float | None) -> NDArray[np.float64]:
    """Replay the trace from its first timestamp, and repeat it after its end if it is too short.

    We rescale the rate of the whole trace, not of the part that is used. So a longer workload
    does not move the arrivals of a shorter one.
    """
    relative = trace_s - trace_s[0]
    span = float(relative[-1])
    if span == 0 and (rate is not None or num > len(relative)):
        raise UserError(
            f"the trace's {len(relative)} timestamps are all equal: it has no rate to rescale or to repeat,"
            f" use arrivals='burst'"
        )
    mean_gap = span / (len(relative) - 1) if len(relative) > 1 else 0.0
    index = np.arange(num)
    times = relative[index % len(relative)] + (index // len(relative)) * (span + mean_gap)
    return times / (mean_gap * rate) if rate is not None else times


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Length = Annotated[int, Range(1, 2**31 - 1)]

NORMAL = NormalDist()
SMALLEST_UNIFORM = 2.0**-53
"""Generator.random() can return 0, whose quantile is minus infinity."""


class LogNormalParameters(NamedTuple):
    """The distribution exp(Normal(mu, sigma)). ``mu`` and ``sigma`` describe the logarithm of a token count."""

    mu: float
    sigma: float

    def quantiles(self, uniforms: Floats) -> Floats:
        """Return the quantiles of these shares."""
        normals = np.array([NORMAL.inv_cdf(share) for share in uniforms.tolist()], dtype=np.float64)
        return np.exp(self.mu + self.sigma * normals)


@dataclass(frozen=True, kw_only=True)
class LogNormalLengths(Section):
    """Lengths of offset + exp(Normal(mu, sigma)), clipped to [low, high] and rounded to whole tokens.

    Clipped draws stay at the bound. We do not draw them again.
    """

    distribution: Literal["lognormal"] = "lognormal"
    mu: Annotated[float, Range(-100, 100)]
    sigma: Annotated[float, Range(above=0, most=100)]
    low: Length
    high: Length
    offset: Annotated[int, Range(0, 2**31 - 1)] = 0

    def draw(self, num: int, rng: np.random.Generator) -> Ints:
        uniforms = np.maximum(rng.random(num), SMALLEST_UNIFORM)
        lengths = self.offset + LogNormalParameters(self.mu, self.sigma).quantiles(uniforms)
        return np.rint(np.clip(lengths, self.low, self.high)).astype(np.int64)


def fit_quantiles(p_low: float, x_low: float, p_high: float, x_high: float) -> LogNormalParameters:
    """Fit a log-normal to two quantiles: P(X <= x_low) = p_low and P(X <= x_high) = p_high."""
    z_low, z_high = NORMAL.inv_cdf(p_low), NORMAL.inv_cdf(p_high)
    sigma = math.log(x_high / x_low) / (z_high - z_low)
    return LogNormalParameters(math.log(x_low) - sigma * z_low, sigma)
