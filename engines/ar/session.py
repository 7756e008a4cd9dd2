"""A session: rounds of prefill and decode with the environment (tools, retrieval, a user) between them (AMPD §1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engines.errors import UserError, require


class Round(NamedTuple):
    """One prefill and the decode that follows it.

    The first of ``decode_tokens`` comes from the prefill itself, so a round of one token never decodes.
    """

    prefill_tokens: int
    """What this round adds to the history: the prompt, or what the environment returned."""
    decode_tokens: int
    delay_s: float = 0.0
    """Time in the environment after the round; the next round is ready then."""


@dataclass(frozen=True, slots=True)
class Session:
    """Rounds run one after the other; the history of a round is all tokens of the rounds before it."""

    session_id: int
    arrival_s: float
    rounds: tuple[Round, ...]

    def __post_init__(self) -> None:
        if not (self.arrival_s >= 0 and math.isfinite(self.arrival_s)):
            raise UserError(f"session {self.session_id}: arrival_s={self.arrival_s} must be finite and not negative")
        if not self.rounds:
            raise UserError(f"session {self.session_id} has no rounds: give at least one")
        for index, (prefill, decode, delay) in enumerate(self.rounds):
            if prefill < 1 or decode < 1 or not 0 <= delay < math.inf:
                raise UserError(
                    f"session {self.session_id} round {index}: prefill_tokens={prefill}, decode_tokens={decode}, "
                    f"delay_s={delay}: a round prefills and generates at least one token, and waits 0 s or more"
                )

    @property
    def prefill_tokens(self) -> int:
        return sum(entry.prefill_tokens for entry in self.rounds)

    @property
    def decode_tokens(self) -> int:
        return sum(entry.decode_tokens for entry in self.rounds)

    @property
    def context_tokens(self) -> int:
        """Tokens of K/V at its end, the most it ever holds."""
        return self.prefill_tokens + self.decode_tokens


@dataclass(frozen=True, kw_only=True)
class OpenLoop:
    """Sessions start at their own ``arrival_s``, whatever the system does."""

    sessions: Iterable[Session]
    """In rising order of ``arrival_s``; drawn one at a time, so a generator will do."""

    def __iter__(self) -> Iterator[Session]:
        last = 0.0
        for session in self.sessions:
            require(
                session.arrival_s >= last,
                f"session {session.session_id}: arrival_s={session.arrival_s} is before {last}: sort the sessions",
            )
            last = session.arrival_s
            yield session


@dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """``num_clients`` clients run one session after the other, ``think_s`` apart; ``arrival_s`` is not read."""

    sessions: Sequence[Session]
    num_clients: int
    think_s: float = 0.0

    def __post_init__(self) -> None:
        require(self.num_clients >= 1, f"num_clients={self.num_clients} must be at least 1")
        require(0 <= self.think_s < math.inf, f"think_s={self.think_s} must be 0 s or more")


Arrivals = OpenLoop | ClosedLoop
