"""Who waits in a queue before several servers, in closed form."""

from __future__ import annotations

from engines.errors import require


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
