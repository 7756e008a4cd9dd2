"""Read a file of requests or sessions from any source: the content of its rows, their times, and which rows make a session.

``docs/using.md`` says what the columns mean. Files are CSV, JSON lines or one JSON array, all of which may be gzipped, or parquet. We detect
the format from the content.
"""

import math
import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engines.cluster.sessions import Prefix, PrefixNames
from engines.errors import UserError, require
from engines.machine import without_collection
from repro.files import file_cache
from repro.workloads.card import Origin, file_digest
from repro.workloads.columns import PER_SECOND, TIMES, Columns, columns_of
from repro.workloads.knobs import TimeUnit, named_after
from repro.workloads.recorded import chat_of, counted_rounds, text_tokens
from repro.workloads.rounds import (
    MESSAGES,
    MOST_ROWS,
    MOST_SECONDS,
    PlainSessions,
    RecordedRound,
    Trace,
    TracedSession,
    TraceFile,
)
from repro.workloads.rows import Row, csv_rows, form_of, header_of, object_rows, parquet_names, parquet_rows

CHARS_PER_TOKEN = 4
"""Our estimate for texts without token counts. It is off by some 20-30 % for English and code."""
MOST_RATE = 10_000
"""The most rows per second. If a file has more, we read it in the wrong unit."""
MOST_TOKEN_RATE = 10**6
"""The most tokens per second, on average, that a published trace may have."""
MOST_WHOLE_GAP_S = 60
"""The largest mean gap, in seconds, at which we accept whole times from a format whose times have fractions."""
MOST_SPAN_S = 10 * 366 * 86400
EPOCH_S = (10**9, 4_102_444_800)
"""2001 and 2100, as seconds since 1970."""
_BLOCKS = tuple(2**power for power in range(17))
"""The sizes of hash_ids' blocks, in tokens, that we try if no format gives one."""
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_MOMENT = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d)(?:(:\d\d)(\.\d{1,9})?)?\s?(Z|UTC|GMT|([+-]\d\d)(?::?(\d\d))?)?", re.ASCII
)
_NAMED_ROWS = 200
"""How many rows of JSON we search for keys, because later rows may have more keys than the first."""


# We keep all rows, and the garbage collector would scan them again and again.
@file_cache(maxsize=8)
@without_collection()
def read_trace(file: TraceFile) -> Trace:
    """Read a file. Raises UserError if it is no table of requests or sessions, or if its times cannot be in the assumed unit."""
    path = Path(file.where)
    columns = columns_of(names_in(path), path.name, file.columns, file.time_unit, needs_answers=file.gen_length is None)
    if (plain := _plain_trace(path, columns, file)) is not None:
        return plain
    entries = read_entries(path, columns, file.gen_length)
    num_answered = sum(entry.num_answered for entry in entries)
    require(
        num_answered > 0 or file.gen_length is None,
        f"gen_length={file.gen_length} has no effect with workload={file.where!r}, whose rows have their own: leave it out",
    )
    filled = [entry for entry in entries if not entry.is_empty]
    clock = TimeColumn.of(path.name, columns, filled)
    if file.sort:
        require(
            columns.time is not None, f"sort has no effect: {path.name} has no column of times that is read: name it"
        )
        filled = clock.sorted(filled)
    groups, branches = _grouped(filled, columns)
    usable = [[entry for entry in group if entry.is_usable] for group in groups]
    num = sum(map(len, usable))
    require(
        num > 0,
        f"{path.name} has no row with a prompt and an answer ({len(entries)} read): check that it is the whole file",
    )
    usable = [group for group in usable if group]
    is_derived = columns.time is not None and columns.delay is None and any(len(group) > 1 for group in usable)
    sessions, notes = _sessions(usable, columns, clock, is_derived=is_derived)
    if "hash_ids" in columns:
        sessions, unfit = _with_prefixes(sessions, usable, None if columns.format is None else columns.format.block)
        notes += unfit
    num_empty = len(entries) - len(filled)
    remarks = {
        f"{num_empty} rows with an empty cell left out": num_empty,
        f"{num_answered} answers of {file.gen_length} tokens, where the file tells none": num_answered,
        "rows sorted by their times": file.sort,
        **dict.fromkeys([*branches, *notes], True),
    }
    return _trace(
        path,
        file,
        columns,
        clock,
        sessions,
        num_dropped=len(filled) - num,
        uses_times=is_derived,
        remarks=tuple(text for text, holds in remarks.items() if holds),
    )


