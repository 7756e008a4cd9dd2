"""The metadata of a prefill waiting in a queue: what routing and ordering policies see (AMPD §3, §6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
