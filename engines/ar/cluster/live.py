"""A session while it runs in the simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engines.ar.session import Session

if TYPE_CHECKING:
    from engines.ar.cluster.hub import Home


class Live:
    """Mutable state of one session."""

    __slots__ = (
        "context",
        "finish_step",
        "first_gap_s",
        "home",
        "joined_step",
        "left",
        "lent",
        "order",
        "round_index",
        "row",
        "session",
        "stay_start",
        "token_s",
    )

    def __init__(self, session: Session, order: int, home: Home) -> None:
        self.session = session
        self.order = order
        """Rank by arrival."""
        self.home = home
        self.round_index = 0
        self.row = -1
        """Of the current round in the record."""
        self.context = 0
        """Tokens so far: prompts and answers, the newest token included. Behind while it decodes."""
        self.left = 0
        """Tokens of the current round still to come. Behind while it decodes."""
        self.lent = 0
        """Tokens of its history the home holds while a prefill runs elsewhere."""
        self.token_s = 0.0
        """When its newest token came."""
        self.joined_step = -1
        self.finish_step = -1
        self.stay_start = -1
        self.first_gap_s = 0.0
