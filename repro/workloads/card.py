"""Dataset cards: what a workload is made from, read from ``datasets/<name>.yaml``.

A card holds the facts (hub id, columns, licence, defects) and the embedded generator: a length
distribution together with the statistics it follows from. The parameters are recomputed from the
statistics on loading, so a card cannot drift away from its source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from engines.errors import UserError
from repro.files import one_line, read_yaml, unreadable_yaml
from repro.paths import DATASETS
from repro.workloads.lengths import EmpiricalLengths, LengthDistribution, LogNormalLengths, fit_statistics
from repro.workloads.text import TextStyle
from repro.workloads.trace import FileFormat

CARDS_DIR = DATASETS

Basis = Literal["fitted", "assumed"]
_PARAMETER_TOLERANCE = 5e-4


@dataclass(frozen=True, kw_only=True)
class HubReference:
    id: str
    config: str | None
    split: str
    revision: str | None
    """Commit hash; None where none is known, and then ``note`` says so."""
    note: str


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names in the published rows. Either ``prompt`` (text) or ``prompt_tokens`` (a count) is given."""

    prompt: str | None = None
    prompt_tokens: str | None = None
    response_tokens: str | None = None
    timestamp_s: str | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.prompt_tokens is None):
            raise UserError("columns: give either prompt or prompt_tokens")


@dataclass(frozen=True, kw_only=True)
class RowFilter:
    """Rows are kept whose ``column`` has one of ``values``."""

    column: str
    values: tuple[str, ...]

    def keeps(self, record: Mapping[str, object]) -> bool:
        return record.get(self.column) in self.values


@dataclass(frozen=True, kw_only=True)
class LocalFile:
    """A file accepted in the data directory; ``column``, ``unit`` and ``offset`` are for ``lengths_csv``."""

    path: str
    format: FileFormat
    column: str | None = None
    unit: Literal["tokens", "chars"] = "tokens"
    offset: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        if self.format not in get_args(FileFormat):
            raise UserError(f"format={self.format!r} is unknown: use one of {', '.join(get_args(FileFormat))}")
        if (self.format == "lengths_csv") != (self.column is not None):
            raise UserError(f"{self.path}: column goes with format lengths_csv, and with it only")
        if self.unit not in ("tokens", "chars"):
            raise UserError(f"unit={self.unit!r} is unknown: use tokens or chars")


@dataclass(frozen=True, kw_only=True)
class EmbeddedGenerator:
    text: TextStyle
    lengths: LengthDistribution
    basis: Basis
    statistics: tuple[tuple[str, float], ...]
    """What the parameters follow from, of (length - offset); empty for an empirical table."""
    summary: str
    """One clause for the provenance of every run."""
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PaperRun:
    num_requests: int | None
    note: str


@dataclass(frozen=True, kw_only=True)
class DatasetCard:
    name: str
    title: str
    summary: str
    homepage: str
    licence: str
    hub: HubReference
    columns: Columns
    filter: RowFilter | None
    local: tuple[LocalFile, ...]
    embedded: EmbeddedGenerator
    paper_run: PaperRun
    defects: tuple[str, ...]


def known_datasets(cards_dir: Path = CARDS_DIR) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in cards_dir.glob("*.yaml")))


@cache
def load_card(name: str, cards_dir: Path = CARDS_DIR) -> DatasetCard:
    """The card of a data set; case does not matter (the paper's LiveBench is ``livebench``)."""
    names = known_datasets(cards_dir)
    if not names:
        raise UserError(f"no dataset cards in {str(cards_dir)!r}: install the package again, or run from a whole clone")
    if name.lower() not in names:
        raise UserError(f"dataset={name!r} is unknown: use one of {', '.join(names)}")
    path = cards_dir / f"{name.lower()}.yaml"
    try:
        raw = read_yaml(path)
    except unreadable_yaml() as error:
        raise UserError(f"{path.name} is not YAML: {one_line(error)}: correct the file") from error
    card = parse_card(raw, where=path.name)
    if card.name != path.stem:
        raise UserError(f"{path.name}: name={card.name!r} must be the file's own name, {path.stem!r}")
    return card


def parse_card(raw: object, *, where: str) -> DatasetCard:
    top = _section(raw, where, _names(DatasetCard), _names(DatasetCard))
    return DatasetCard(
        name=_string(top["name"], f"{where}: name"),
        title=_string(top["title"], f"{where}: title"),
        summary=_string(top["summary"], f"{where}: summary"),
        homepage=_string(top["homepage"], f"{where}: homepage"),
        licence=_string(top["licence"], f"{where}: licence"),
        hub=_build(HubReference, top["hub"], f"{where}: hub"),
        columns=_build(Columns, top["columns"], f"{where}: columns"),
        filter=None if top["filter"] is None else _build(RowFilter, top["filter"], f"{where}: filter"),
        local=tuple(
            _build(LocalFile, entry, f"{where}: local[{index}]")
            for index, entry in enumerate(_list(top["local"], f"{where}: local"))
        ),
        embedded=_embedded(top["embedded"], f"{where}: embedded"),
        paper_run=_build(PaperRun, top["paper_run"], f"{where}: paper_run"),
        defects=tuple(_string(item, f"{where}: defects") for item in _list(top["defects"], f"{where}: defects")),
    )


