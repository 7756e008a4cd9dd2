"""What makes a system of a cluster of workers: its policies. And when a run of it is given up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from engines.cluster.worker import WINDOW_S
from engines.knobs import Checked, Count, Range
from engines.policies.batching import ONE_BY_ONE
from engines.policies.routing import Binder, Estimator, LeastKvMemory, Local, PromptBinder, Router
from engines.policies.views import Batching, PrefillQueue

HistoryRead = Literal["overlapped", "serial", "own-cache"]
"""How prefill workers get a history: from its decode worker, during the prefill before (AMPD §6) or after it; or from a prefix cache
of their own."""


@dataclass(frozen=True, kw_only=True)
class Policies:
    """What makes a system. Factories, as policies keep state: every run has its own; routers get the run's seed."""

    make_router: Callable[[int], Router] = lambda seed: Local()
    make_binder: Callable[[], Binder | PromptBinder] = LeastKvMemory
    make_prefill_queue: Callable[[], PrefillQueue] = PrefillQueue
    """Makes the queue of workers that only prefill."""
    make_local_queue: Callable[[], PrefillQueue] = PrefillQueue
    """Makes the queue of prefills on workers that decode."""
    prefill_batching: Batching = ONE_BY_ONE
    local_batching: Batching = ONE_BY_ONE
    estimator: Estimator | None = None
    shares_prefill_queue: bool = False
    """One queue for all prefill workers, each takes the next task when it is free."""
    history: HistoryRead = "overlapped"
    keep_s: float = 0.0
    """Time-to-live of a session's K/V between rounds (vLLM-Continuum)."""
    keeps: bool = True
    """Whether anything is kept of a round that has ended, for the rounds and the sessions that begin like it."""
    block_size: int | None = None
    """Tokens of the blocks that sessions share where they begin alike; None: each session has its own K/V."""
    window_s: float = WINDOW_S


@dataclass(frozen=True, kw_only=True)
class StopRule(Checked):
    """When a run is given up: its unfinished sessions miss every objective, and the record says why."""

    until_s: Annotated[float, Range(above=0)] | None = None
    max_live_sessions: Count | None = None
    """More sessions than this at once mean the arrivals outrun the cluster."""


NEVER = StopRule()
