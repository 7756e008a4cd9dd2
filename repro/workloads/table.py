"""A file of requests or sessions of any source, read as one: which column says what, in which unit, and what its rows hold.

| name       | what it is                                                                                   |
|------------|----------------------------------------------------------------------------------------------|
| arrival_s  | when it came: seconds from any moment on, or a date and time like 2023-11-16 18:17:03.97     |
| arrival_ms | the same in milliseconds, as Mooncake's                                                      |
| prompt_len | tokens of the prompt                                                                         |
| prompt     | its text, in place of their number                                                           |
| gen_length | tokens of the answer                                                                         |
| session    | rows with the same value are rounds of one session, in the file's order                      |
| delay_s    | seconds between the answer and the session's next round                                      |
| rounds     | a whole session a row: [[prompt, answer, seconds between], ...], as in a file of sessions    |

Files are CSV, JSON lines, one JSON array, all of which may be gzipped, or parquet; which one is read off the first line.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from engines.errors import UserError, require
from repro.files import kept
from repro.workloads.card import Origin, file_digest
from repro.workloads.knobs import named_after
from repro.workloads.rounds import MESSAGES, RecordedRound, TracedSession, chat_of, counted_rounds, text_tokens
from repro.workloads.rows import Row, array_rows, csv_rows, first_line, is_array, json_rows, parquet_names, parquet_rows
from repro.workloads.trace import clock_time

NAMES = ("arrival_s", "arrival_ms", "prompt_len", "prompt", "gen_length", "session", "delay_s", "rounds")
KNOWN: tuple[Mapping[str, str], ...] = (
    {"arrival_s": "TIMESTAMP", "prompt_len": "ContextTokens", "gen_length": "GeneratedTokens"},
    {"arrival_s": "Timestamp", "prompt_len": "Request tokens", "gen_length": "Response tokens"},
    {"arrival_ms": "timestamp", "prompt_len": "input_length", "gen_length": "output_length"},
)
"""Columns of Azure's traces, BurstGPT's and Mooncake's, which need no naming."""
MOST_ROWS = 10**6
_EXAMPLE = "--columns arrival_s=timestamp,prompt_len=ContextTokens,gen_length=GeneratedTokens"
_MOONCAKE = {"timestamp", "input_length", "output_length", "hash_ids"}


@dataclass(frozen=True, kw_only=True)
class TraceFile:
    """What a user says of a file."""

    where: str
    """Its path."""
    columns: str | None = None

    def trace(self, seed: int) -> Trace:
        """The same of every seed."""
        return read_trace(self)


@dataclass(frozen=True, kw_only=True)
class Trace:
    name: str
    origin: Origin
    sessions: tuple[TracedSession, ...]
    columns: Mapping[str, str]
    num_dropped: int = 0
    """Rows left out, without a prompt or an answer: failed calls."""
    noun: Literal["file", "workload"] = "file"
    """What it is of."""

    @property
    def unit(self) -> str:
        return "row" if self.noun == "file" else "session"

    @property
    def how(self) -> str:
        """Where its numbers are from."""
        return "recorded" if self.noun == "file" else "yielded"

    @property
    def num_rounds(self) -> int:
        return sum(len(each.rounds) for each in self.sessions)


@kept(maxsize=8)
def read_trace(file: TraceFile) -> Trace:
    path = Path(file.where)
    names = _names_in(path)
    columns = _guessed(names, path) if file.columns is None else _given(file.columns, names, path)
    rows = [*islice(_read(path, columns), MOST_ROWS + 1)]
    require(len(rows) <= MOST_ROWS, f"{path.name} has more than {MOST_ROWS:,} rows: cut it")
    usable = [row for row in rows if row.rounds or (row.round and row.round.prefill_tokens and row.round.decode_tokens)]
    require(
        bool(usable),
        f"{path.name} has no row with a prompt and an answer ({len(rows)} read): check that it is the whole file",
    )
    return Trace(
        name=named_after(file.where),
        origin=Origin(source="local", location=path.name, revision=file_digest(path)),
        sessions=tuple(_sessions(usable)),
        columns=columns,
        num_dropped=len(rows) - len(usable),
    )


# -- which column is what -----------------------------------------------------------------------------------


def _names_in(path: Path) -> tuple[str, ...]:
    """The names of the file's columns; of JSON the keys of its first object."""
    if path.suffix == ".parquet":
        return parquet_names(path)
    if (objects := _objects(path)) is not None:
        names = tuple(next((row.values for row in objects), ()))
    else:
        try:
            names = tuple(name.strip() for name in next(csv.reader([first_line(path)]), []))
        except csv.Error as error:
            raise UserError(f"{path.name} is no table ({error}): give CSV, JSON lines or parquet") from error
    require(bool(names), f"{path.name} is empty: give a file with a row for each request")
    return names


def _objects(path: Path) -> Iterator[Row] | None:
    """The rows of a JSON file; None of what is none."""
    if is_array(path):
        return array_rows(path)
    return json_rows(path) if first_line(path).startswith("{") else None


