"""Where prompts come from: a hub data set, a local file, or the embedded generator.

``auto`` takes a local file if the data directory has one the card accepts, else the embedded
generator. The network is used only when ``hub`` is asked for by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

from engines.errors import UserError
from repro.workloads.card import DatasetCard, HubReference, LocalFile
from repro.workloads.data_dir import DATA_DIR_VARIABLE, file_digest, find_data_dir
from repro.workloads.row import UNREADABLE, PromptRow, open_text
from repro.workloads.trace import (
    OWN_KEYS,
    RENAMED,
    detect_format,
    parse_lengths_csv,
    parse_prompts_jsonl,
    parse_trace,
    prompt_at,
)

SourceKind = Literal["auto", "hub", "local", "embedded"]
UsedSource = Literal["hub", "local", "embedded"]


class HubLoader(Protocol):
    """Whole columns of a hub data set, by name, all equally long."""

    def __call__(self, hub: HubReference, columns: tuple[str, ...]) -> Mapping[str, Sequence[object]]: ...


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """``rows`` is None for the embedded generator, which has no end. Rows have a prompt that is not empty."""

    used: UsedSource
    location: str
    """File name (inside the data directory), hub id, or the card."""
    revision: str | None
    """``sha256:...`` of a local file; the hub's commit hash, None if the card pins none."""
    rows: tuple[PromptRow, ...] | None
    num_dropped: int = 0
    """Rows left out because the prompt is empty (failed calls, in BurstGPT)."""


def check_source(kind: str, dataset_path: str | None) -> None:
    if kind not in get_args(SourceKind):
        raise UserError(f"source={kind!r} is unknown: use one of {', '.join(get_args(SourceKind))}")
    if dataset_path is not None and kind in ("hub", "embedded"):
        raise UserError(
            f"dataset_path={dataset_path!r} has no effect with source={kind!r}: use 'local' or leave it out"
        )


def open_source(
    card: DatasetCard,
    kind: SourceKind,
    *,
    dataset_path: str | None = None,
    data_dir: Path | None = None,
    hub_loader: HubLoader | None = None,
) -> PromptSource:
    check_source(kind, dataset_path)
    if kind == "hub":
        return _from_hub(card, hub_loader or load_hub_columns)
    if kind == "embedded":
        return _embedded(card)
    if dataset_path is not None:
        path = Path(dataset_path)
        return _from_file(card, path, path.name, entry_for(card, path))

    found = find_local_file(card, kind, data_dir)
    return _embedded(card) if found is None else _from_file(card, found[0], found[1].path, found[1])


def find_local_file(card: DatasetCard, kind: SourceKind, data_dir: Path | None) -> tuple[Path, LocalFile] | None:
    """The first of the card's files that the data directory has; ``local`` must have one."""
    directory = find_data_dir(data_dir)
    if directory is not None:
        for entry in card.local:
            if (directory / entry.path).is_file():
                return directory / entry.path, entry
    if kind != "local":
        return None
    accepted = ", ".join(entry.path for entry in card.local) or "none"
    raise UserError(
        f"source='local': no file for dataset {card.name!r} in "
        f"{repr(str(directory)) if directory else 'any data directory'}: set {DATA_DIR_VARIABLE} to a folder "
        f"with one of {accepted}, or give dataset_path"
    )


def load_hub_columns(hub: HubReference, columns: tuple[str, ...]) -> Mapping[str, Sequence[object]]:
    """Through the Hugging Face ``datasets`` library, which downloads and caches.

    Without that library, ``datasets`` can be this repository's folder of cards: a namespace with
    nothing to import, hence the import by name.
    """
    try:
        from datasets import load_dataset  # type: ignore[attr-defined,unused-ignore]
    except ImportError as error:
        raise UserError(
            f"source='hub' for {hub.id}: the Hugging Face datasets library is not installed: "
            f"pip install 'datasets>=3.0', or use source='auto'"
        ) from error
    try:
        table = load_dataset(hub.id, hub.config, split=hub.split, revision=hub.revision)
        loaded: dict[str, Sequence[object]] = table.select_columns(list(columns)).to_dict()
    except (OSError, ValueError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"source='hub': {hub.id} (config {hub.config}, split {hub.split}, revision {hub.revision}) could "
            f"not be loaded: {first_line}: check the network, or use source='auto'"
        ) from error
    return loaded


def _embedded(card: DatasetCard) -> PromptSource:
    return PromptSource(used="embedded", location=f"datasets/{card.name}.yaml", revision=None, rows=None)


