"""Data files that a user names: whether one can be read at all is settled before any work starts, and what a run makes of
one is said."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engines.data import open_file
from engines.errors import UserError

if TYPE_CHECKING:
    from repro.runs.experiment import Experiment

_MALFORMED = (AttributeError, EOFError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""What reading a file of another shape than expected raises."""


@contextmanager
def readable(option: str, path: Path | None, datasets: Iterable[str]) -> Iterator[None]:
    """The body works with the file, if there is one. Where it fails and reading the file alone fails too, that is said of the
    file; any other failure is the program's."""
    if path is None:
        yield
        return
    check_regular(option, path)
    try:
        yield
    except UserError:
        raise
    except _MALFORMED:
        for dataset in datasets:
            _read(option, path, dataset)
        raise


def _read(option: str, path: Path, dataset: str) -> None:
    """What the file's content makes fail is refused with its name."""
    try:
        _read_alone(path, dataset.lower())
    except UserError:
        raise
    except _MALFORMED as error:
        logging.getLogger(__name__).info("where it happened:", exc_info=error)
        raise UserError(
            f"{option}={str(path)!r} has not the format that its name or its card says ({type(error).__name__}: {error}): "
            f"check that it is the whole file, and of that kind"
        ) from error


def _read_alone(path: Path, dataset: str) -> None:
    """Reads the file as the data set's card says; nothing is read where there is no card here."""
    from repro.workloads import conversations, recorded, sessions
    from repro.workloads.card import find_local
    from repro.workloads.dataset import known_datasets, load_card
    from repro.workloads.workload import open_source

    if dataset in sessions.known_session_cards():
        found = find_local(sessions.load_session_card(dataset).local, str(path), None)
        recorded.read_sessions(path, None if found is None or found.entry is None else found.entry.format)
    elif dataset in conversations.known_conversation_cards():
        recorded.read_chats([path])
    elif dataset in known_datasets():
        open_source(load_card(dataset), "local", dataset_path=str(path))


def check_regular(option: str, path: Path) -> None:
    """Refuse what cannot be read as a file. Whether there has to be one is the reader's to say."""
    if os.path.lexists(path):
        open_file(option, path).close()


def data_of(experiments: Iterable[Experiment]) -> Iterator[str]:
    """What was made of data sets' own rows, some of which are cut, clipped or repeated; nothing of generated ones."""
    by_workload = {id(each.workload): each for each in experiments}
    said = []
    for experiment in by_workload.values():
        provenance = experiment.workload.provenance
        description: str | None = getattr(provenance, "description", None)
        if description is not None and getattr(provenance, "source", None) != "embedded":
            said.append(description)
    yield from dict.fromkeys(said)
