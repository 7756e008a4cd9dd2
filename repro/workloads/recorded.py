"""A data file by itself: whether it can be read, and how much it holds of what runs ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from engines.errors import UserError, require
from repro.workloads.card import known_datasets, load_card
from repro.workloads.conversations import known_conversation_cards
from repro.workloads.conversations.chats import read_chats
from repro.workloads.sessions import known_session_cards, load_session_card
from repro.workloads.sessions.card import SessionFormat
from repro.workloads.sessions.traces import read_sessions
from repro.workloads.source import open_source
from repro.workloads.trace import MOST_TOKENS


@dataclass(frozen=True, kw_only=True)
class Held:
    count: int
    unit: str


def held_by(path: Path, dataset: str, *, low: int | None = None, high: int | None = None) -> Held | None:
    """What the file holds, read as the data set's card says; None where there is no card here. Of conversations turns are
    counted, those with prompts of ``low`` to ``high`` tokens alone."""
    name = dataset.lower()
    if name in known_session_cards():
        sessions = read_sessions(path, _format_of(name, path))
        for number, session in enumerate(sessions, start=1):
            require(bool(session.rounds), f"{path.name}: session {number} has no round: take it out")
        return Held(count=len(sessions), unit="session")
    if name in known_conversation_cards():
        return Held(count=_turns(path, low or 1, math.inf if high is None else high), unit="turn")
    if name in known_datasets():
        rows = open_source(load_card(name), "local", dataset_path=str(path)).rows
        return Held(count=len(rows or ()), unit="row")
    return None


def _format_of(trace: str, path: Path) -> SessionFormat:
    """A file of the name of a published one is that."""
    known = (entry.format for entry in load_session_card(trace).local if Path(entry.path).name == path.name)
    return next(known, "sessions_jsonl")


def _turns(path: Path, low: float, high: float) -> int:
    count = 0
    for chat in read_chats([path]):
        for turn in chat:
            for name, tokens in (("prompt", turn.prefill_tokens), ("answer", turn.decode_tokens or 1)):
                if tokens > MOST_TOKENS:
                    raise UserError(f"{path.name} holds one {name} of more than {MOST_TOKENS} tokens: correct it")
            count += low <= turn.prefill_tokens <= high
    return count
