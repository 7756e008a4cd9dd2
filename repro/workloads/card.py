"""Cards: YAML files that we read as dataclasses, which define their keys, types, choices and ranges (engines.knobs). Also the local files
that a card accepts, and the origin of a workload's rows."""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from engines.data import open_file
from engines.errors import UserError, require
from engines.knobs import Checked, check_value
from repro.files import read_yaml
from repro.paths import DATASETS
from repro.workloads.knobs import SourceKind

Role = Literal["stated", "inferred", "assumed", "by construction"]


@dataclass(frozen=True, kw_only=True)
class Section(Checked):
    """A card or a section of a card, checked when it is made."""


@dataclass(frozen=True, kw_only=True)
class LocalFile(Section):
    path: str
    """The path below the data directory."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Card(Section):
    folder: ClassVar[str] = ""
    """The cards' folder below that of the data sets."""
    name: str
    title: str
    summary: str
    homepage: str
    licence: str
    local: tuple[LocalFile, ...]
    """Files that we accept in the data directory. We read the first that exists."""
    defects: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SourcedCard(Card):
    """A card that says where every number on it comes from: its role."""

    roles: Mapping[str, Role]
    """The role of every number in the card's sections, by field (``section.field``)."""
    sources: tuple[str, ...]


AnyCard = TypeVar("AnyCard", bound=Card)


def known_cards(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def load(kind: type[AnyCard], name: str, *, unknown: str) -> AnyCard:
    """Read the card in the file of this name; case does not matter. ``unknown`` begins the error if there is no such card."""
    folder = DATASETS / kind.folder
    names = known_cards(folder)
    require(bool(names), f"no cards in {str(folder)!r}: install the package again, or run from a whole clone")
    require(name.lower() in names, f"{unknown}: use one of {', '.join(names)}")
    path = folder / f"{name.lower()}.yaml"
    card: AnyCard = parse(kind, read_yaml(path), path.name)
    return card


def introductions(folder: Path) -> list[tuple[str, str, str]]:
    """Return name, title and summary of every card, without checking anything."""
    cards = {name: read_yaml(folder / f"{name}.yaml") for name in known_cards(folder)}
    return [(name, card["title"], card["summary"]) for name, card in cards.items()]


def parse(kind: type[Any], raw: Mapping[str, Any], location: str) -> Any:
    """Make a dataclass from a mapping of the package's own YAML. ``location`` begins the error about a value that a field cannot have."""
    declared = get_type_hints(kind, include_extras=True)
    try:
        return kind(**{name: _value(declared[name], value, f"{location}: {name}") for name, value in raw.items()})
    except UserError as error:
        raise UserError(f"{location}: {error}") from error


def _value(declared: Any, raw: Any, location: str) -> Any:
    """Convert a YAML value to the section, tuple or mapping that the field is declared as. We check all other values and keep them."""
    inner = get_args(declared)
    if get_origin(declared) in (Union, UnionType):
        if raw is None and NoneType in inner:
            return None
        (declared,) = (option for option in inner if option is not NoneType)
    if is_dataclass(declared):
        return parse(declared, raw, location)  # type: ignore[arg-type]
    if get_origin(declared) is tuple:
        return tuple(_value(inner[0], item, f"{location}[{index}]") for index, item in enumerate(raw))
    if get_origin(declared) is Mapping:
        return {key: _value(inner[1], item, f"{location}: {key}") for key, item in raw.items()}
    check_value(declared, location, raw)
    return raw.strip() if isinstance(raw, str) else raw


DATA_DIR_VARIABLE = "REPRO_DATA_DIR"

UsedSource = Literal["hub", "local", "embedded"]
File = TypeVar("File", bound=LocalFile)


@dataclass(frozen=True, kw_only=True)
class Origin:
    source: UsedSource
    location: str
    """The file's name (inside the data directory), the hub id, or the card."""
    revision: str | None
    """``sha256:...`` of local files; the hub's commit hash, or None if the card pins none."""


@dataclass(frozen=True, kw_only=True)
class Provenance(Origin):
    description: str
    checksum: str
    """sha256 of the requests or sessions themselves."""


ProvenanceOf = TypeVar("ProvenanceOf", bound=Provenance)


def add_note(provenance: ProvenanceOf, text: str) -> ProvenanceOf:
    """The provenance with a further clause in its description."""
    return replace(provenance, description=f"{provenance.description}; {text}")


def find_data_dir(data_dir: Path | None) -> Path | None:
    """Return the given directory, else the one that the environment names, else None."""
    folder = str(data_dir) if data_dir is not None else os.environ.get(DATA_DIR_VARIABLE)
    if not folder:
        return None
    if not Path(folder).is_dir():
        origin = "data_dir" if data_dir is not None else DATA_DIR_VARIABLE
        raise UserError(f"{origin}={folder!r} is not a directory: correct or unset it")
    return Path(folder)


@dataclass(frozen=True, kw_only=True)
class Local(Generic[File]):
    """A user's own files, all in one format."""

    paths: tuple[Path, ...]
    entry: File | None
    """The card's entry for these files; None if the card does not know the name."""
    location: str

    @property
    def origin(self) -> Origin:
        return Origin(source="local", location=self.location, revision=", ".join(map(file_digest, self.paths)))


def find_local(files: Sequence[File], name: str | None, data_dir: Path | None) -> Local[File] | None:
    """Find the named file. Without a name, find the first of a card's files in the data directory, or all files of its pattern."""
    if name is not None:
        path = Path(name)
        listed = next((entry for entry in files if Path(entry.path).name == path.name), None)
        return Local(paths=(path,), entry=listed, location=path.name)
    directory = find_data_dir(data_dir)
    for entry in files if directory is not None else ():
        assert directory is not None
        if paths := tuple(sorted(file for file in directory.glob(entry.path) if file.is_file())):
            return Local(paths=paths, entry=entry, location=entry.path)
    return None


def chosen_file(card: Card, source: SourceKind, name: str | None, data_dir: Path | None) -> Local[Any] | None:
    """Find the file that a source asks for: ``local``, or ``auto`` if there is one. None for the hub and the embedded generator.
    ``name`` is the path that a user gave. Raises UserError with a fix if there is no such file, or if the path has no effect."""
    if source in ("hub", "embedded"):
        require(
            name is None, f"dataset_path={name!r} has no effect with dataset_source={source!r}: leave one of them out"
        )
        return None
    local = find_local(card.local, name, data_dir)
    if local is not None or source == "auto":
        return local
    directory = find_data_dir(data_dir)
    accepted = ", ".join(entry.path for entry in card.local) or "none"
    raise UserError(
        f"source='local': no file for dataset {card.name!r} in "
        f"{repr(str(directory)) if directory else 'any data directory'}: set {DATA_DIR_VARIABLE} to a folder "
        f"with one of {accepted}, or name a file (--dataset-path, dataset_path)"
    )


def embedded_origin(card: Card) -> Origin:
    """The origin of what a card's embedded generator draws."""
    location = Path("datasets", card.folder, f"{card.name}.yaml")
    return Origin(source="embedded", location=location.as_posix(), revision=None)


def file_digest(path: Path) -> str:
    with open_file("file", path) as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def checksum(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()
