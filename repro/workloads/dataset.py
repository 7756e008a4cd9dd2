"""A data set: its card, read from ``datasets/<name>.yaml``, and its prompts, of the hub, a local file or the embedded generator.

A card holds the facts (hub id, columns, licence, defects) and the embedded generator: a length distribution together with the
statistics it follows from. The parameters are recomputed from the statistics on loading, so a card cannot drift away from its source.

``auto`` takes a local file if the data directory has one the card accepts, else the embedded generator. The network is used only
when ``hub`` is asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import isclose
from pathlib import Path
from typing import Annotated, Literal, get_args

from engines.data import DECODER
from engines.errors import UserError, require
from engines.knobs import Range
from repro.paths import DATASETS
from repro.workloads.card import Card, Local, LocalFile, Origin, Section, find_local, known_cards, load, local_file
from repro.workloads.draws import LengthDistribution, LogNormalLengths, fit_statistics
from repro.workloads.knobs import SourceKind, TimeUnit
from repro.workloads.rounds import TracedSession
from repro.workloads.rows import Row, csv_rows, first_line, is_json, is_parquet, json_rows
from repro.workloads.table import Trace, estimate_tokens, names_in, read_requests, request_of
from repro.workloads.text import TextStyle

CARDS_DIR = DATASETS

_PARAMETER_TOLERANCE = 5e-4

FileFormat = Literal["trace", "prompts_jsonl", "lengths_csv"]
"""A table of requests, which says by its columns what it is; a prompt in a named column; a length in a named column."""
OWN_KEYS = ("arrival_s", "prompt_len", "prompt", "gen_length")
RENAMED = {
    "timestamp": "arrival_s, in seconds",
    "arrival_time": "arrival_s, in seconds",
    "input_length": "prompt_len",
    "output_length": "gen_length",
    "output_len": "gen_length",
    "max_tokens": "gen_length",
}
"""Keys of other traces -> ours, of the same meaning."""


@dataclass(frozen=True, kw_only=True)
class HubReference(Section):
    id: str
    config: str | None
    split: str
    revision: str | None
    """Commit hash; None where none is known, and then ``note`` says so."""
    note: str


@dataclass(frozen=True, kw_only=True)
class PublishedColumns(Section):
    """Names in the published rows. Either ``prompt`` (text) or ``prompt_tokens`` (a count) is given."""

    prompt: str | None = None
    prompt_tokens: str | None = None
    timestamp_s: str | None = None


@dataclass(frozen=True, kw_only=True)
class RowFilter(Section):
    """Rows are kept whose ``column`` has one of ``values``."""

    column: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PromptFile(LocalFile):
    """``column``, ``unit`` and ``offset`` are for ``lengths_csv``."""

    format: FileFormat
    column: str | None = None
    unit: Literal["tokens", "chars"] = "tokens"
    offset: Annotated[int, Range(0, 2**31 - 1)] = 0


@dataclass(frozen=True, kw_only=True)
class EmbeddedGenerator(Section):
    text: TextStyle
    lengths: LengthDistribution
    basis: Literal["fitted", "assumed"]
    statistics: Mapping[str, Annotated[float, Range(-1e9, 1e9)]]
    """What the parameters follow from, of (length - offset); empty for an empirical table."""
    summary: str
    """One clause for the provenance of every run."""
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PaperRun(Section):
    num_requests: Annotated[int, Range(0, 10**9)] | None
    note: str


@dataclass(frozen=True, kw_only=True)
class DatasetCard(Card):
    hub: HubReference
    columns: PublishedColumns
    filter: RowFilter | None
    local: tuple[PromptFile, ...]
    embedded: EmbeddedGenerator
    paper_run: PaperRun

    def keeps(self, record: Mapping[str, object]) -> bool:
        """Tells whether a published row is of the data set."""
        return self.filter is None or record.get(self.filter.column) in self.filter.values


def known_datasets(cards_dir: Path = CARDS_DIR) -> tuple[str, ...]:
    return known_cards(cards_dir)


@cache
def load_card(name: str, cards_dir: Path = CARDS_DIR) -> DatasetCard:
    """Reads the card of a data set; case does not matter (the paper's LiveBench is ``livebench``)."""
    card = load(DatasetCard, name, cards_dir, unknown=f"dataset={name!r} is unknown")
    where, columns, lengths = f"{card.name}.yaml", card.columns, card.embedded.lengths
    require(
        (columns.prompt is None) != (columns.prompt_tokens is None),
        f"{where}: columns: give either prompt or prompt_tokens",
    )
    for file in card.local:
        require(
            (file.format == "lengths_csv") == (file.column is not None),
            f"{where}: local: {file.path}: column goes with format lengths_csv, and with it only",
        )
    if isinstance(lengths, LogNormalLengths):
        require(
            lengths.offset < lengths.low <= lengths.high,
            f"{where}: embedded: low={lengths.low}, high={lengths.high}: need offset={lengths.offset} < low <= high",
        )
        fitted = fit_statistics(card.embedded.statistics)
        require(
            all(
                isclose(*pair, abs_tol=_PARAMETER_TOLERANCE)
                for pair in zip(fitted, (lengths.mu, lengths.sigma), strict=True)
            ),
            f"{where}: embedded: mu={lengths.mu}, sigma={lengths.sigma} do not follow from the statistics: put mu: "
            f"{fitted.mu:.4f} and sigma: {fitted.sigma:.4f}",
        )
    return card


Record = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Records:
    """Rows of a data set have all that grading needs, in the order of their source; they never come from the embedded
    generator."""

    origin: Origin
    rows: tuple[Record, ...]
    path: Path | None = None
    """Path of a local file; None for the hub."""


def open_source(
    card: DatasetCard,
    kind: SourceKind,
    *,
    dataset_path: str | None = None,
    data_dir: Path | None = None,
    time_unit: TimeUnit | None = None,
) -> Trace:
    """Reads the requests of a data set, each a session of one round with a prompt; none of the embedded generator, which has no end.

    Rows without a prompt (failed calls, in BurstGPT) are dropped and counted. ``time_unit`` is that of a table whose columns do not say
    theirs. An answer's tokens are those that a request asks for, if it does.
    """
    file, remarks = _local_file(card, kind, dataset_path, data_dir), list[str]()
    if file is not None:
        found, entry = file
        origin, rows = found.origin, _prompts_of(card, found.paths[0], entry, time_unit)
        if entry.format == "trace" and dataset_path is not None and not _is_own(found.paths[0]):
            remarks.append("outputs as long as asked for, not as the trace's")
    elif kind == "hub":
        origin, rows = _hub_origin(card), _hub_prompts(card)
    else:
        origin = Origin(source="embedded", location=f"datasets/{card.name}.yaml", revision=None)
        return Trace(name=card.name, origin=origin, sessions=(), columns={})
    kept = tuple(row for row in rows if row.rounds[0].prefill_tokens)
    require(
        bool(kept),
        f"{origin.location} has no usable row ({len(rows)} read, none with a prompt): check that it is the whole file",
    )
    is_timed = any(row.arrival_s is not None for row in kept)
    return Trace(
        name=card.name,
        origin=origin,
        sessions=kept,
        columns={},
        num_dropped=len(rows) - len(kept),
        time="arrival_s" if is_timed else None,
        remarks=tuple(remarks),
    )


def open_records(
    card: DatasetCard,
    kind: SourceKind,
    columns: Sequence[str],
    *,
    dataset_path: str | None = None,
    data_dir: Path | None = None,
) -> Records | None:
    """Reads text ``columns`` of every row; None where the source has none (``auto`` without a file,
    ``embedded``, a trace, which has lengths and times)."""
    file = _local_file(card, kind, dataset_path, data_dir)
    if kind == "hub":
        return hub_records(card, columns)
    if file is None or file[1].format != "prompts_jsonl":
        return None
    return read_records(file[0], columns)


def hub_records(card: DatasetCard, columns: Sequence[str], *, split: str | None = None) -> Records:
    """``split`` None is the card's own."""
    if split is not None:
        card = replace(card, hub=replace(card.hub, split=split))
    rows = _hub_rows(card, tuple(columns))
    with _pinned(card):
        return Records(origin=_hub_origin(card), rows=tuple(_record(row, columns) for row in rows))


def read_records(found: Local[PromptFile], columns: Sequence[str]) -> Records:
    """Reads a JSON-lines file, packed or not."""
    (path,) = found.paths
    rows = tuple(_record(row, columns) for row in json_rows(path))
    require(bool(rows), f"{found.location} has no rows: check that it is the whole file")
    return Records(origin=found.origin, rows=rows, path=path)


def load_hub_columns(hub: HubReference, columns: tuple[str, ...]) -> Mapping[str, Sequence[object]]:
    """Loads through the Hugging Face ``datasets`` library, which downloads and caches.

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
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"source='hub': {hub.id} (config {hub.config}, split {hub.split}, revision {hub.revision}) could "
            f"not be loaded: {first}: check the network, or use source='auto'"
        ) from error
    return loaded


def _local_file(
    card: DatasetCard, kind: SourceKind, dataset_path: str | None, data_dir: Path | None
) -> tuple[Local[PromptFile], PromptFile] | None:
    """Finds the file to read, and says how; None where another source is asked for, or there is none."""
    if kind not in get_args(SourceKind):
        raise UserError(f"source={kind!r} is unknown: use one of {', '.join(get_args(SourceKind))}")
    if kind in ("hub", "embedded"):
        require(
            dataset_path is None,
            f"dataset_path={dataset_path!r} has no effect with source={kind!r}: use 'local' or leave it out",
        )
        return None
    if kind == "local":
        found: Local[PromptFile] | None = local_file(card, card.local, dataset_path, data_dir)
    else:
        found = find_local(card.local, dataset_path, data_dir)
    return None if found is None else (found, found.entry or _entry_for(card, found.paths[0]))


def _entry_for(card: DatasetCard, path: Path) -> PromptFile:
    """Says by its content how a file is read whose name the card does not know."""
    if card.columns.prompt is not None and _begins_with_prompt(path, card.columns.prompt):
        return PromptFile(path=path.name, format="prompts_jsonl")
    return PromptFile(path=path.name, format="trace")


def _begins_with_prompt(path: Path, column: str) -> bool:
    """Tells whether the first row has the card's prompt column and nothing of a trace."""
    try:
        record = DECODER.decode(first_line(path))
        # What says when it came, or how long it was, is a trace, whose numbers are not to be passed over.
        if not isinstance(record, dict) or ({*OWN_KEYS, *RENAMED} - {"prompt"}) & record.keys():
            return False
    except (ValueError, RecursionError):
        return False
    return isinstance(Row(path.name, record).at(column), str)


def _prompts_of(
    card: DatasetCard, path: Path, entry: PromptFile, time_unit: TimeUnit | None
) -> tuple[TracedSession, ...]:
    require(
        time_unit is None or entry.format == "trace",
        f"time_unit={time_unit!r} has no effect: {path.name} is read without times: leave it out",
    )
    if entry.format == "prompts_jsonl":
        if card.columns.prompt is None:
            raise UserError(f"{path.name}: the card of {card.name!r} names no prompt column: use a trace file")
        return read_prompts(path, card.columns.prompt, card.keeps)
    if entry.format == "lengths_csv":
        return read_lengths(path, entry)
    return read_rows(path, time_unit)


def read_prompts(
    path: Path, column: str, keeps: Callable[[Mapping[str, object]], bool] = lambda row: True
) -> tuple[TracedSession, ...]:
    """``column`` names the prompt: ``question``, or ``turns[0]`` for the first of a list."""
    return tuple(request_of(row, 0, row.text(column)) for row in json_rows(path) if keeps(row.values))


def read_lengths(path: Path, entry: PromptFile) -> tuple[TracedSession, ...]:
    """Adds the offset to every row that has any tokens (a template around the text)."""
    column = str(entry.column)
    rows = [(row, row.count(column)) for row in csv_rows(path, column)]
    if entry.unit == "chars":
        rows = [(row, estimate_tokens(count)) for row, count in rows]
    return tuple(request_of(row, count + entry.offset if count else 0) for row, count in rows)


def read_rows(path: Path, time_unit: TimeUnit | None = None) -> tuple[TracedSession, ...]:
    """Reads a table of requests, or our own JSON lines, in which a request may ask for an answer's length."""
    if not _is_own(path):
        return read_requests(path, time_unit)
    require(
        time_unit is None, f"time_unit={time_unit!r} has no effect: {path.name} says arrival_s, which is in seconds"
    )
    return tuple(map(_own, json_rows(path)))


def _is_own(path: Path) -> bool:
    """Tells whether a table is JSON lines in our own format."""
    return not is_parquet(path) and is_json(path) and bool({"prompt", "prompt_len"} & {*names_in(path)})


def _own(row: Row) -> TracedSession:
    """Reads a row of our own format. ``arrival_s`` and ``gen_length`` may be left out; the prompt may not."""
    given = row.values
    for key in given:
        if key not in OWN_KEYS:
            fix = f"call it {RENAMED[key]}" if key in RENAMED else f"use only {', '.join(OWN_KEYS)}"
            raise row.bad(key, given[key], f"unknown key, {fix}")
    if ("prompt" in given) == ("prompt_len" in given):
        fix = "give either prompt (text) or prompt_len (tokens), not both or neither"
        raise row.bad("prompt_len", given.get("prompt_len"), fix)
    if given.get("prompt") == "":
        raise row.bad("prompt", "", "expected a text that is not empty")
    return request_of(
        row,
        row.count("prompt_len", low=1) if "prompt_len" in given else 0,
        row.text("prompt") if "prompt" in given else None,
        row.seconds("arrival_s") if "arrival_s" in given else None,
        row.count("gen_length", low=1) if "gen_length" in given else None,
    )


def _record(row: Row, columns: Sequence[str]) -> Record:
    return {name: row.text(name) for name in columns}


def _hub_origin(card: DatasetCard) -> Origin:
    return Origin(source="hub", location=card.hub.id, revision=card.hub.revision)


def _hub_rows(card: DatasetCard, columns: tuple[str, ...]) -> Iterator[Row]:
    found = load_hub_columns(card.hub, columns)
    absent = [name for name in columns if name not in found]
    require(not absent, f"{card.hub.id} has no column {', '.join(absent)}: pin an older revision in the card")
    rows = enumerate(zip(*(found[name] for name in columns), strict=True))
    return (Row(f"{card.hub.id} row {number}", dict(zip(columns, cells, strict=True))) for number, cells in rows)


@contextmanager
def _pinned(card: DatasetCard) -> Iterator[None]:
    """Adds to a refusal of the hub's rows what can be done about it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}: pin another revision in datasets/{card.name}.yaml") from error


def _hub_prompts(card: DatasetCard) -> tuple[TracedSession, ...]:
    names = card.columns
    wanted = [(names.prompt or names.prompt_tokens or "").partition("[")[0], names.timestamp_s]
    wanted += [None if card.filter is None else card.filter.column]
    rows = _hub_rows(card, tuple(filter(None, wanted)))
    with _pinned(card):
        return tuple(_hub_prompt(card, row) for row in rows if card.keeps(row.values))


def _hub_prompt(card: DatasetCard, row: Row) -> TracedSession:
    names = card.columns
    for name in (names.prompt_tokens, names.timestamp_s):
        if name is not None and isinstance(row.values[name], str):
            raise row.bad(name, row.values[name], "expected a number")
    is_stamped = names.timestamp_s is not None and row.values[names.timestamp_s] is not None
    return request_of(
        row,
        0 if names.prompt_tokens is None else row.count(names.prompt_tokens),
        None if names.prompt is None else row.text(names.prompt),
        row.seconds(str(names.timestamp_s)) if is_stamped else None,
    )