def _embedded(raw: object, where: str) -> EmbeddedGenerator:
    section = _section(raw, where, _names(EmbeddedGenerator), _names(EmbeddedGenerator))
    if section["text"] not in get_args(TextStyle):
        raise UserError(f"{where}: text={section['text']!r} is unknown: use one of {', '.join(get_args(TextStyle))}")
    if section["basis"] not in get_args(Basis):
        raise UserError(f"{where}: basis={section['basis']!r} is unknown: use one of {', '.join(get_args(Basis))}")
    statistics = section["statistics"]
    if not isinstance(statistics, dict) or not all(_is_number(value) for value in statistics.values()):
        raise UserError(f"{where}: statistics={statistics!r} must map names to numbers")
    lengths = _lengths(section["lengths"], f"{where}: lengths")
    if isinstance(lengths, LogNormalLengths):
        fitted = fit_statistics(statistics)
        if not (
            math.isclose(fitted.mu, lengths.mu, abs_tol=_PARAMETER_TOLERANCE)
            and math.isclose(fitted.sigma, lengths.sigma, abs_tol=_PARAMETER_TOLERANCE)
        ):
            raise UserError(
                f"{where}: mu={lengths.mu}, sigma={lengths.sigma} do not follow from the statistics: "
                f"put mu: {fitted.mu:.4f} and sigma: {fitted.sigma:.4f}"
            )
    return EmbeddedGenerator(
        text=section["text"],
        lengths=lengths,
        basis=section["basis"],
        statistics=tuple(sorted(statistics.items())),
        summary=_string(section["summary"], f"{where}: summary"),
        sources=tuple(_string(item, f"{where}: sources") for item in _list(section["sources"], f"{where}: sources")),
    )


def _lengths(raw: object, where: str) -> LengthDistribution:
    kinds: dict[str, type[LogNormalLengths] | type[EmpiricalLengths]] = {
        "lognormal": LogNormalLengths,
        "empirical": EmpiricalLengths,
    }
    if not isinstance(raw, dict) or raw.get("distribution") not in kinds:
        raise UserError(f"{where}: distribution must be one of {', '.join(kinds)}")
    rest = {key: value for key, value in raw.items() if key != "distribution"}
    distribution: LengthDistribution = _build(kinds[raw["distribution"]], rest, where)
    return distribution


def _names(cls: type) -> tuple[str, ...]:
    return tuple(item.name for item in fields(cls))


def _build(cls: type, raw: object, where: str) -> Any:
    """A flat section as its dataclass: exact keys, values of the annotated kind, lists as tuples."""
    required = tuple(item.name for item in fields(cls) if item.default is MISSING)
    section = _section(raw, where, _names(cls), required)
    for item in fields(cls):
        if item.name in section:
            _check_kind(section[item.name], str(item.type), f"{where}: {item.name}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in section.items()}
    try:
        return cls(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _check_kind(value: object, annotation: str, where: str) -> None:
    if value is None and "None" in annotation:
        return
    if annotation.startswith("tuple"):
        kind: type = int if "int" in annotation else str
        items = _list(value, where)
        if any(type(item) is not kind for item in items):
            raise UserError(f"{where}: every item must be {'a whole number' if kind is int else 'text'}")
    elif annotation.startswith("int"):
        if type(value) is not int or value < 0:
            raise UserError(f"{where}={value!r} must be a whole number, not negative")
    elif annotation.startswith("float"):
        if not _is_number(value):
            raise UserError(f"{where}={value!r} must be a number")
    elif not isinstance(value, str):
        raise UserError(f"{where}={value!r} must be text")


def _section(raw: object, where: str, allowed: tuple[str, ...], required: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise UserError(f"{where} must be a mapping with the keys {', '.join(allowed)}")
    unknown = [str(key) for key in raw if key not in allowed]
    if unknown:
        raise UserError(f"{where}: unknown key {', '.join(unknown)}: use only {', '.join(allowed)}")
    missing = [key for key in required if key not in raw]
    if missing:
        raise UserError(f"{where}: missing key {', '.join(missing)}")
    return raw


def _list(raw: object, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise UserError(f"{where} must be a list")
    return raw


def _string(raw: object, where: str) -> str:
    if not isinstance(raw, str) or not raw.strip():
        raise UserError(f"{where}={raw!r} must be text")
    return raw.strip()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
