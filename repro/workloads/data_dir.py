"""Where a workload's rows come from: a file of the user's own, a folder of them, or a card."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from engines.errors import UserError
from repro.workloads.schema import Card, LocalFile

DATA_DIR_VARIABLE = "REPRO_DATA_DIR"

UsedSource = Literal["hub", "local", "embedded"]
File = TypeVar("File", bound=LocalFile)


@dataclass(frozen=True, kw_only=True)
class Origin:
    source: UsedSource
    location: str
    """File name (inside the data directory), hub id, or the card."""
    revision: str | None
    """``sha256:...`` of local files; the hub's commit hash, None if the card pins none."""


@dataclass(frozen=True, kw_only=True)
class Provenance(Origin):
    description: str
    checksum: str
    """sha256 over the requests or sessions themselves."""


def find_data_dir(data_dir: Path | None) -> Path | None:
    """Returns the given directory, else the one that the environment names, else None."""
    named = str(data_dir) if data_dir is not None else os.environ.get(DATA_DIR_VARIABLE)
    if not named:
        return None
    if not Path(named).is_dir():
        origin = "data_dir" if data_dir is not None else DATA_DIR_VARIABLE
        raise UserError(f"{origin}={named!r} is not a directory: correct or unset it")
    return Path(named)


@dataclass(frozen=True, kw_only=True)
class Local(Generic[File]):
    """Files of a user's own, which are in one format."""

    paths: tuple[Path, ...]
    entry: File | None
    """What the card says of them; None where it does not know the name."""
    location: str

    @property
    def origin(self) -> Origin:
        return Origin(source="local", location=self.location, revision=", ".join(map(file_digest, self.paths)))


def find_local(files: Sequence[File], named: str | None, data_dir: Path | None) -> Local[File] | None:
    """Finds the file that is named; else the first of a card's files that the data directory has, or all that fit its
    pattern."""
    if named is not None:
        path = Path(named)
        known = next((entry for entry in files if Path(entry.path).name == path.name), None)
        return Local(paths=(path,), entry=known, location=path.name)
    directory = find_data_dir(data_dir)
    for entry in files if directory is not None else ():
        assert directory is not None
        if paths := tuple(sorted(each for each in directory.glob(entry.path) if each.is_file())):
            return Local(paths=paths, entry=entry, location=entry.path)
    return None


def no_local_file(card: Card, data_dir: Path | None) -> UserError:
    directory = find_data_dir(data_dir)
    accepted = ", ".join(entry.path for entry in card.local) or "none"
    return UserError(
        f"source='local': no file for dataset {card.name!r} in "
        f"{repr(str(directory)) if directory else 'any data directory'}: set {DATA_DIR_VARIABLE} to a folder "
        f"with one of {accepted}, or name a file (--dataset-path, dataset_path)"
    )


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def checksum(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()