def _given(text: str, names: tuple[str, ...], path: Path) -> Mapping[str, str]:
    said = f"columns={text!r}"
    found: dict[str, str] = {}
    for word in text.split(","):
        name, equals, column = (part.strip() for part in word.partition("="))
        require(
            bool(name and equals and column), f"{said}: {word!r} is no name and its column: write it like {_EXAMPLE}"
        )
        require(name in NAMES, f"{said}: {name!r} is unknown: use {', '.join(NAMES)}")
        require(name not in found, f"{said}: {name} is given twice: keep one")
        require(column not in found.values(), f"{said}: the column {column!r} is given twice: keep one")
        require(column in names, f"{said}: {path.name} has no column {column!r}: use one of {', '.join(names)}")
        found[name] = column
    require(
        found.get("arrival_s") != "timestamp" or not set(names) >= _MOONCAKE,
        f"{said}: timestamp of {path.name}, a file of Mooncake's, is in milliseconds: write arrival_ms=timestamp, or leave "
        f"columns out",
    )
    return _consistent(found, names, f"{said}:")


def _guessed(names: tuple[str, ...], path: Path) -> Mapping[str, str]:
    for known in KNOWN:
        if set(known.values()) <= set(names):
            return known
    own = {name: name for name in NAMES if name in names}
    messages = next((name for name in MESSAGES if name in names), None)
    if messages is not None and not own.keys() & {"prompt_len", "prompt", "rounds"}:
        own["rounds"] = messages
    return _consistent(own, names, f"{path.name}:")


def _consistent(found: Mapping[str, str], names: tuple[str, ...], said: str) -> Mapping[str, str]:
    fix = f"name it, like {_EXAMPLE}"
    for one, other in (("arrival_s", "arrival_ms"), ("prompt_len", "prompt")):
        require(not {one, other} <= found.keys(), f"{said} {one} and {other} say the same: name one of them as columns")
    if "rounds" in found:
        beside = found.keys() - {"rounds", "arrival_s", "arrival_ms"}
        require(not beside, f"{said} rounds hold all of a session, {', '.join(sorted(beside))} too: leave one out")
        return found
    has = f"the file has {', '.join(names)}"
    require(bool(found.keys() & {"prompt_len", "prompt"}), f"{said} no column is the prompts' length, {has}: {fix}")
    require("gen_length" in found, f"{said} no column is the answers' length gen_length, {has}: {fix}")
    require(
        "delay_s" not in found or "session" in found, f"{said} delay_s is between rows of one session: name session too"
    )
    return found


# -- rows ---------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    row: Row
    arrival_s: float | None
    round: RecordedRound | None
    """None where the row is a whole session."""
    rounds: tuple[RecordedRound, ...] = ()
    session: object = None
    prompt: str | None = None


def _read(path: Path, columns: Mapping[str, str]) -> Iterator[_Entry]:
    for row in _rows(path, columns):
        arrival_s = None
        for name, per_second in (("arrival_s", 1), ("arrival_ms", 1000)):
            if name in columns:
                arrival_s = _moment(row, columns[name], per_second)
        if "rounds" in columns:
            yield _Entry(row, arrival_s, None, _rounds_of(row, columns["rounds"]))
            continue
        prompt = row.text(columns["prompt"]) if "prompt" in columns else None
        tokens = row.count(columns["prompt_len"]) if prompt is None else text_tokens(prompt) if prompt else 0
        delay_s = row.seconds(columns["delay_s"]) if "delay_s" in columns else None
        session = None
        if "session" in columns:
            session = row.required(columns["session"])
            if not isinstance(session, str | int) or session == "":
                raise row.bad(columns["session"], session, "expected a text or a whole number")
        one = RecordedRound(tokens, row.count(columns["gen_length"]), delay_s)
        yield _Entry(row, arrival_s, one, session=session, prompt=prompt)


def _rows(path: Path, columns: Mapping[str, str]) -> Iterator[Row]:
    if path.suffix == ".parquet":
        return parquet_rows(path, *columns.values())
    return _objects(path) or csv_rows(path, *columns.values())


def _rounds_of(row: Row, column: str) -> tuple[RecordedRound, ...]:
    if column not in MESSAGES:
        return counted_rounds(Row(row.where, {"rounds": row.required(column)}), with_delays=True)
    return chat_of(row)


def _moment(row: Row, column: str, per_second: int) -> float:
    value = row.required(column)
    is_date = isinstance(value, datetime) or (isinstance(value, str) and value.strip()[4:5] == "-")
    if is_date and per_second != 1:
        raise row.bad(column, value, "a date and time says its unit: name it arrival_s, not arrival_ms")
    if isinstance(value, datetime):
        moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
    return clock_time(row, column) if is_date else row.seconds(column) / per_second


def _sessions(entries: list[_Entry]) -> Iterator[TracedSession]:
    """Rows of one session are its rounds, wherever they stand."""
    groups: dict[object, list[_Entry]] = {}
    for number, entry in enumerate(entries):
        groups.setdefault(("row", number) if entry.session is None else entry.session, []).append(entry)
    for own in groups.values():
        first = own[0]
        rounds = first.rounds if first.round is None else tuple(each.round for each in own if each.round is not None)
        yield TracedSession(rounds, first.arrival_s, first.prompt if len(own) == 1 else None, first.row.where)
