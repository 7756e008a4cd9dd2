"""Rows of a data set: prompts from the hub or a file, as sessions of one round, and the texts that grading needs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from engines.data import DECODER
from engines.errors import UserError, require
from repro.workloads.card import Local, chosen_file
from repro.workloads.dataset import DatasetCard, HubReference, PromptFile, Record, Records, hub_origin
from repro.workloads.knobs import SourceKind, TimeUnit
from repro.workloads.rounds import TracedSession
from repro.workloads.rows import Row, csv_rows, first_line, form_of, json_rows
from repro.workloads.table import estimate_tokens, names_in, read_requests, request_of

OWN_KEYS = ("arrival_s", "prompt_len", "prompt", "gen_length")
RENAMED = {
    "timestamp": "arrival_s, in seconds",
    "arrival_time": "arrival_s, in seconds",
    "input_length": "prompt_len",
    "output_length": "gen_length",
    "output_len": "gen_length",
    "max_tokens": "gen_length",
}
"""Keys of other traces -> our keys with the same meaning."""


def open_records(
    card: DatasetCard,
    kind: SourceKind,
    columns: Sequence[str],
    *,
    dataset_path: str | None = None,
    data_dir: Path | None = None,
) -> Records | None:
    """Read text ``columns`` of every row. None if the source has no texts: ``auto`` without a file, ``embedded``, or a trace, which has
    only lengths and times."""
    file = chosen_file(card, kind, dataset_path, data_dir)
    if file is None:
        return hub_records(card, columns) if kind == "hub" else None
    entry = file.entry or entry_for(card, file.paths[0])
    return read_records(file, columns) if entry.format == "prompts_jsonl" else None


def hub_records(card: DatasetCard, columns: Sequence[str], *, split: str | None = None) -> Records:
    """Read text ``columns`` of every row on the hub. Without ``split`` this reads the card's own split."""
    if split is not None:
        card = replace(card, hub=replace(card.hub, split=split))
    rows = _hub_rows(card, tuple(columns))
    with _pinned(card):
        return Records(origin=hub_origin(card), rows=tuple(_record(row, columns) for row in rows))


def read_records(file: Local[PromptFile], columns: Sequence[str]) -> Records:
    """Read text ``columns`` of every row in a JSON-lines file, gzipped or not."""
    (path,) = file.paths
    rows = tuple(_record(row, columns) for row in json_rows(path))
    require(bool(rows), f"{file.location} has no rows: check that it is the whole file")
    return Records(origin=file.origin, rows=rows, path=path)


def load_hub_columns(hub: HubReference, columns: tuple[str, ...]) -> Mapping[str, Sequence[object]]:
    """Load columns through the Hugging Face ``datasets`` library, which downloads and caches.

    Without this library, ``datasets`` can be this repository's folder of cards, a namespace with
    nothing to import. So we import ``load_dataset`` by name.
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


def entry_for(card: DatasetCard, path: Path) -> PromptFile:
    """Return the entry for a file whose name the card does not know, judged by its content."""
    is_prompts, column = False, card.columns.prompt
    if column is not None:
        try:
            first = DECODER.decode(first_line(path))
        except (ValueError, RecursionError):
            first = None
        # A file with times or lengths is a trace, and we must not ignore its numbers.
        is_trace = not isinstance(first, dict) or bool(({*OWN_KEYS, *RENAMED} - {"prompt"}) & first.keys())
        is_prompts = not is_trace and isinstance(Row(path.name, first).value_at(column), str)
    return PromptFile(path=path.name, format="prompts_jsonl" if is_prompts else "trace")


def prompts_of(
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
    """Read the prompts of a file. ``column`` names the prompt: ``question``, or ``turns[0]`` for the first in a list."""
    return tuple(request_of(row, 0, row.text(column)) for row in json_rows(path) if keeps(row.values))


def read_lengths(path: Path, entry: PromptFile) -> tuple[TracedSession, ...]:
    """Read the lengths of a file, and add the offset (a template around the text) to every row that has tokens."""
    column = str(entry.column)
    rows = [(row, row.count(column)) for row in csv_rows(path, column)]
    if entry.unit == "chars":
        rows = [(row, estimate_tokens(count)) for row, count in rows]
    return tuple(request_of(row, count + entry.offset if count else 0) for row, count in rows)


def read_rows(path: Path, time_unit: TimeUnit | None = None) -> tuple[TracedSession, ...]:
    """Read a table of requests, or our own JSON lines, in which a request may give its answer's length."""
    if not is_own_format(path):
        return read_requests(path, time_unit)
    require(
        time_unit is None, f"time_unit={time_unit!r} has no effect: {path.name} says arrival_s, which is in seconds"
    )
    return tuple(map(_own_session, json_rows(path)))


def is_own_format(path: Path) -> bool:
    """Whether a table is JSON lines in our own format."""
    return form_of(path) in ("objects", "array") and bool({"prompt", "prompt_len"} & {*names_in(path)})


def _own_session(row: Row) -> TracedSession:
    """Read a row of our own format. ``arrival_s`` and ``gen_length`` may be missing, but not the prompt."""
    values = row.values
    for key in values:
        if key not in OWN_KEYS:
            fix = f"call it {RENAMED[key]}" if key in RENAMED else f"use only {', '.join(OWN_KEYS)}"
            raise row.bad(key, values[key], f"unknown key, {fix}")
    if ("prompt" in values) == ("prompt_len" in values):
        fix = "give either prompt (text) or prompt_len (tokens), not both or neither"
        raise row.bad("prompt_len", values.get("prompt_len"), fix)
    if values.get("prompt") == "":
        raise row.bad("prompt", "", "expected a text that is not empty")
    return request_of(
        row,
        row.count("prompt_len", low=1) if "prompt_len" in values else 0,
        row.text("prompt") if "prompt" in values else None,
        row.seconds("arrival_s") if "arrival_s" in values else None,
        row.count("gen_length", low=1) if "gen_length" in values else None,
    )


def _record(row: Row, columns: Sequence[str]) -> Record:
    return {name: row.text(name) for name in columns}


def _hub_rows(card: DatasetCard, columns: tuple[str, ...]) -> Iterator[Row]:
    data = load_hub_columns(card.hub, columns)
    missing = [name for name in columns if name not in data]
    require(not missing, f"{card.hub.id} has no column {', '.join(missing)}: pin an older revision in the card")
    rows = enumerate(zip(*(data[name] for name in columns), strict=True))
    return (Row(f"{card.hub.id} row {number}", dict(zip(columns, cells, strict=True))) for number, cells in rows)


@contextmanager
def _pinned(card: DatasetCard) -> Iterator[None]:
    """Add a fix to errors about the hub's rows."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}: pin another revision in datasets/{card.name}.yaml") from error


def hub_prompts(card: DatasetCard) -> tuple[TracedSession, ...]:
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
