"""Independent random streams from one workload seed, and when requests arrive, in seconds from the first one.

Request 0 always arrives at 0. Random gaps are drawn at one request per second and then divided by
the rate, so runs that differ only in the rate see the same pattern, stretched (common random
numbers): a difference between two rates is not the luck of two draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from engines.errors import UserError
from engines.knobs import check_fields
from repro.workloads.knobs import ArrivalKind, ArrivalKnobs, Burstiness, Rate


def derive_seed(seed: int, *labels: str | int) -> int:
    """Makes a 32-bit seed for the named stream; it is the same on every machine and library version.

    Streams are named rather than numbered in order of use, so that a new stream (or a longer
    workload) never shifts the draws of the others.
    """
    text = "/".join([str(seed), *(str(label) for label in labels)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def shuffled(num_rows: int, seed: int, *labels: str, step: int = 1) -> Iterator[int]:
    """Yields rows in random order, and all of them again in another order, without end; laps have streams ``step``
    apart."""
    for lap in count():
        rng = np.random.default_rng(derive_seed(seed, *labels, lap * step))
        yield from rng.permutation(num_rows).tolist()


_DECIMALS = 6  # microseconds: hides the last bits of exp and log, which differ between machines


@dataclass(frozen=True, kw_only=True)
class ArrivalConfig:
    """``rate`` is in requests per second.

    ``gamma`` takes ``burstiness`` as vLLM's benchmark does: the shape of the gaps' gamma
    distribution, 1 is Poisson, below 1 burstier, above 1 more even (the coefficient of variation of
    the gaps is burstiness ** -0.5). ``burst`` has everything arrive at 0. ``trace`` replays the
    timestamps of ``path``, or of the workload's own file when ``path`` is None; a ``rate``
    rescales the trace's own mean rate.
    """

    kind: ArrivalKind
    rate: Rate | None = None
    burstiness: Burstiness = 1.0
    path: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind in ("poisson", "gamma", "constant") and self.rate is None:
            raise UserError(f"rate=None: arrivals={self.kind!r} need a rate in requests/s")
        if self.kind == "burst" and self.rate is not None:
            raise UserError(f"request_rate={self.rate} has no effect when arrivals='burst': leave it out")
        if self.kind != "gamma" and self.burstiness != 1.0:
            raise UserError(
                f"burstiness={self.burstiness} has no effect when arrivals={self.kind!r}: use 'gamma', or leave it out"
            )
        if self.kind != "trace" and self.path is not None:
            raise UserError(f"path={self.path!r} has no effect when arrivals={self.kind!r}: use 'trace'")


def arrivals_asked(rate: float | None, knobs: ArrivalKnobs) -> ArrivalConfig:
    """Makes Poisson arrivals at a rate, everything at once without one, unless the knobs say otherwise."""
    kind = knobs.arrivals or ("burst" if rate is None else "poisson")
    return ArrivalConfig(kind=kind, rate=rate, burstiness=1.0 if knobs.burstiness is None else knobs.burstiness)


def arrival_times(
    config: ArrivalConfig, num: int, seed: int, *, trace_s: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Returns ``num`` non-decreasing times in seconds; the first n of a longer call are the same.

    ``trace_s`` are the trace's timestamps in rising order, needed for (only) kind ``trace``.
    """
    if config.kind == "trace":
        if trace_s is None:
            raise ValueError("trace_s is needed for trace arrivals")
        times = _replay(trace_s, num, config.rate)
    elif config.kind == "burst":
        times = np.zeros(num)
    else:
        assert config.rate is not None
        times = np.zeros(num)
        times[1:] = np.cumsum(_unit_gaps(config, max(num - 1, 0), seed)) / config.rate
    return np.round(times, _DECIMALS)


def _unit_gaps(config: ArrivalConfig, num: int, seed: int) -> NDArray[np.float64]:
    """Draws gaps with mean 1. Poisson and gamma have their own streams: burstiness 1 is Poisson in law, not draw by
    draw."""
    if config.kind == "constant":
        return np.ones(num)
    rng = np.random.default_rng(derive_seed(seed, "arrivals", config.kind))
    if config.kind == "poisson":
        return -np.log1p(-rng.random(num))
    return rng.standard_gamma(config.burstiness, size=num) / config.burstiness


def _replay(trace_s: NDArray[np.float64], num: int, rate: float | None) -> NDArray[np.float64]:
    """Replays the trace from its first timestamp, and again from its end where it is too short.

    The rate of the whole trace is what gets rescaled, not that of the part used: so a longer
    workload does not move the arrivals of a shorter one.
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
