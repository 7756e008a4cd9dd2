"""Turns of conversations that arrive at their own times, each with the history it continues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from engines.ar.session import ClosedLoop, OpenLoop
from engines.errors import UserError


class Turn(NamedTuple):
    arrival_s: float
    session_id: int
    turn: int
    """From 0."""
    history: int
    """H: tokens of the turns before, answers included."""
    tokens: int
    """L: new tokens."""
    answered: int = 0
    """Tokens of the history that the answer to the turn before generated."""


@dataclass(frozen=True, kw_only=True)
class OpenTurns:
    """Turns start at ``arrival_s`` whatever the system does; a Poisson process of turns, say."""

    turns: Iterable[Turn]
    """In rising order of ``arrival_s``."""

    def __iter__(self) -> Iterator[Turn]:
        last_s = 0.0
        for turn in self.turns:
            if not (turn.arrival_s >= last_s):
                raise UserError(
                    f"session {turn.session_id}: arrival_s={turn.arrival_s} is before {last_s}: sort the turns"
                )
            if turn.tokens < 1 or turn.history < 0 or not 0 <= turn.answered <= turn.history:
                raise UserError(
                    f"session {turn.session_id} turn {turn.turn}: tokens={turn.tokens}, history={turn.history}, "
                    f"answered={turn.answered}: a turn has at least one token, and its answer is part of the history"
                )
            last_s = turn.arrival_s
            yield turn


PrefillArrivals = OpenTurns | OpenLoop | ClosedLoop
