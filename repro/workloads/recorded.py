"""A data file by itself: whether it can be read."""

from __future__ import annotations

from pathlib import Path

from engines.errors import require
from repro.workloads.card import find_local
from repro.workloads.conversations.chats import read_chats
from repro.workloads.conversations.workload import known_conversation_cards
from repro.workloads.dataset import known_datasets, load_card, open_source
from repro.workloads.sessions.traces import read_sessions
from repro.workloads.sessions.workload import known_session_cards, load_session_card


def read_alone(path: Path, dataset: str) -> None:
    """Fails where the file cannot be read as the data set's card says; nothing is read where there is no card here."""
    name = dataset.lower()
    if name in known_session_cards():
        found = find_local(load_session_card(name).local, str(path), None)
        kind = None if found is None or found.entry is None else found.entry.format
        for number, session in enumerate(read_sessions(path, kind), start=1):
            require(bool(session.rounds), f"{path.name}: session {number} has no round: take it out")
    elif name in known_conversation_cards():
        read_chats([path])
    elif name in known_datasets():
        open_source(load_card(name), "local", dataset_path=str(path))
