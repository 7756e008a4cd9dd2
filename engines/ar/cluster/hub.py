"""A session while it runs; what workers tell the run of it, and what the run asks of the worker that a session lives on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engines.ar.events import EventLoop
from engines.ar.record import TokenLog, WorkerRow
from engines.ar.session import Session
from engines.policies.owed import Owed
from engines.policies.task import PrefillTask
from engines.policies.views import DecodeView


@dataclass(slots=True, eq=False)
class Live:
    """Mutable state of one session."""

    session: Session
    order: int
    """Rank by arrival."""
    home: Home
    round_index: int = 0
    row: int = -1
    """Index of the current round's row in the record."""
    context: int = 0
    """Tokens so far: prompts and answers, the newest token included. Behind while it decodes."""
    left: int = 0
    """Tokens of the current round still to come. Behind while it decodes."""
    lent: int = 0
    """Tokens of its history the home holds while a prefill runs elsewhere."""
    token_s: float = 0.0
    """When its newest token came."""
    joined_step: int = -1
    finish_step: int = -1
    stay_start: int = -1
    first_gap_s: float = 0.0


class Host(Protocol):
    """The run that any worker is part of."""

    loop: EventLoop
    owed: Owed

    def task_started(self, task: PrefillTask, worker_id: int, now: float) -> None: ...

    def prefilled(self, task: PrefillTask, worker_id: int) -> None:
        """The task's last token is computed."""
        ...


class Hub(Host, Protocol):
    """The run of a cluster whose sessions live on decode workers."""

    def read_history(self, task: PrefillTask, worker_id: int, start_s: float) -> float:
        """When it is here. A lazy read (AMPD §6): the home holds the history until the increment is back; what it no longer has
        of it is prefilled again."""
        ...

    def round_done(self, live: Live) -> bool:
        """All tokens are out; whether the session goes on, so that its K/V is worth keeping."""
        ...

    def preempted(self, live: Live) -> None:
        """Its K/V is gone: it needs a prefill of all its tokens."""
        ...


class Home(DecodeView, Protocol):
    """Holds the K/V of its sessions and decodes them."""

    server: int
    num_sessions: int
    log: TokenLog

    def row(self) -> WorkerRow:
        """Its line in the workers table."""
        ...

    def enqueue(self, task: PrefillTask) -> None:
        """A local prefill."""
        ...

    def join(self, live: Live) -> None:
        """A local prefill's token is out, its K/V is here."""
        ...

    def lend(self, live: Live) -> int:
        """Hold the session's cached history for a prefill elsewhere; how many tokens are left of it."""
        ...

    def land(self, live: Live, tokens: int) -> None:
        """K/V of ``tokens`` tokens arrived behind the lent history; decoding can go on."""
        ...
