"""Closed forms of waiting in queues: yardsticks for the simulation, and coefficients that need none."""

from __future__ import annotations

import math

from engines.errors import require


def pollaczek_khinchine_s(rate: float, mean_s: float, cv2: float) -> float:
    """Mean wait of M/G/1: rho / (1 - rho) (1 + cv^2) / 2 E[S]; cv2 is 0 for M/D/1 and 1 for M/M/1."""
    load = rate * mean_s
    _check_load(load, 1)
    return load / (1 - load) * (1 + cv2) / 2 * mean_s


def erlang_c(servers: int, offered: float) -> float:
    """Probability that an arrival of M/M/k waits; ``offered`` is lambda E[S], below k."""
    _check_load(offered, servers)
    blocked = 1.0  # Erlang B, by its recursion: no factorials to overflow
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    load = offered / servers
    return blocked / (1 - load + load * blocked)


def mean_wait_s(servers: int, rate: float, mean_s: float, cv2: float = 1.0) -> float:
    """M/G/k by Lee and Longton: the wait of M/M/k times (1 + cv^2) / 2. Exact for M/M/k and M/G/1."""
    offered = rate * mean_s
    return erlang_c(servers, offered) / (servers / mean_s - rate) * (1 + cv2) / 2


def wait_quantile_s(quantile: float, servers: int, rate: float, mean_s: float, cv2: float = 1.0) -> float:
    """M/G/k with an exponential tail of the mean above; exact for M/M/k. 0 where fewer wait at all."""
    require(0 < quantile < 1, f"quantile={quantile} must be between 0 and 1")
    waits = erlang_c(servers, rate * mean_s)
    if waits <= 1 - quantile:
        return 0.0
    return math.log(waits / (1 - quantile)) * mean_wait_s(servers, rate, mean_s, cv2) / waits


def _check_load(offered: float, servers: int) -> None:
    require(servers >= 1, f"servers={servers} must be at least 1")
    require(
        0 <= offered < servers,
        f"offered load {offered:.3g} needs more than {servers} servers: the queue grows without bound, lower the rate",
    )