def entry_for(card: DatasetCard, path: Path) -> LocalFile:
    """How to read a file given by path: as the card says of its name, else by its content."""
    for entry in card.local:
        if Path(entry.path).name == path.name:
            return entry
    if card.columns.prompt is not None and _first_object_has_prompt(path, card.columns.prompt):
        return LocalFile(path=path.name, format="prompts_jsonl")
    return LocalFile(path=path.name, format=detect_format(path))


def _first_object_has_prompt(path: Path, column: str) -> bool:
    """Whether the first line has the card's prompt column and nothing of a trace."""
    with open_text(path) as file:
        try:
            record = json.loads(file.readline())
        except (ValueError, RecursionError, *UNREADABLE):
            return False
    # What says when it came, or how long it was, is a trace, whose numbers are not to be passed over.
    if not isinstance(record, dict) or ({*OWN_KEYS, *RENAMED} - {"prompt"}) & record.keys():
        return False
    return isinstance(prompt_at(record, column), str)


def _from_file(card: DatasetCard, path: Path, shown: str, entry: LocalFile) -> PromptSource:
    if entry.format == "prompts_jsonl":
        if card.columns.prompt is None:
            raise UserError(f"{shown}: the card of {card.name!r} names no prompt column: use a trace file")
        keep = card.filter.keeps if card.filter is not None else lambda record: True
        rows = parse_prompts_jsonl(path, card.columns.prompt, keep=keep)
    elif entry.format == "lengths_csv":
        assert entry.column is not None
        rows = parse_lengths_csv(path, entry.column, unit=entry.unit, offset=entry.offset)
    else:
        rows = parse_trace(path, entry.format)
    return _source_of_rows("local", shown, file_digest(path), rows)


def _from_hub(card: DatasetCard, loader: HubLoader) -> PromptSource:
    names = card.columns
    prompt_column = names.prompt or names.prompt_tokens
    assert prompt_column is not None
    wanted = [prompt_column.partition("[")[0]]
    if names.timestamp_s is not None:
        wanted.append(names.timestamp_s)
    if names.response_tokens is not None:
        wanted.append(names.response_tokens)
    if card.filter is not None:
        wanted.append(card.filter.column)
    columns = loader(card.hub, tuple(wanted))
    absent = [name for name in wanted if name not in columns]
    if absent:
        raise UserError(f"{card.hub.id} has no column {', '.join(absent)}: pin an older revision in the card")

    rows = []
    for number, cells in enumerate(zip(*(columns[name] for name in wanted), strict=True)):
        record = dict(zip(wanted, cells, strict=True))
        if card.filter is None or card.filter.keeps(record):
            rows.append(_hub_row(card, record, number))
    return _source_of_rows("hub", card.hub.id, card.hub.revision, tuple(rows))


def _hub_row(card: DatasetCard, record: Mapping[str, object], number: int) -> PromptRow:
    def bad(column: str, value: object, expected: str) -> UserError:
        return UserError(
            f"{card.hub.id} row {number}: column {column!r} is {value!r}, expected {expected}: "
            f"pin another revision in datasets/{card.name}.yaml"
        )

    names = card.columns
    stamp = None if names.timestamp_s is None else record[names.timestamp_s]
    if stamp is not None and (isinstance(stamp, bool) or not isinstance(stamp, int | float)):
        raise bad(str(names.timestamp_s), stamp, "seconds")
    arrival_s = None if stamp is None else float(stamp)
    if names.prompt is not None:
        text = prompt_at(record, names.prompt)
        if not isinstance(text, str):
            raise bad(names.prompt, text, "the prompt's text")
        return PromptRow(prompt=text, arrival_s=arrival_s)
    assert names.prompt_tokens is not None
    counts = []
    for column in (names.prompt_tokens, names.response_tokens):
        count = None if column is None else record[column]
        if column is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
            raise bad(column, count, "a token count")
        counts.append(count)
    return PromptRow(prompt_len=counts[0], response_len=counts[1], arrival_s=arrival_s)  # type: ignore[arg-type]


def _source_of_rows(used: UsedSource, location: str, revision: str | None, rows: tuple[PromptRow, ...]) -> PromptSource:
    kept = tuple(row for row in rows if row.prompt or row.prompt_len)
    if not kept:
        raise UserError(
            f"{location} has no usable row ({len(rows)} read, none with a prompt): check that it is the whole file"
        )
    return PromptSource(used=used, location=location, revision=revision, rows=kept, num_dropped=len(rows) - len(kept))
