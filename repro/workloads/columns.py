"""The meaning of a file's columns, and the unit of its times. A user gives them, or we infer them from published or plain names.

The columns of a published format imply the unit. A column that is only called timestamp does not, and we never guess its unit.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from engines.errors import UserError, require
from repro.files import read_yaml
from repro.workloads.card import Section, parse
from repro.workloads.knobs import TimeUnit
from repro.workloads.rounds import MESSAGES

PER_SECOND: Mapping[TimeUnit, int] = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}
WORDS: Mapping[TimeUnit, str] = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
TIMES: Mapping[str, TimeUnit | None] = {
    "arrival_s": "s",
    "arrival_ms": "ms",
    "arrival_us": "us",
    "arrival_ns": "ns",
    "arrival": None,
}
DELAYS: Mapping[str, int] = {"delay_s": 1, "delay_ms": 1000}
"""Columns of the time from a row's answer to the session's next round -> units per second."""
WAITS: Mapping[str, int] = {"wait_s": 1, "wait_ms": 1000}
"""Columns of the time from the previous answer to a row's own request -> units per second."""
LENGTHS = ("prompt_len", "context_len", "prompt")
_SESSION = ("session", "turn", "id", "parent", "duration_s")
NAMES = (*TIMES, *LENGTHS, "prefix_len", "hash_ids", "gen_length", *_SESSION, *DELAYS, *WAITS, "rounds")
OPTIONAL = frozenset({*_SESSION, *DELAYS, *WAITS, "prefix_len", "hash_ids"})
"""Columns in which a row may be empty."""
EXAMPLE = "--columns arrival_s=timestamp,prompt_len=ContextTokens,gen_length=GeneratedTokens"


@dataclass(frozen=True, kw_only=True)
class Format(Section):
    """A published format of ``formats.yaml``, known by its columns."""

    name: str
    title: str
    columns: Mapping[str, str]
    also: Mapping[str, str] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    digits: Literal["whole", "fractions", "dates"] | None = None
    block: int | None = None

    def fits(self, names: Sequence[str]) -> bool:
        return {*self.columns.values(), *self.marks} <= set(names)

    def columns_in(self, names: Sequence[str]) -> dict[str, str]:
        """Return the format's columns in a file with these names, by our names."""
        return {**self.columns, **{name: column for name, column in self.also.items() if column in names}}


@dataclass(frozen=True, kw_only=True)
class KnownNames(Section):
    """The content of ``formats.yaml``."""

    formats: tuple[Format, ...]
    names: Mapping[str, tuple[str, ...]]
    limits: tuple[str, ...]


@cache
def known_names() -> KnownNames:
    path = Path(__file__).with_name("formats.yaml")
    names: KnownNames = parse(KnownNames, read_yaml(path), path.name)
    return names


_TIME = re.compile(
    r"(arrival|arrival_time|arrival_timestamp|arrived_at|timestamp|time|ts|start_time|request_time|created|created_at|date|datetime)"
    r"(?:_(?:unix_)?(s|sec|secs|seconds|ms|msec|millis|milliseconds|us|usec|micros|microseconds|ns|nanos|nanoseconds))?"
)
_VALUE = re.compile(r"[\d\s.,:+\-TZe]*\d[\d\s.,:+\-TZe]*", re.ASCII)
"""A number or a date, in place of a column's name."""
_UNITS: Mapping[str, TimeUnit] = {"s": "s", "se": "s", "ms": "ms", "mi": "ms", "us": "us", "ns": "ns", "na": "ns"}


