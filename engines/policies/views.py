"""What the coordinator may look at: plain data and a time, never the simulator.

The workers of the simulation satisfy ``PrefillView`` and ``DecodeView``; a live coordinator fills
``WorkerSnapshot`` from shared memory and asks the very same policy objects (AMPD §3, §6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class BacklogView(Protocol):
    """A worker that prefills."""

    @property
    def worker_id(self) -> int: ...
    @property
    def backlog_tokens(self) -> int:
        """Tokens left of the queued and of the running prefills."""
        ...


class QueueView(BacklogView, Protocol):
    """The prefill queue of any worker."""

    @property
    def degree(self) -> int:
        """theta: the tensor-parallel degree."""
        ...

    @property
    def backlog_s(self) -> float:
        """Estimated time of the queued prefills, the running one left out (second term of AMPD eq. 1)."""
        ...

    def busy_s(self, now: float) -> float:
        """Estimated time left of the prefill that runs."""
        ...

    def oldest_wait_s(self, now: float) -> float:
        """Since the oldest queued prefill was ready."""
        ...


class PrefillView(QueueView, Protocol):
    def windowed_ttft_s(self, now: float) -> float: ...

    def cached_tokens(self, order: int) -> int:
        """Tokens from the start of the session, the so-manieth to arrive, whose K/V it keeps itself."""
        ...


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

    def cached_tokens(self, order: int) -> int:
        return 0

    def windowed_itl_s(self, now: float) -> float:
        return self.itl_s

    def token_age_s(self, now: float) -> float:
        return self.age_s
