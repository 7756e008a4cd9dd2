"""What routing and ordering policies see: the metadata of a prefill waiting in a queue, and the objectives (AMPD §3, §6)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from engines.errors import require

TaskKind = Literal["initial", "incremental", "recompute"]
"""recompute: the K/V of a decoding sequence was given up for lack of memory and is built again."""


@dataclass(slots=True)
class PrefillTask:
    task_id: int
    session_id: int
    order: int
    """Rank of the session by arrival; the lower is the older."""
    round_index: int
    kind: TaskKind
    history: int
    """l_hist: tokens whose K/V the decode worker holds, as far as the router knows."""
    tokens: int
    """l_incr: tokens to prefill."""
    ready_s: float
    """When the round could have started; TTFT counts from here."""
    enqueued_s: float = 0.0
    """T_enq of AMPD eq. (4)."""
    estimate_s: float = 0.0
    """t_pre of AMPD eqs. (1)-(3): the performance model's time on the worker it is queued at."""
    postponed: int = 0
    """Times it was overtaken by reordering (AMPD §4.2)."""
    computed: int = 0
    """Tokens prefilled in chunks so far."""

    @property
    def left(self) -> int:
        return self.tokens - self.computed


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What a service is held to."""

    ttft_s: float
    itl_s: float

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            value = getattr(self, name)
            require(value > 0 and math.isfinite(value), f"{name}={value}: an objective is a positive number of seconds")