class Delay(NamedTuple):
    column: str
    per_second: int
    """How many of the column's units make one second."""
    is_wait: bool
    """Whether the delay comes before the row's own request, and not after its answer."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns that we read from a file, and the unit of its times."""

    named: Mapping[str, str]
    """Our names -> the file's."""
    format: Format | None = None
    """The format that we recognise, if no columns were given."""
    time: str | None = None
    """The column of times."""
    unit: TimeUnit | None = None
    """The unit of its times; None if it is unknown."""
    is_said: bool = False
    """Whether a user gave the unit, so that it does not come from the file's names."""
    is_said_by_option: bool = False
    """Whether the user gave it as ``time_unit``, and not only by a name such as arrival_ms."""

    def __contains__(self, name: str) -> bool:
        return name in self.named

    def needs(self, name: str, *, is_answered: bool) -> bool:
        """Whether we leave out a row if this column is empty. With ``is_answered``, ``gen_length`` may be empty. So may a prompt, as in
        failed calls."""
        if name == "prompt" or (name in TIMES and self.has_rounds):
            return False
        if name == "gen_length" and (is_answered or "rounds" in self.named):
            return False
        return name not in OPTIONAL

    @property
    def has_dates(self) -> bool:
        """Whether the format's times are dates."""
        return self.format is not None and self.format.digits == "dates"

    @property
    def has_rounds(self) -> bool:
        """Whether several rows make a session."""
        return "session" in self.named or "parent" in self.named

    @cached_property
    def delay(self) -> Delay | None:
        """The column of delays, if there is one."""
        for units, is_wait in ((DELAYS, False), (WAITS, True)):
            for name, per_second in units.items():
                if name in self.named:
                    return Delay(self.named[name], per_second, is_wait)
        return None


def columns_of(
    names: Sequence[str], file: str, pairs: str | None, unit: TimeUnit | None, *, needs_answers: bool = True
) -> Columns:
    """Find the columns to read among ``names``: as ``pairs`` says (OURS=THEIRS, ...), or by the names. ``unit`` is the unit of times that a
    user gave, if any. Errors name ``file``. With ``needs_answers``, raises UserError for a file without the answers' lengths."""
    detected = next((entry for entry in known_names().formats if entry.fits(names)), None)
    if pairs is not None:
        named, file_format = _parse_mapping(pairs, names, file), None
        prefix = f"columns={pairs!r}:"
    elif detected is not None:
        named, file_format, prefix = detected.columns_in(names), detected, f"{file}:"
    else:
        named, file_format, prefix = _columns_by_name(names, file), None, f"{file}:"
    _check_consistent(named, names, prefix, needs_answers)
    name = next((key for key in TIMES if key in named), None)
    if name is None:
        require(unit is None, f"time_unit={unit!r} has no effect: {file} has no column of times that is read: name it")
        return Columns(named=named, format=file_format)
    own_unit = TIMES[name] or _unit_in(named[name])
    is_named = pairs is not None and name != "arrival"
    if is_named:
        require(
            unit in (None, own_unit),
            f"time_unit={unit!r} has no effect beside {name}: write arrival={named[name]} with it, or leave it out",
        )
        # We know the unit of a published column, so refuse a name with another.
        if detected is not None:
            published = next((key for key in TIMES if detected.columns_in(names).get(key) == named[name]), name)
            require(
                published == name,
                f"{prefix} {named[name]} of {file}, a file of {detected.title}, is in {WORDS[TIMES[published] or 's']}: write "
                f"{published}={named[name]}, or arrival={named[name]} and the unit that it has as --time-unit, or leave columns out",
            )
    return Columns(
        named=named,
        format=file_format,
        time=named[name],
        unit=unit or own_unit,
        is_said=unit is not None or is_named,
        is_said_by_option=unit is not None,
    )


def _parse_mapping(text: str, names: Sequence[str], file: str) -> dict[str, str]:
    prefix = f"columns={text!r}"
    columns: dict[str, str] = {}
    try:
        words = next(csv.reader([text], skipinitialspace=True, strict=True), [])
    except csv.Error as error:
        raise UserError(f"{prefix} cannot be read ({error}): write it like {EXAMPLE}") from None
    for word in words:
        name, equals, column = (part.strip() for part in word.partition("="))
        require(
            bool(name and equals and column), f"{prefix}: {word!r} is no name and its column: write it like {EXAMPLE}"
        )
        require(name in NAMES, f"{prefix}: {name!r} is unknown: use {', '.join(NAMES)}")
        require(name not in columns, f"{prefix}: {name} is given twice: keep one")
        require(column not in columns.values(), f"{prefix}: the column {column!r} is given twice: keep one")
        require(column in names, f"{prefix}: {file} has no column {column!r}: use one of {', '.join(names)}")
        columns[name] = column
    return columns


