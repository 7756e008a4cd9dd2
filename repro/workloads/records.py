"""Rows of a data set with all that grading needs, in the order of their source; never the embedded generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engines.errors import UserError
from repro.workloads.card import DatasetCard, LocalFile
from repro.workloads.row import bad_line
from repro.workloads.source import (
    HubLoader,
    SourceKind,
    check_source,
    entry_for,
    file_digest,
    find_local_file,
    load_hub_columns,
)
from repro.workloads.trace import json_rows

Record = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Records:
    used: Literal["hub", "local"]
    location: str
    """File name (inside the data directory), or hub id."""
    revision: str | None
    """``sha256:...`` of a local file; the hub's commit hash, None if the card pins none."""
    rows: tuple[Record, ...]
    path: Path | None = None
    """Path of a local file; None for the hub."""


def open_records(
    card: DatasetCard,
    kind: SourceKind,
    columns: Sequence[str],
    *,
    dataset_path: str | None = None,
    data_dir: Path | None = None,
    hub_loader: HubLoader | None = None,
) -> Records | None:
    """Text ``columns`` of every row; None where the source has none (``auto`` without a file,
    ``embedded``, a trace)."""
    check_source(kind, dataset_path)
    if kind == "embedded":
        return None
    if kind == "hub":
        return hub_records(card, columns, hub_loader=hub_loader)
    if dataset_path is not None:
        path = Path(dataset_path)
        return read_records(path, path.name, columns) if is_rows(entry_for(card, path)) else None
    found = find_local_file(card, kind, data_dir)
    return read_records(found[0], found[1].path, columns) if found is not None and is_rows(found[1]) else None


def is_rows(entry: LocalFile) -> bool:
    """Whether a file holds the data set's rows; a trace has lengths and times."""
    return entry.format == "prompts_jsonl"


def hub_records(
    card: DatasetCard, columns: Sequence[str], *, split: str | None = None, hub_loader: HubLoader | None = None
) -> Records:
    """``split`` None is the card's own."""
    hub = card.hub if split is None else replace(card.hub, split=split)
    table = (hub_loader or load_hub_columns)(hub, tuple(columns))
    rows = []
    for number, values in enumerate(zip(*(table[name] for name in columns), strict=True)):
        for name, value in zip(columns, values, strict=True):
            if not isinstance(value, str):
                raise UserError(
                    f"{hub.id} row {number}: column {name!r} is {value!r}, expected text: "
                    f"pin another revision in datasets/{card.name}.yaml"
                )
        rows.append(dict(zip(columns, values, strict=True)))
    return Records(used="hub", location=hub.id, revision=hub.revision, rows=tuple(rows))


def read_records(path: Path, shown: str, columns: Sequence[str]) -> Records:
    """A JSON-lines file, packed or not."""
    rows = []
    for line, record in json_rows(path):
        for name in columns:
            if not isinstance(record.get(name), str):
                raise bad_line(path, line, name, record.get(name), "expected text")
        rows.append({name: str(record[name]) for name in columns})
    if not rows:
        raise UserError(f"{shown} has no rows: check that it is the whole file")
    return Records(used="local", location=shown, revision=file_digest(path), rows=tuple(rows), path=path)
