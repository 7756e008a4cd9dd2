"""The policies that make a serving system of a cluster of workers, and the rule by which a run is given up."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from engines.cluster.worker import WINDOW_S
from engines.knobs import Checked, Count, Range
from engines.policies.batching import ONE_BY_ONE
from engines.policies.routing import Binder, Estimator, LeastKvMemory, Local, PromptBinder, Router
from engines.policies.views import Batching, PrefillQueue

HistoryRead = Literal["overlapped", "serial", "own-cache"]
"""How prefill workers get a history. overlapped: from its decode worker, during the prefill before (AMPD §6). serial: the same, after
that prefill. own-cache: from their own prefix cache."""


@dataclass(frozen=True, kw_only=True)
class Policies:
    """The policies of a system. Policies keep state, so factories make new ones for every run. Routers get the run's seed."""

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
    """One queue for all prefill workers: each worker takes the next task when it is free."""
    history: HistoryRead = "overlapped"
    keep_s: float = 0.0
    """Time-to-live of a session's K/V between rounds (vLLM-Continuum)."""
    keeps: bool = True
    """Whether workers keep the K/V of a round that has ended, for rounds and sessions that begin like it."""
    block_size: int | None = None
    """Tokens of each K/V block that sessions with a common beginning share; None: each session has its own K/V."""
    window_s: float = WINDOW_S


@dataclass(frozen=True, kw_only=True)
class StopRule(Checked):
    """When a run is given up: its unfinished sessions miss every objective, and the record says why."""

    until_s: Annotated[float, Range(above=0)] | None = None
    max_live_sessions: Count | None = None
    """More sessions than this at once mean the arrivals outrun the cluster."""


NEVER = StopRule()