def _columns_by_name(names: Sequence[str], file: str) -> dict[str, str]:
    """The columns with our own names, or with other names that can mean only one thing."""
    # Many files number their rows. Such numbers name no request unless the file has parents.
    columns = {name: name for name in NAMES if name in names and (name != "id" or "parent" in names)}
    messages = next((name for name in MESSAGES if name in names), None)
    if messages is not None and not columns.keys() & {*LENGTHS, "rounds"}:
        # In a row with a whole chat, columns such as turn, session and parent do not describe rounds.
        columns = {name: name for name in columns if name in TIMES or name == "gen_length"} | {"rounds": messages}
    by_plain: dict[str, list[str]] = {}
    for name in names:
        by_plain.setdefault(_normalized(name), []).append(name)
    for name, others in known_names().names.items():
        is_named = columns.keys() & {*LENGTHS, "rounds"} if name in LENGTHS else name in columns
        is_whole = "rounds" in columns and (name != "gen_length" or columns["rounds"] not in MESSAGES)
        if is_named or is_whole or (name == "turn" and "session" not in columns):
            continue
        matches = [column for other in others for column in by_plain.get(other, ())]
        if name == "gen_length" and not matches:
            matches = [column for other in known_names().limits for column in by_plain.get(other, ())]
        require(len(matches) < 2, f"{file}: {' and '.join(matches)} both say {name}: name one of them, like {EXAMPLE}")
        if matches:
            columns[name] = matches[0]
    if not columns.keys() & TIMES.keys():
        candidates = [name for name in names if _TIME.fullmatch(_normalized(name))]
        arrivals = [name for name in candidates if _normalized(name).startswith("arriv")]
        # Take it only if there is one.
        columns |= next(({"arrival": chosen[0]} for chosen in (candidates, arrivals) if len(chosen) == 1), {})
    delay = next((name for name in names if _normalized(name) in ("delay", "wait", "think_time")), None)
    is_timed = columns.keys() & {*DELAYS, *WAITS}
    require(
        delay is None or "session" not in columns or bool(is_timed),
        f"{file}: the unit of its column {delay!r} is not said: name it with --columns, as wait_s, wait_ms, delay_s or delay_ms",
    )
    return columns


def _normalized(name: str) -> str:
    return re.sub(r"[\s\-_.]+", "_", name.strip()).lower()


def _unit_in(column: str) -> TimeUnit | None:
    """The unit at the end of a column's name; None without one."""
    match = _TIME.fullmatch(_normalized(column))
    return None if match is None or match[2] is None else _UNITS[(match[2] + " ")[:2].strip()]


def _check_consistent(named: Mapping[str, str], names: Sequence[str], prefix: str, needs_answers: bool) -> None:
    fix = f"name it, like {EXAMPLE}"
    for group in (tuple(TIMES), LENGTHS, (*DELAYS, *WAITS)):
        present = [name for name in group if name in named]
        require(len(present) < 2, f"{prefix} {' and '.join(present)} say the same: name one of them as columns")
    if "rounds" in named:
        allowed = {"rounds", *TIMES, *(("gen_length",) if named["rounds"] in MESSAGES else ())}
        extra = ", ".join(sorted(named.keys() - allowed))
        require(not extra, f"{prefix} rounds hold all of a session, {extra} too: leave one out")
        return
    listing = f"the file has {', '.join(names)}"
    is_bare = bool(names) and all(_VALUE.fullmatch(name) for name in names)
    require(not is_bare, f"{prefix} the first line names no columns, {listing}: write a line of names over it")
    require(any(name in named for name in LENGTHS), f"{prefix} no column is the prompts' length, {listing}: {fix}")
    require(
        "gen_length" in named or not needs_answers,
        f"{prefix} no column is the answers' length gen_length, {listing}: {fix}, or give all answers one as gen_length (--gen-length, in repro capacity --knob gen_length=...)",
    )
    is_linked = "session" in named or "parent" in named
    for name in (*DELAYS, *WAITS, "turn", "context_len", "duration_s"):
        require(name not in named or is_linked, f"{prefix} {name} is between rows of one session: name session too")
    require(("id" in named) == ("parent" in named), f"{prefix} id and parent go together: name both")
    require(
        "parent" not in named or "session" not in named, f"{prefix} parent and session say the same: name one of them"
    )
