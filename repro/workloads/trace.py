"""Files of requests, whose rows are prompts or lengths.

| format         | file                                                   | columns read                                    |
|----------------|--------------------------------------------------------|-------------------------------------------------|
| burstgpt_csv   | BurstGPT releases                                      | Timestamp (s), Request tokens, Response tokens  |
| azure_csv      | Azure LLM inference traces 2023, 2024                  | TIMESTAMP, ContextTokens, GeneratedTokens       |
| mooncake_jsonl | Mooncake FAST'25 traces                                | timestamp (ms), input_length, output_length     |
| trace_jsonl    | ours: {"arrival_s", "prompt_len"|"prompt", "gen_length"} | all of them; others are errors                |
| prompts_jsonl  | one object a line, the prompt in a named column        | that column                                     |
| lengths_csv    | a table of lengths, in tokens or characters            | one named column                                |

A row with an empty prompt (a failed call, in BurstGPT) is parsed, and left to the caller.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from engines.errors import UserError
from repro.workloads.rows import Row, csv_rows, first_line, json_rows

TraceFormat = Literal["burstgpt_csv", "azure_csv", "mooncake_jsonl", "trace_jsonl"]
FileFormat = Literal["burstgpt_csv", "azure_csv", "mooncake_jsonl", "trace_jsonl", "prompts_jsonl", "lengths_csv"]

CHARS_PER_TOKEN = 4
"""Length of a text nobody tokenized: characters / 4, rounded up. Off by some 20-30 % for English and code."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """Exactly one of ``prompt`` and ``prompt_len`` is set (by the parsers).

    ``gen_length`` is what the request asks for; ``response_len`` what the traced service answered,
    which is not the same thing and never sets a request's length.
    """

    prompt: str | None = None
    prompt_len: int | None = None
    arrival_s: float | None = None
    gen_length: int | None = None
    response_len: int | None = None


def estimate_tokens(num_chars: int) -> int:
    return -(-num_chars // CHARS_PER_TOKEN)


def parse_trace(path: Path, file_format: TraceFormat | None = None) -> tuple[PromptRow, ...]:
    """Reads the rows in file order. The format is read off the file's first line that is not blank when it is not
    given."""
    kind = file_format or detect_format(path)
    rows = tuple(map(_own, json_rows(path)) if kind == "trace_jsonl" else _recorded(path, _RECORDED[kind]))
    if not rows:
        raise UserError(f"{path.name} has no rows: check that it is the whole file")
    return rows


def detect_format(path: Path) -> TraceFormat:
    first = first_line(path)
    is_json = first.startswith("{")
    for kind, columns in _RECORDED.items():
        if columns.is_json == is_json and columns.prompt in first:
            return kind
    if is_json:
        return "trace_jsonl"
    known = ", ".join((*_RECORDED, "trace_jsonl"))
    raise Row(f"{path.name} line 1", {}).bad("header", first, f"not a known trace, use one of {known}")


def parse_prompts_jsonl(
    path: Path, column: str, *, keep: Callable[[Mapping[str, object]], bool] = lambda record: True
) -> tuple[PromptRow, ...]:
    """``column`` names the prompt: ``question``, or ``turns[0]`` for the first of a list."""
    return tuple(PromptRow(prompt=row.text(column)) for row in json_rows(path) if keep(row.values))


def parse_lengths_csv(
    path: Path, column: str, *, unit: Literal["tokens", "chars"] = "tokens", offset: int = 0
) -> tuple[PromptRow, ...]:
    """``offset`` tokens are added to every row that has any (a template around the text)."""
    counts = (row.count(column) for row in csv_rows(path, column))
    tokens = (count if unit == "tokens" else estimate_tokens(count) for count in counts)
    return tuple(PromptRow(prompt_len=each + offset if each else 0) for each in tokens)


class _Recorded(NamedTuple):
    """Says in which columns of a trace a service wrote what."""

    stamp: str
    prompt: str
    response: str
    clock: Callable[[Row, str], float]
    is_json: bool = False


def _recorded(path: Path, columns: _Recorded) -> Iterator[PromptRow]:
    rows: Iterable[Row] = json_rows(path) if columns.is_json else csv_rows(path, *columns[:3])
    for row in rows:
        yield PromptRow(
            arrival_s=columns.clock(row, columns.stamp),
            prompt_len=row.count(columns.prompt),
            response_len=row.count(columns.response),
        )


def clock_time(row: Row, field: str) -> float:
    """Seconds since 1970 of a date and time; one without a zone is taken as UTC, as differences alone are used."""
    value = row.values[field]
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?", value.strip(), re.ASCII)
    try:
        if match is None:
            raise ValueError(value)
        # The trace has seven decimals; datetime keeps six.
        zone = "+00:00" if match[3] in (None, "Z") else match[3]
        whole = (datetime.fromisoformat(match[1] + zone) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
    except ValueError as error:
        raise row.bad(field, value, "expected a time like 2023-11-16 18:17:03.9799600") from error
    return whole + float(match[2] or 0)


_RECORDED: Mapping[TraceFormat, _Recorded] = {
    "burstgpt_csv": _Recorded("Timestamp", "Request tokens", "Response tokens", Row.seconds),
    "azure_csv": _Recorded("TIMESTAMP", "ContextTokens", "GeneratedTokens", clock_time),
    # Mooncake's conversation trace has milliseconds, and requests in batches, one every 3 s.
    "mooncake_jsonl": _Recorded(
        "timestamp", "input_length", "output_length", lambda row, field: row.seconds(field) / 1000, is_json=True
    ),
}


def _own(row: Row) -> PromptRow:
    """Reads our own format. ``arrival_s`` and ``gen_length`` may be left out; the prompt may not."""
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
    return PromptRow(
        prompt=row.text("prompt") if "prompt" in given else None,
        prompt_len=row.count("prompt_len", low=1) if "prompt_len" in given else None,
        arrival_s=row.seconds("arrival_s") if "arrival_s" in given else None,
        gen_length=row.count("gen_length", low=1) if "gen_length" in given else None,
    )
