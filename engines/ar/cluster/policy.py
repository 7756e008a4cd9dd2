"""What the coordinator decides, and what it may look at: plain data and a time, never the simulator.

The workers of the simulation satisfy ``PrefillView`` and ``DecodeView``; a live coordinator fills
``WorkerSnapshot`` from shared memory and asks the very same policy objects (AMPD §3, §6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engines.ar.task import PrefillTask


class QueueView(Protocol):
    """The prefill queue of any worker."""

    @property
    def worker_id(self) -> int: ...
    @property
    def degree(self) -> int:
        """theta: the tensor-parallel degree."""
        ...

    @property
    def backlog_s(self) -> float:
        """Estimated time of the queued prefills, the running one left out (second term of AMPD eq. 1)."""
        ...

    @property
    def backlog_tokens(self) -> int:
        """Tokens of the queued and of the running prefills."""
        ...

    def busy_s(self, now: float) -> float:
        """Estimated time left of the prefill that runs."""
        ...

    def oldest_wait_s(self, now: float) -> float:
        """Since the oldest queued prefill was ready."""
        ...


class PrefillView(QueueView, Protocol):
    def windowed_ttft_s(self, now: float) -> float: ...


class DecodeView(QueueView, Protocol):
    def windowed_itl_s(self, now: float) -> float: ...

    def token_age_s(self, now: float) -> float:
        """How long the decode batch has waited for its next token; 0 without a batch."""
        ...

    @property
    def kv_tokens(self) -> int:
        """K/V in use, prefix caches of waiting sessions included."""
        ...

    @property
    def kv_capacity(self) -> int: ...

    @property
    def num_sessions(self) -> int:
        """Sessions bound to it that have not ended."""
        ...


@dataclass(frozen=True, kw_only=True)
class WorkerSnapshot:
    """The state of a worker at one moment: a ``PrefillView`` and a ``DecodeView``."""

    worker_id: int
    degree: int = 1
    backlog_s: float = 0.0
    backlog_tokens: int = 0
    running_s: float = 0.0
    wait_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: float = 0.0
    age_s: float = 0.0
    kv_tokens: int = 0
    kv_capacity: int = 0
    num_sessions: int = 0

    def busy_s(self, now: float) -> float:
        return self.running_s

    def oldest_wait_s(self, now: float) -> float:
        return self.wait_s

    def windowed_ttft_s(self, now: float) -> float:
        return self.ttft_s

    def windowed_itl_s(self, now: float) -> float:
        return self.itl_s

    def token_age_s(self, now: float) -> float:
        return self.age_s


class Decision(NamedTuple):
    """Where a prefill runs and by which rule."""

    worker_id: int
    is_local: bool
    """On the decode worker its session is bound to."""
    reason: str


class Router(Protocol):
    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Decision:
        """``home`` is the decode worker the session is bound to."""
        ...


class Binder(Protocol):
    def bind(self, decodes: Sequence[DecodeView], now: float) -> int:
        """Id of the decode worker a new session belongs to, for life."""
        ...


class Estimator(Protocol):
    """What policies believe a prefill takes; the workers' truth may differ."""

    def prefill_s(self, history: int, tokens: int, degree: int) -> float: ...


@dataclass(kw_only=True)
class Local:
    """Co-located serving: a prefill runs where its session lives."""

    reason: str = field(default="co-located", init=False)

    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Decision:
        return Decision(home.worker_id, True, self.reason)


@dataclass(frozen=True, kw_only=True)
class LeastKvMemory:
    """Least K/V in use; ties by fewest sessions, then by id (AMPD §3, binding)."""

    def bind(self, decodes: Sequence[DecodeView], now: float) -> int:
        return min(decodes, key=lambda worker: (worker.kv_tokens, worker.num_sessions, worker.worker_id)).worker_id


@dataclass(kw_only=True)
class RoundRobin:
    """Workers in turn."""

    turn: int = field(default=0, init=False)

    def bind(self, decodes: Sequence[DecodeView], now: float) -> int:
        self.turn += 1
        return decodes[(self.turn - 1) % len(decodes)].worker_id


@dataclass(frozen=True, kw_only=True)
class FewestSessions:
    """Fewest sessions bound; ties by least K/V, then by id."""

    def bind(self, decodes: Sequence[DecodeView], now: float) -> int:
        return min(decodes, key=lambda worker: (worker.num_sessions, worker.kv_tokens, worker.worker_id)).worker_id
