"""A data file by itself: whether it can be read."""

from __future__ import annotations

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


def read_alone(path: Path, dataset: str) -> None:
    """Fails where the file cannot be read as the data set's card says; nothing is read where there is no card here."""
    name = dataset.lower()
    if name in known_session_cards():
        for number, session in enumerate(read_sessions(path, _format_of(name, path)), start=1):
            require(bool(session.rounds), f"{path.name}: session {number} has no round: take it out")
    elif name in known_conversation_cards():
        _check_turns(path)
    elif name in known_datasets():
        open_source(load_card(name), "local", dataset_path=str(path))


def _format_of(trace: str, path: Path) -> SessionFormat:
    """A file of the name of a published one is that."""
    known = (entry.format for entry in load_session_card(trace).local if Path(entry.path).name == path.name)
    return next(known, "sessions_jsonl")


def _check_turns(path: Path) -> None:
    for chat in read_chats([path]):
        for turn in chat:
            for name, tokens in (("prompt", turn.prefill_tokens), ("answer", turn.decode_tokens or 1)):
                if tokens > MOST_TOKENS:
                    raise UserError(f"{path.name} holds one {name} of more than {MOST_TOKENS} tokens: correct it")
