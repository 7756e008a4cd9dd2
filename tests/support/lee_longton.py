"""The usual approximations of M/G/k, which docs/simulation.md says how far off they are. Times are in mean service times."""

import math

from engines.ampd.planner import erlang_c


def mean_wait(servers: int, load: float, cv2: float) -> float:
    """Lee and Longton: the wait of M/M/k times (1 + cv^2) / 2. Exact for M/M/k and M/G/1."""
    return erlang_c(servers, servers * load) / (servers * (1 - load)) * (1 + cv2) / 2


def wait_quantile(share: float, servers: int, load: float, cv2: float) -> float:
    """An exponential tail of that mean; exact for M/M/k. 0 where fewer wait at all."""
    waits = erlang_c(servers, servers * load)
    return math.log(waits / (1 - share)) * mean_wait(servers, load, cv2) / waits if waits > 1 - share else 0.0
