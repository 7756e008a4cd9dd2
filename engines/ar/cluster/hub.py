"""A session while it runs, and the run that any worker is part of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engines.ar.events import EventLoop
from engines.ar.session import Session
from engines.policies.owed import Owed
from engines.policies.task import PrefillTask

if TYPE_CHECKING:
    from engines.ar.cluster.decode_worker import Home


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