_PLAIN = {*TIMES, "prompt_len", "gen_length"}


def _plain_trace(path: Path, columns: Columns, file: TraceFile) -> Trace | None:
    """Read a file without keeping its rows, if it holds only requests, a number in each cell, and times that do not fall. None for any
    other file, and if a row needs an error or a remark."""
    named = columns.named
    is_plain = named.keys() <= _PLAIN and "prompt_len" in named and not file.sort and file.gen_length is None
    if not is_plain or (columns.time is not None and (columns.unit is None or columns.has_dates)):
        return None
    numbers, prefill, decode, stamps = array("q"), array("q"), array("q"), array("d")
    where = ""
    try:
        for row in islice(_rows_of(path, named.values()), MOST_ROWS + 1):
            where, _, number = row.where.rpartition(" ")
            numbers.append(int(number))
            prefill.append(row.count(named["prompt_len"]))
            decode.append(row.count(named["gen_length"]))
            if columns.time is not None:
                stamps.append(row.moment(columns.time, limit=2**53))
    except UserError:
        return None
    is_usable = (np.array(prefill) > 0) & (np.array(decode) > 0)
    if len(numbers) > MOST_ROWS or not is_usable.any():
        return None
    clock, arrival_s = TimeColumn(), None
    if columns.time is not None:
        times = np.array(stamps)
        span = _Span.of(stamps, sum(prefill) + sum(decode))
        if (np.diff(times[is_usable]) < 0).any() or span.problem(columns) is not None:
            return None
        clock = TimeColumn.of_span(columns, span)
        arrival_s = ((times - clock.start) / clock.per_second)[is_usable]
    sessions = PlainSessions(
        where=where,
        numbers=np.array(numbers)[is_usable],
        prefill=np.array(prefill)[is_usable],
        decode=np.array(decode)[is_usable],
        arrival_s=arrival_s,
    )
    return _trace(path, file, columns, clock, sessions, num_dropped=len(numbers) - len(sessions))


def _trace(
    path: Path, file: TraceFile, columns: Columns, clock: "TimeColumn", sessions: Sequence[TracedSession], **others: Any
) -> Trace:
    return Trace(
        name=named_after(file.where),
        origin=Origin(source="local", location=path.name, revision=file_digest(path)),
        sessions=sessions,
        columns=columns.named,
        time=columns.time,
        time_unit=clock.said,
        unclear=clock.unclear,
        span_s=clock.span_s,
        **others,
    )


@without_collection()
def read_requests(path: Path, time_unit: TimeUnit | None) -> tuple[TracedSession, ...]:
    """Read each row of a data set's file as a request, in the file's order and without the answers' lengths.

    A row with an empty cell, or with an empty prompt (a failed call, in BurstGPT), has a prompt of no tokens.
    """
    columns = columns_of(names_in(path), path.name, None, time_unit)
    require("rounds" not in columns, f"{path.name} is a file of conversations: serve it as a workload (--workload)")
    entries = read_entries(path, columns)
    require(any(not entry.is_empty for entry in entries), f"{path.name} has no rows: check that it is the whole file")
    clock = TimeColumn.of(path.name, columns, entries)
    require(clock.unclear is None, clock.unclear or "")
    tokens = (entry.rounds[0].prefill_tokens if entry.rounds else 0 for entry in entries)
    return tuple(
        request_of(entry.row, num, entry.prompt, clock.seconds(entry))
        for entry, num in zip(entries, tokens, strict=True)
    )


def request_of(
    row: Row, tokens: int, prompt: str | None = None, arrival_s: float | None = None, answer: int | None = None
) -> TracedSession:
    """Return a row of a data set as a session of one round. A text counts characters / 4 tokens, rounded up."""
    tokens = estimate_tokens(len(prompt)) if prompt else tokens
    return TracedSession((RecordedRound(tokens, answer),), arrival_s, prompt or None, row.where)


