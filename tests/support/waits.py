"""Waits of queues, exactly: what a simulated queue is held against. Nothing here is an approximation.

Poisson arrivals, one queue before all servers, first come, first served. Times are in mean service times; ``load`` is
of each server, so that ``load * servers`` customers arrive in one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class SteadyWait:
    """How long a customer waits who finds the queue in its steady state."""

    mean: float
    exceeds: Callable[[float], float]
    """P(wait > t)."""

    def quantile(self, share: float) -> float:
        low, high = 0.0, 1.0
        if self.exceeds(low) <= 1 - share:
            return 0.0
        while self.exceeds(high) > 1 - share:
            low, high = high, 2 * high
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.exceeds(middle) > 1 - share else (low, middle)
        return high


def markov(servers: int, load: float) -> SteadyWait:
    """M/M/k by Erlang: who waits at all, and an exponential from there."""
    offered = load * servers
    terms = np.array([_poisson(count, offered) for count in range(servers + 1)])
    blocked = terms[-1] / terms.sum()
    waits = blocked / (1 - load * (1 - blocked))
    pace = servers - offered
    return SteadyWait(mean=waits / pace, exceeds=lambda time: waits * math.exp(-pace * time))


def deterministic(servers: int, load: float) -> SteadyWait:
    """M/D/k: Crommelin's (1932) equations for who is there, Franx's (2001) sum of positive terms for the wait."""
    offered = load * servers
    present = _present(servers, offered)
    queued = np.cumsum(present)[servers:]  # at most 0, 1, ... customers queue

    def exceeds(time: float) -> float:
        # One service time after the customer came and a whole number of them, whoever stands before it is gone.
        turns = math.floor(time) + 1
        arriving = offered * (turns - time)
        most = turns * servers - 1
        counts = np.arange(most + 1)
        at_most = queued[np.minimum(most - counts, len(queued) - 1)]
        return 1 - float(
            sum(_poisson(int(count), arriving) * share for count, share in zip(counts, at_most, strict=True))
        )

    queue = np.arange(len(present) - servers) @ present[servers:]
    return SteadyWait(mean=float(queue) / offered, exceeds=exceeds)


def _present(servers: int, offered: float) -> Floats:
    """P(n customers are there): after one service time, those who queued before are served or queue, and others came."""
    most = servers + math.ceil(40 / (1 - offered / servers))
    states = np.arange(most + 1)
    came = np.array([_poisson(count, offered) for count in range(most + servers + 1)])
    stayed = np.maximum(states - servers, 0)
    moves = states[:, None] - stayed[None, :]
    turn = np.where(moves >= 0, came[np.maximum(moves, 0)], 0.0)
    balance = np.vstack(((turn - np.eye(most + 1))[:-1], np.ones(most + 1)))
    present: Floats = np.linalg.solve(balance, np.eye(most + 1)[-1])
    return present


def _poisson(count: int, mean: float) -> float:
    return math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) if mean > 0 else float(count == 0)
