"""Cards: YAML files read as the dataclasses that say what may be in them, by keys, kinds, choices and ranges (engines.knobs); the
files of a user's own that a card accepts; and where a workload's rows came from."""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from engines.data import open_file
from engines.errors import UserError, require
from engines.knobs import Checked, check_value
from repro.files import one_line, read_yaml, unreadable_yaml

Role = Literal["stated", "inferred", "assumed", "by construction"]


@dataclass(frozen=True, kw_only=True)
class Section(Checked):
    """A card, or a section of one, checked when it is made."""


@dataclass(frozen=True, kw_only=True)
class LocalFile(Section):
    path: str
    """Below the data directory."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Card(Section):
    name: str
    title: str
    summary: str
    homepage: str
    licence: str
    local: tuple[LocalFile, ...]
    """Accepted in the data directory; the first that is there is taken."""
    defects: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SourcedCard(Card):
    """A card on which every number has a role: where it is from."""

    roles: Mapping[str, Role]
    """Says of every number in the card's sections, by its field, where it is from."""
    sources: tuple[str, ...]


AnyCard = TypeVar("AnyCard", bound=Card)


def known_cards(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def load(kind: type[AnyCard], name: str, folder: Path, *, unknown: str) -> AnyCard:
    """Reads the card in the file of this name; case does not matter. ``unknown`` says what is wrong where there is
    none."""
    names = known_cards(folder)
    require(bool(names), f"no cards in {str(folder)!r}: install the package again, or run from a whole clone")
    require(name.lower() in names, f"{unknown}: use one of {', '.join(names)}")
    path = folder / f"{name.lower()}.yaml"
    card = built(kind, _read(path), path.name)
    require(card.name == path.stem, f"{path.name}: name={card.name!r} must be the file's own name, {path.stem!r}")
    if isinstance(card, SourcedCard):
        sections = {field.name: getattr(card, field.name) for field in fields(card)}
        numbers = {
            f"{name}.{field.name}"
            for name, part in sections.items()
            if isinstance(part, Section)
            for field in fields(part)
            if getattr(part, field.name) is not None
        }
        odd = ", ".join(sorted(card.roles.keys() ^ numbers))
        require(not odd, f"{path.name}: roles must name every number once; wrong or missing: {odd}")
    return card


def introductions(folder: Path) -> list[tuple[str, str, str]]:
    """Name, title and summary of every card; nothing else of it is looked at."""
    found = []
    for name in known_cards(folder):
        raw = _read(folder / f"{name}.yaml")
        texts = [raw.get(key) if isinstance(raw, dict) else None for key in ("title", "summary")]
        require(all(isinstance(text, str) for text in texts), f"{name}.yaml: title and summary must be texts")
        found.append((name, str(texts[0]), str(texts[1])))
    return found


def _read(path: Path) -> Any:
    try:
        return read_yaml(path)
    except UserError:
        raise
    except unreadable_yaml() as error:
        raise UserError(f"{path.name} is not YAML: {one_line(error)}: correct the file") from error


def built(kind: type[Any], raw: object, where: str) -> Any:
    """Makes a dataclass of a mapping, which must have every field without a default, and no other keys."""
    known = {field.name: field for field in fields(kind)}
    if not isinstance(raw, dict):
        raise UserError(f"{where} must be a mapping with the keys {', '.join(known)}")
    unknown = [str(key) for key in raw if key not in known]
    require(not unknown, f"{where}: unknown key {', '.join(unknown)}: use only {', '.join(known)}")
    required = (name for name, each in known.items() if each.default is each.default_factory is MISSING)
    missing = [name for name in required if name not in raw]
    require(not missing, f"{where}: missing key {', '.join(missing)}")
    declared = get_type_hints(kind, include_extras=True)
    values = {name: _value(declared[name], value, f"{where}: {name}") for name, value in raw.items()}
    try:
        return kind(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _value(declared: Any, raw: object, where: str) -> Any:
    """Makes of YAML's value what the field is declared to be, a section, a list, a mapping; all else is checked and
    stays."""
    inner = get_args(declared)
    if get_origin(declared) in (Union, UnionType):
        if raw is None and NoneType in inner:
            return None
        (declared,) = (each for each in inner if each is not NoneType)
    if is_dataclass(declared):
        return built(declared, raw, where)  # type: ignore[arg-type]
    if get_origin(declared) is tuple:
        if not isinstance(raw, list):
            raise UserError(f"{where} must be a list")
        return tuple(_value(inner[0], item, f"{where}[{index}]") for index, item in enumerate(raw))
    if get_origin(declared) is Mapping:
        if not isinstance(raw, dict):
            raise UserError(f"{where} must be a mapping")
        return {str(key): _value(inner[1], item, f"{where}: {key}") for key, item in raw.items()}
    check_value(declared, where, raw)
    if not isinstance(raw, str):
        return raw
    require(bool(raw.strip()), f"{where}={raw!r} must be a text that is not empty")
    return raw.strip()


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


ProvenanceOf = TypeVar("ProvenanceOf", bound=Provenance)


def remarked(provenance: ProvenanceOf, text: str) -> ProvenanceOf:
    """Says more in its description; the requests are the same."""
    return replace(provenance, description=f"{provenance.description}; {text}")


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


def local_file(card: Card, files: Sequence[File], named: str | None, data_dir: Path | None) -> Local[File]:
    """Does as ``find_local`` with the card's ``files``; where there is none, says what could be done."""
    if (found := find_local(files, named, data_dir)) is not None:
        return found
    directory = find_data_dir(data_dir)
    accepted = ", ".join(entry.path for entry in files) or "none"
    raise UserError(
        f"source='local': no file for dataset {card.name!r} in "
        f"{repr(str(directory)) if directory else 'any data directory'}: set {DATA_DIR_VARIABLE} to a folder "
        f"with one of {accepted}, or name a file (--dataset-path, dataset_path)"
    )


def file_digest(path: Path) -> str:
    with open_file("file", path) as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def checksum(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()
