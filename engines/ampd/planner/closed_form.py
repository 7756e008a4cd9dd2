"""tau_pre and tau_dec by formulas, microseconds instead of a simulation each.

Prefill is an M/G/k queue that starts empty and is watched for as long as the sample takes to arrive, so that it has
an answer for overload too. Decode is a fixed point: the batch is what the rate of tokens and the time of a step make.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engines.ampd.performance import PerformanceModel
from engines.ampd.planner.workload import PlanningWorkload
from engines.errors import require

Floats = npt.NDArray[np.float64]

_QUANTILE = 0.95
_TIMES = (np.arange(6) + 0.5) / 6
"""Shares of the run at which arrivals are looked at."""
_SERVICES = 48
"""Equally likely service times that stand for those of all rounds."""
_BISECTIONS = 30


class PhaseLatency(NamedTuple):
    """P95 over the rounds of a phase."""

    seconds: float
    """Prefill: TTFT. Decode: from the first to the last token of a round."""
    of_slo: float
    """Prefill: TTFT over its objective. Decode: mean ITL of a round over its objective."""


class ClosedForm:
    def __init__(self, model: PerformanceModel, workload: PlanningWorkload) -> None:
        self._model, self._workload = model, workload
        decoding = np.array([entry.decode_tokens for entry in workload.rounds], dtype=np.int64) - 1
        self._mean_decode = float(decoding.mean())
        self._long_decode = float(np.quantile(decoding, _QUANTILE))

    def prefill(self, degree: int, replicas: Sequence[int]) -> list[PhaseLatency]:
        """P95 of wait + service for each number of replicas: an independent wait before each round's service time."""
        each = np.sort(self._workload.prefill_s(self._model, degree))
        services = np.array([part.mean() for part in np.array_split(each, min(_SERVICES, len(each)))])
        workload, servers = self._workload, np.array(replicas)
        rate, rounds = workload.rounds_per_s, workload.rounds_per_s / workload.rate
        # Beyond saturation a session has one prefill in the queue at a time: its rounds share what the backlog grows.
        rounds_sharing = np.where(rate * services.mean() >= servers, rounds, 1.0)[:, None]

        def exceeds(limits_s: Floats) -> npt.NDArray[np.bool_]:
            """Whether P(wait + service > limit) is above 5 %, for each number of replicas."""
            backlog_s = (limits_s[:, None] - services) * rounds_sharing
            tail: Floats = backlog_exceeds(backlog_s, services, servers, rate, workload.span_s).mean(axis=1)
            return tail > 1 - _QUANTILE

        low, high = np.zeros(len(servers)), np.full(len(servers), services[-1] + 1e-9)
        while (above := exceeds(high)).any():
            low, high = np.where(above, high, low), np.where(above, 2 * high, high)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            above = exceeds(middle)
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        return [PhaseLatency(seconds, seconds / workload.slo.ttft_s) for seconds in high.tolist()]

    def decode(self, degree: int, replicas: int) -> PhaseLatency:
        workload = self._workload
        tokens_per_s = workload.rounds_per_s * self._mean_decode / replicas
        batch = self._batch(degree, tokens_per_s, most=max(1.0, len(workload.sessions) / replicas))
        # The number of sequences scatters like a Poisson variable around its mean.
        typical_s = self._decode_s(degree, max(1.0, batch))
        busy_s = self._decode_s(degree, max(1.0, batch + 1.645 * math.sqrt(batch)))
        return PhaseLatency(self._long_decode * typical_s, busy_s / workload.slo.itl_s)

    def _batch(self, degree: int, tokens_per_s: float, most: float) -> float:
        """b = tokens a second x T_dec(b), by bisection; ``most`` where tokens come faster than any batch makes them."""
        if tokens_per_s * self._decode_s(degree, most) >= most:
            return most
        low, high = 0.0, most
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if tokens_per_s * self._decode_s(degree, max(1.0, middle)) > middle else (low, middle)
            )
        return high

    def _decode_s(self, degree: int, batch: float) -> float:
        a, b = self._model.decode[degree].at(batch)
        return a + b * batch


def backlog_exceeds(
    limits_s: Floats, services: Floats, servers: npt.NDArray[np.int64], rate: float, span_s: float
) -> Floats:
    """P(wait > limit) of M/G/k that began empty, averaged over the arrivals of ``span_s`` seconds.

    ``limits_s`` has a row for each number of servers. The backlog is a reflected Brownian motion with the drift rho - 1.
    Its variance is chosen so that below saturation its tail becomes that of Lee and Longton's M/G/k, and Erlang's C says
    who waits at all (all do from rho = 1 on).
    """
    mean_s = float(services.mean())
    loads = rate * mean_s / servers
    waits = np.array(
        [
            erlang_c(count, load * count) if load < 1 else 1.0
            for count, load in zip(servers.tolist(), loads.tolist(), strict=True)
        ]
    )
    # Axes: servers, limits, times.
    variance = (float((services**2).mean()) / (mean_s * servers))[:, None, None]
    drift = np.where(np.abs(loads - 1) > 1e-6, loads - 1, 1e-6)[:, None, None]
    positive = np.maximum(limits_s, 0.0)[:, :, None]
    times = _TIMES * span_s
    root = np.sqrt(variance * times)
    below = (drift * times - positive) / root
    tail = _upper_tail(np.abs(below))
    beyond = np.where(below >= 0, 1 - tail, tail)
    # Its mirror image, exp(2 drift x / variance) Phi(-z), with the exponents joined: one is huge where the other is tiny.
    z = (positive + drift * times) / root
    joined = np.exp(-0.5 * below * below) * _mills(np.maximum(z, 0.0))
    apart = np.exp(np.minimum(2 * drift * positive / variance, 0.0)) * (1 - _upper_tail(-np.minimum(z, 0.0)))
    beyond += np.where(z >= 0, joined, apart)
    found: Floats = np.where(limits_s < 0, 1.0, waits[:, None] * np.clip(beyond, 0.0, 1.0).mean(axis=2))
    return found


def erlang_c(servers: int, offered: float) -> float:
    """Probability that an arrival of M/M/k waits; ``offered`` is lambda E[S], below k."""
    require(servers >= 1, f"servers={servers} must be at least 1")
    require(
        0 <= offered < servers,
        f"offered load {offered:.3g} needs more than {servers} servers: the queue grows without bound, lower the rate",
    )
    blocked = 1.0  # Erlang B, by its recursion: no factorials to overflow
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    load = offered / servers
    return blocked / (1 - load + load * blocked)


def _upper_tail(x: Floats) -> Floats:
    """P(N > x) of a standard normal for x >= 0."""
    tail: Floats = np.exp(-0.5 * x * x) * _mills(x)
    return tail


def _mills(x: Floats) -> Floats:
    """P(N > x) / exp(-x^2 / 2) for x >= 0, by Abramowitz and Stegun 26.2.17: absolute error below 1e-7."""
    t = 1 / (1 + 0.2316419 * x)
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    mills: Floats = series / math.sqrt(2 * math.pi)
    return mills