def estimate_tokens(num_chars: int) -> int:
    return -(-num_chars // CHARS_PER_TOKEN)


# -- rows ---------------------------------------------------------------------------------------------------


class TraceRow(NamedTuple):
    """A row of a file. ``stamp`` is the number in its column of times, or a date's seconds since 1970."""

    row: Row
    stamp: float | None = None
    is_date: bool = False
    rounds: tuple[RecordedRound, ...] = ()
    """The row's one round, or all rounds of a session. Empty if a required cell is empty."""
    prompt: str | None = None
    prefix: int = 0
    duration_s: float = 0.0
    num_answered: int = 0
    """How many answers have the length that a user gave, because the row has none."""
    is_empty: bool = False
    ids: tuple[int, ...] | None = None
    """The hash_ids of the prompt's blocks."""

    @property
    def is_usable(self) -> bool:
        """Whether the row has a prompt and an answer. A chat may end with a prompt."""
        return bool(self.rounds and self.rounds[0].prefill_tokens and self.rounds[0].decode_tokens != 0)

    @property
    def num_tokens(self) -> int:
        return sum(turn.prefill_tokens + (turn.decode_tokens or 0) for turn in self.rounds)


def names_in(path: Path) -> tuple[str, ...]:
    """The names of the file's columns. For JSON, these are the keys of its first objects."""
    form = form_of(path)
    if form == "parquet":
        return parquet_names(path)
    if form == "csv":
        names = header_of(path)
    else:
        names = tuple(dict.fromkeys(name for row in islice(_objects(path), _NAMED_ROWS) for name in row.values))
    require(bool(names), f"{path.name} is empty: give a file with a row for each request")
    return names


def _rows_of(path: Path, columns: Collection[str], others: Collection[str] = ()) -> Iterator[Row]:
    """Read these columns of every row, and those of ``others`` that a file of objects has."""
    wanted, form = (*columns, *others), form_of(path)
    if form == "parquet":
        return parquet_rows(path, *wanted)
    if form == "csv":
        return csv_rows(path, *columns)
    # Keep only these columns, so that a long file leaves nothing unread in memory.
    return (Row(where, {name: cells[name] for name in wanted if name in cells}) for where, cells in _objects(path))


def _objects(path: Path) -> Iterator[Row]:
    return map(_unwrapped, object_rows(path))


def _unwrapped(row: Row) -> Row:
    """The row with the fields of the request in its body or payload, if it has one, as in batch files and AIPerf's payloads."""
    for name in ("body", "payload"):
        inner = row.values.get(name)
        if isinstance(inner, dict) and inner.keys() & {"messages", "prompt", "input"}:
            return Row(row.where, {**{key: value for key, value in row.values.items() if key != name}, **inner})
    return row


def read_entries(path: Path, columns: Columns, length: int | None = None) -> list[TraceRow]:
    """Read every row, in the file's order. Answers have ``length`` tokens if the row does not give their length."""
    rows = _rows_of(path, columns.named.values(), MESSAGES if "rounds" in columns else ())
    needed = [column for name, column in columns.named.items() if columns.needs(name, is_answered=length is not None)]
    entries = [_entry(row, columns, needed, length) for row in islice(rows, MOST_ROWS + 1)]
    require(len(entries) <= MOST_ROWS, f"{path.name} has more than {MOST_ROWS:,} rows: cut it")
    return entries


def _entry(row: Row, columns: Columns, needed: Sequence[str], length: int | None) -> TraceRow:
    for name in needed:
        if name in row.values and row.is_empty(name):
            return TraceRow(row, is_empty=True)
    named, stamp, is_date = columns.named, None, False
    if columns.time is not None and not (columns.has_rounds and row.is_empty(columns.time)):
        stamp, is_date = _stamp(row, columns)
    if "rounds" in named:
        rounds = _rounds_of(row, named)
        num_bare = 0 if length is None else sum(turn.decode_tokens is None for turn in rounds)
        if num_bare:
            rounds = tuple(turn if turn.decode_tokens else turn._replace(decode_tokens=length) for turn in rounds)
        return TraceRow(row, stamp, is_date, rounds, num_answered=num_bare)
    prompt = row.text(named["prompt"]) if "prompt" in named else None
    column = named.get("prompt_len") or named.get("context_len")
    tokens = text_tokens(prompt) if prompt else 0 if column is None else row.count(column)
    is_bare = length is not None and not row.has(named.get("gen_length"))
    answer = length if is_bare else row.count(named["gen_length"])
    delay, delay_s = columns.delay, None
    if delay is not None and row.has(delay.column):
        delay_s = row.seconds(delay.column) / delay.per_second
    rounds = (RecordedRound(tokens, answer, delay_s),)
    prefix, duration = named.get("prefix_len"), named.get("duration_s")
    prefix_len = row.count(prefix) if tokens and row.has(prefix) else 0
    duration_s = row.seconds(duration) if row.has(duration) else 0.0
    hashes = named.get("hash_ids")
    ids = tuple(row.numbers(hashes)) if row.has(hashes) else None
    return TraceRow(row, stamp, is_date, rounds, prompt, prefix_len, duration_s, int(is_bare), ids=ids)


def _rounds_of(row: Row, columns: Mapping[str, str]) -> tuple[RecordedRound, ...]:
    column, answer = columns["rounds"], columns.get("gen_length")
    if column not in MESSAGES:
        return counted_rounds(Row(row.where, {"rounds": row.required(column)}), with_delays=True)
    turns = chat_of(row, column)
    if turns and turns[-1].decode_tokens is None and row.has(answer):
        return (*turns[:-1], turns[-1]._replace(decode_tokens=row.count(answer, low=1)))
    return turns


def _stamp(row: Row, columns: Columns) -> tuple[float, bool]:
    column = str(columns.time)
    value = row.required(column)
    is_date = isinstance(value, datetime)
    if isinstance(value, str):
        is_date = bool("-" in value and _DATE.match(value.strip())) or (columns.has_dates and not row.is_number(column))
    if not is_date:
        return row.moment(column, limit=1e19), False
    if columns.unit not in (None, "s") or columns.is_said_by_option:
        fix = (
            "a date and time says its unit: name it arrival_s"
            if columns.unit != "s"
            else "a date and time says its unit"
        )
        raise row.bad(column, value, f"{fix}, and leave the unit out")
    if isinstance(value, datetime):
        moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds(), True
    return clock_time(row, column), True


def clock_time(row: Row, field: str) -> float:
    """The seconds since 1970 of a date and time. Without a zone we assume UTC, since we use only differences."""
    value = row.values[field]
    match = _MOMENT.fullmatch(value.strip())
    try:
        if match is None:
            raise ValueError(value)
        # Traces have up to nine decimals, and datetime keeps six.
        zone = "+00:00" if match[5] is None else f"{match[5]}:{match[6] or '00'}"
        minute = datetime.fromisoformat(f"{match[1]}{match[2] or ':00'}{zone}")
        seconds = (minute - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
    except ValueError as error:
        raise row.bad(field, value, "expected a time like 2023-11-16 18:17:03.9799600") from error
    return seconds + float(match[3] or 0)


# -- times --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TimeColumn:
    """How the numbers in a column of times become seconds."""

    column: str | None = None
    said: str | None = None
    """The unit of times, in a word."""
    per_second: int = 1
    start: float = 0
    """Subtracted from each time, because seconds since 1970 in small units have more digits than a float keeps."""
    unclear: str | None = None
    span_s: float | None = None
    """Seconds from the first to the last time."""

    @classmethod
    def of(cls, file: str, columns: Columns, entries: Sequence[TraceRow]) -> "TimeColumn":
        stamped = [entry for entry in entries if entry.stamp is not None]
        if columns.time is None or not stamped:
            return cls()
        span = _Span.of([entry.stamp or 0 for entry in stamped], sum(entry.num_tokens for entry in stamped))
        if any(entry.is_date for entry in stamped):
            undated = next((entry for entry in stamped if not entry.is_date), None)
            if undated is not None:
                raise undated.row.bad(
                    columns.time, undated.row.values[columns.time], "other rows have a date and time: write one"
                )
            return cls(column=columns.time, said="dates", span_s=span.seconds("s"))
        if columns.unit is None or (columns.has_dates and not columns.is_said):
            readings = ", ".join(f"in {unit} {span.text(unit)}" for unit in ("s", "ms", "us"))
            unclear = (
                f"{file}: the unit of its column {columns.time!r} is not said: {readings}: say which with --time-unit"
            )
            return cls(column=columns.time, unclear=unclear)
        if (problem := span.problem(columns)) is not None:
            fitting = [f"--time-unit {unit} ({span.text(unit)})" for unit in span.fitting(columns.unit)]
            fix = f"{' or '.join(fitting)} would fit" if fitting else "check the column"
            last = max(stamped, key=lambda entry: entry.stamp or 0).row
            raise last.bad(columns.time, last.values[columns.time], f"{problem}: {fix}")
        return cls.of_span(columns, span)

    @classmethod
    def of_span(cls, columns: Columns, span: "_Span") -> "TimeColumn":
        """The column's conversion. Its unit must be known, and the times must be able to have it."""
        assert columns.unit is not None
        is_long = span.low > 10**11
        return cls(
            column=columns.time,
            said=columns.unit,
            per_second=PER_SECOND[columns.unit],
            start=span.low if is_long else 0,
            span_s=span.seconds(columns.unit),
        )

    def seconds(self, entry: TraceRow) -> float | None:
        return None if entry.stamp is None else (entry.stamp - self.start) / self.per_second

    def sorted(self, entries: Sequence[TraceRow]) -> list[TraceRow]:
        untimed = next((entry for entry in entries if entry.stamp is None), None)
        if untimed is not None:
            raise untimed.row.bad(str(self.column), None, "a row without a time cannot be sorted: leave sort out")
        return sorted(entries, key=lambda each: each.stamp or 0)


class _Span(NamedTuple):
    """A file's times as written, and the total tokens of its rows."""

    low: float
    high: float
    num: int
    fraction: float | None
    """The first time that is not a whole number."""
    tokens: int

    @classmethod
    def of(cls, stamps: Sequence[float], tokens: int) -> "_Span":
        fraction = next((stamp for stamp in stamps if stamp != math.floor(stamp)), None)
        return cls(min(stamps), max(stamps), len(stamps), fraction, tokens)

    def seconds(self, unit: TimeUnit) -> float:
        return (self.high - self.low) / PER_SECOND[unit]

    def text(self, unit: TimeUnit) -> str:
        span_s = self.seconds(unit)
        return f"{self.num:,} rows in {span_s:,.6g} s{f', {(self.num - 1) / span_s:,.3g} a second' if span_s else ''}"

    def problem(self, columns: Columns) -> str | None:
        """Why the times cannot be in the columns' unit; None if they can."""
        assert columns.unit is not None
        if (reason := self._why_impossible(columns.unit)) is not None or columns.is_said:
            return reason
        # The column's name may give another unit than the values have.
        per_second, fmt = PER_SECOND[columns.unit], columns.format
        coarser = [unit for unit, per in PER_SECOND.items() if per < per_second]
        for unit in coarser:
            if EPOCH_S[0] * PER_SECOND[unit] <= self.low and self.high <= EPOCH_S[1] * PER_SECOND[unit]:
                return f"read in {columns.unit}, and it looks like {unit} since 1970"
        if fmt is None:
            return None
        gap_s = (self.high - self.low) / per_second / max(1, self.num - 1)
        if fmt.digits == "fractions" and self.fraction is None and self.num >= 4 and gap_s > MOST_WHOLE_GAP_S:
            return f"{fmt.title} has fractions of seconds, and {self.text(columns.unit)} have none"
        if fmt.digits == "whole" and self.fraction is not None:
            return f"{fmt.title} has whole {columns.unit}, and a row has {self.fraction}"
        span_s = (self.high - self.low) / per_second
        if coarser and self.num >= 4 and 0 < span_s < self.tokens / MOST_TOKEN_RATE:
            return f"in {columns.unit}, as {fmt.title} has them, {self.text(columns.unit)} bring {self.tokens / span_s:,.3g} tokens a second"
        return None

    def fitting(self, excluded: TimeUnit) -> list[TimeUnit]:
        """The other units that the times can have. If some make them moments since 1970, only those."""
        units: list[TimeUnit] = [unit for unit in PER_SECOND if unit != excluded and self._why_impossible(unit) is None]
        return [unit for unit in units if self.low >= EPOCH_S[0] * PER_SECOND[unit]] or units

    def _why_impossible(self, unit: TimeUnit) -> str | None:
        per_second = PER_SECOND[unit]
        span_s = (self.high - self.low) / per_second
        if self.high / per_second > MOST_SECONDS:
            return f"expected a time of at most {MOST_SECONDS:g} s, and it is read in {unit}"
        if span_s > MOST_SPAN_S:
            return f"in {unit} the file would take {span_s / 86400 / 365.25:,.3g} years"
        if self.num >= 3 and 0 < span_s < (self.num - 1) / MOST_RATE:
            return f"in {unit} it is the last of {self.text(unit)}, and {MOST_RATE:,} a second are the most"
        return None


# -- sessions -----------------------------------------------------------------------------------------------


def _grouped(entries: Sequence[TraceRow], columns: Columns) -> tuple[list[list[TraceRow]], list[str]]:
    """Group the rows of each session, wherever they stand. A row without a session is a group of its own."""
    if "parent" in columns:
        return _linked(entries, columns)
    session = columns.named.get("session")
    if session is None:
        return [[entry] for entry in entries], []
    groups: dict[object, list[TraceRow]] = {}
    for number, entry in enumerate(entries):
        key = _key(entry.row, session) if entry.row.has(session) else ("row", number)
        groups.setdefault(key, []).append(entry)
    if "turn" in columns:
        return [_by_turn(group, columns.named["turn"]) for group in groups.values()], []
    return list(groups.values()), []


def _key(row: Row, column: str) -> tuple[str, object]:
    """A key that distinguishes values as they are written: 1, true and "1" are three keys."""
    value = row.required(column)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int) or value == "":
        raise row.bad(column, value, "expected a text or a whole number")
    return type(value).__name__, value


def _by_turn(rows: list[TraceRow], column: str) -> list[TraceRow]:
    if len(rows) == 1:
        return rows
    by_turn: dict[int, TraceRow] = {}
    for entry in rows:
        turn = entry.row.count(column)
        if turn in by_turn:
            raise entry.row.bad(
                column, turn, f"{by_turn[turn].row.where} of its session has the same: number its rounds"
            )
        by_turn[turn] = entry
    return [by_turn[turn] for turn in sorted(by_turn)]


def _linked(entries: Sequence[TraceRow], columns: Columns) -> tuple[list[list[TraceRow]], list[str]]:
    """Group rows by parent. If several rows follow one, the first continues its session, and the others begin sessions."""
    name, parent = columns.named["id"], columns.named["parent"]
    positions: dict[object, int] = {}
    for number, entry in enumerate(entries):
        key = _key(entry.row, name)
        if key in positions:
            raise entry.row.bad(
                name, entry.row.values[name], f"{entries[positions[key]].row.where} has the same: keep one"
            )
        positions[key] = number
    last: dict[int, list[TraceRow]] = {}
    groups: list[list[TraceRow]] = []
    num_branches = 0
    for number, entry in enumerate(entries):
        position = None if entry.row.is_empty(parent) else positions.get(_key(entry.row, parent))
        if position is not None and position >= number:
            raise entry.row.bad(
                parent, entry.row.values[parent], "its parent stands behind it: sort the file, or give --sort"
            )
        group = None if position is None else last.pop(position, None)
        if group is None:
            num_branches += position is not None
            groups.append(group := [])
        group.append(entry)
        last[number] = group
    branches = f"{num_branches} rows that follow one which another follows begin a session of their own"
    return groups, [branches] * bool(num_branches)


def _sessions(
    groups: Sequence[list[TraceRow]], columns: Columns, clock: TimeColumn, *, is_derived: bool
) -> tuple[tuple[TracedSession, ...], list[str]]:
    has_several = any(len(group) > 1 for group in groups)
    if is_derived and clock.unclear is not None:
        raise UserError(clock.unclear)
    is_context, is_wait = "context_len" in columns, columns.delay is not None and columns.delay.is_wait
    num_short, sessions = 0, []
    for group in groups:
        first = group[0]
        rounds, text = first.rounds, first.prompt
        if len(group) > 1 or first.prefix or is_wait:
            text = text if len(group) == 1 else None
            turns = [entry.rounds[0] for entry in group]
            lengths = [turn.prefill_tokens for turn in turns]
            if is_context:
                histories = [0, *(turn.prefill_tokens + (turn.decode_tokens or 0) for turn in turns[:-1])]
                is_new = [tokens <= history for tokens, history in zip(lengths, histories, strict=True)]
                # A context that is no longer than the history cannot contain it. The history was cut, so all of it is new.
                lengths = [
                    tokens if new else tokens - history
                    for tokens, history, new in zip(lengths, histories, is_new, strict=True)
                ]
                num_short += sum(is_new)
            lengths[0] += first.prefix
            delays = _delays(group, columns, clock if is_derived else None)
            rounds = tuple(map(RecordedRound, lengths, [turn.decode_tokens for turn in turns], delays))
        sessions.append(TracedSession(rounds, clock.seconds(first), text, first.row.where))
    gap = (
        "from an answer to the next request"
        if "duration_s" in columns
        else "from one request to the next, after its answer"
    )
    remarks = {
        "sessions: what a prompt repeats of those before it is taken off": is_context and has_several,
        f"{num_short} prompts no longer than what came before them count as new": num_short,
        f"delays follow from the rows' times: seconds {gap}": is_derived,
        "times of later rounds not used: they come by their delays": has_several
        and columns.time
        and columns.delay is not None,
        "texts of sessions of several rounds not used": has_several and "prompt" in columns,
    }
    return tuple(sessions), [text for text, holds in remarks.items() if holds]


def _with_prefixes(
    sessions: Sequence[TracedSession], groups: Sequence[list[TraceRow]], block: int | None
) -> tuple[tuple[TracedSession, ...], list[str]]:
    """Give sessions names for the blocks of their prompts, if all their rows have hash_ids that fit the lengths. The format may give
    ``block``, the tokens of each. Without it we use the only power of two that fits the requests of one round."""
    if block is None:
        alone = [(rows[0].ids, each.rounds) for each, rows in zip(sessions, groups, strict=True) if len(rows) == 1]
        fitting = [
            size for size in _BLOCKS if all(ids is None or Prefix(size, (ids,)).fits(lengths) for ids, lengths in alone)
        ]
        if len(fitting) != 1 or all(ids is None for ids, _ in alone):
            return tuple(sessions), ["hash_ids left out: the tokens of their blocks do not follow from the lengths"]
        (block,) = fitting
    names, named, num_unfit = PrefixNames(), [], 0
    for session, rows in zip(sessions, groups, strict=True):
        ids = [row.ids for row in rows if row.ids is not None]
        prefix = Prefix(block, tuple(map(names.of, ids)))
        is_fit = len(ids) == len(rows) and prefix.fits(session.rounds)
        num_unfit += bool(ids) and not is_fit
        named.append(session._replace(prefix=prefix) if is_fit else session)
    unfit = f"hash_ids of {num_unfit} sessions left out: they are not those of blocks of {block} tokens"
    return tuple(named), [unfit] * bool(num_unfit)


def _delays(rows: Sequence[TraceRow], columns: Columns, clock: TimeColumn | None) -> list[float | None]:
    """Seconds from each row's answer to the next row's request."""
    if clock is None:
        recorded = [row.rounds[0].delay_s for row in rows]
        return [*recorded[1:], None] if columns.delay is not None and columns.delay.is_wait else recorded
    delays: list[float | None] = []
    for row, next_row in pairwise(rows):
        times = clock.seconds(row), clock.seconds(next_row)
        if times[0] is None or times[1] is None:
            delays.append(None)
            continue
        if times[1] < times[0]:
            column = str(columns.time)
            fix = "earlier than the round before it: sort the file, or give --sort"
            raise next_row.row.bad(column, next_row.row.values[column], fix)
        delays.append(max(0.0, times[1] - times[0] - row.duration_s))
    return [*delays, None]
