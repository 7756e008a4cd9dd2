"""Parsers of trace and prompt files: every malformed line is refused by name.

| format         | file                                                   | columns read                                    |
|----------------|--------------------------------------------------------|-------------------------------------------------|
| burstgpt_csv   | BurstGPT releases                                      | Timestamp (s), Request tokens, Response tokens  |
| azure_csv      | Azure LLM inference traces 2023                        | TIMESTAMP, ContextTokens, GeneratedTokens       |
| mooncake_jsonl | Mooncake FAST'25 traces                                | timestamp (ms), input_length, output_length     |
| trace_jsonl    | ours: {"arrival_s", "prompt_len"|"prompt", "gen_length"} | all of them; others are errors                |
| prompts_jsonl  | one object a line, the prompt in a named column        | that column                                     |
| lengths_csv    | a table of lengths, in tokens or characters            | one named column                                |

Any of them may be gzipped. Blank lines are skipped; a row with an empty prompt (a failed call, in
BurstGPT) is parsed, and left to the caller.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Literal

from engines.errors import UserError
from engines.strict_json import RepeatedKeyError, unique
from repro.workloads.row import UNREADABLE, PromptRow, bad_line, open_text

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

MOST_TOKENS = 2**31 - 1
MOST_SECONDS = 1e12


def estimate_tokens(num_chars: int) -> int:
    return -(-num_chars // CHARS_PER_TOKEN)


def parse_burstgpt_csv(path: Path) -> tuple[PromptRow, ...]:
    columns = ("Timestamp", "Request tokens", "Response tokens")
    return tuple(
        PromptRow(
            arrival_s=_number(path, line, "Timestamp", stamp),
            prompt_len=_count(path, line, "Request tokens", request),
            response_len=_count(path, line, "Response tokens", response),
        )
        for line, (stamp, request, response) in _csv_rows(path, columns)
    )


def parse_azure_csv(path: Path) -> tuple[PromptRow, ...]:
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    return tuple(
        PromptRow(
            arrival_s=_clock_time(path, line, "TIMESTAMP", stamp),
            prompt_len=_count(path, line, "ContextTokens", context),
            response_len=_count(path, line, "GeneratedTokens", generated),
        )
        for line, (stamp, context, generated) in _csv_rows(path, columns)
    )


def parse_mooncake_jsonl(path: Path) -> tuple[PromptRow, ...]:
    """Timestamps are milliseconds; the conversation trace has them in batches, one every 3 s."""
    rows = []
    for line, record in json_rows(path):
        stamp_ms = _number(path, line, "timestamp", _required(path, line, record, "timestamp"))
        rows.append(
            PromptRow(
                arrival_s=stamp_ms / 1000,
                prompt_len=_count(path, line, "input_length", _required(path, line, record, "input_length")),
                response_len=_count(path, line, "output_length", _required(path, line, record, "output_length")),
            )
        )
    return tuple(rows)


def parse_trace_jsonl(path: Path) -> tuple[PromptRow, ...]:
    """Our own format. ``arrival_s`` and ``gen_length`` may be left out; the prompt may not."""
    rows = []
    for line, record in json_rows(path):
        for key in record:
            if key not in OWN_KEYS:
                fix = f"call it {RENAMED[key]}" if key in RENAMED else f"use only {', '.join(OWN_KEYS)}"
                raise bad_line(path, line, key, record[key], f"unknown key, {fix}")
        if ("prompt" in record) == ("prompt_len" in record):
            raise bad_line(
                path,
                line,
                "prompt_len",
                record.get("prompt_len"),
                "give either prompt (text) or prompt_len (tokens), not both or neither",
            )
        rows.append(
            PromptRow(
                prompt=_text(path, line, "prompt", record["prompt"]) if "prompt" in record else None,
                prompt_len=_count(path, line, "prompt_len", record["prompt_len"], low=1)
                if "prompt_len" in record
                else None,
                arrival_s=_number(path, line, "arrival_s", record["arrival_s"]) if "arrival_s" in record else None,
                gen_length=_count(path, line, "gen_length", record["gen_length"], low=1)
                if "gen_length" in record
                else None,
            )
        )
    return tuple(rows)


def parse_prompts_jsonl(
    path: Path, column: str, *, keep: Callable[[Mapping[str, object]], bool] = lambda record: True
) -> tuple[PromptRow, ...]:
    """``column`` names the prompt: ``question``, or ``turns[0]`` for the first of a list."""
    rows = []
    for line, record in json_rows(path):
        if keep(record):
            value = prompt_at(record, column)
            if not isinstance(value, str):
                raise bad_line(path, line, column, value, "expected the prompt's text")
            _require_whole(path, line, column, value)
            rows.append(PromptRow(prompt=value))
    return tuple(rows)


def parse_lengths_csv(
    path: Path, column: str, *, unit: Literal["tokens", "chars"] = "tokens", offset: int = 0
) -> tuple[PromptRow, ...]:
    """``offset`` tokens are added to every row that has any (a template around the text)."""
    rows = []
    for line, (value,) in _csv_rows(path, (column,)):
        count = _count(path, line, column, value)
        tokens = count if unit == "tokens" else estimate_tokens(count)
        rows.append(PromptRow(prompt_len=tokens + offset if tokens else 0))
    return tuple(rows)


_TRACE_PARSERS: Mapping[str, Callable[[Path], tuple[PromptRow, ...]]] = {
    "burstgpt_csv": parse_burstgpt_csv,
    "azure_csv": parse_azure_csv,
    "mooncake_jsonl": parse_mooncake_jsonl,
    "trace_jsonl": parse_trace_jsonl,
}


def parse_trace(path: Path, file_format: TraceFormat | None = None) -> tuple[PromptRow, ...]:
    """The rows in file order. The format is read off the file's first line that is not blank when it is not given."""
    rows = _TRACE_PARSERS[file_format or detect_format(path)](path)
    if not rows:
        raise UserError(f"{path.name} has no rows: check that it is the whole file")
    return rows


def detect_format(path: Path) -> TraceFormat:
    with open_text(path) as file:
        try:
            first = next((line.strip() for line in file if line.strip()), "")
        except UNREADABLE as error:
            raise UserError(f"{path.name} is not a text file (or a damaged .gz): {error}") from error
    if first.startswith("{"):
        return "mooncake_jsonl" if '"input_length"' in first else "trace_jsonl"
    if "Request tokens" in first:
        return "burstgpt_csv"
    if "ContextTokens" in first:
        return "azure_csv"
    raise bad_line(path, 1, "header", first, f"not a known trace, use one of {', '.join(_TRACE_PARSERS)}")


def prompt_at(record: Mapping[str, object], column: str) -> object:
    """The value at ``name`` or ``name[i]``; None where there is none."""
    match = re.fullmatch(r"([^\[\]]+)(?:\[(\d+)\])?", column)
    if match is None:
        raise UserError(f"prompt column {column!r} is not a name or name[index]")
    value = record.get(match[1])
    if match[2] is None:
        return value
    index = int(match[2])
    return value[index] if isinstance(value, list) and index < len(value) else None


def _csv_rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
    with open_text(path) as file:
        reader = csv.reader(file)
        try:
            header = [name.strip().lstrip("\ufeff") for name in next(reader, [])]
            for column in columns:
                if column not in header:
                    raise bad_line(path, 1, column, None, f"column missing, the file has {', '.join(header) or 'none'}")
                if header.count(column) > 1:
                    raise bad_line(
                        path, 1, "header", ",".join(header), f"the column {column!r} is given twice, keep one"
                    )
            picked = [header.index(column) for column in columns]
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise bad_line(
                        path,
                        reader.line_num,
                        header[min(len(cells), len(header) - 1)],
                        ",".join(cells),
                        f"the line has {len(cells)} cells, the header {len(header)}",
                    )
                yield reader.line_num, tuple(cells[index] for index in picked)
        except (csv.Error, *UNREADABLE) as error:
            raise UserError(
                f"{path.name} line {reader.line_num + 1}: unreadable ({error}): get the file again"
            ) from error


def json_rows(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    line = 0
    with open_text(path) as file:
        try:
            for line, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                try:
                    record = json.loads(text, object_pairs_hook=unique)
                except RepeatedKeyError as error:
                    raise bad_line(path, line, "line", text.strip(), f"{error}, keep one") from None
                except json.JSONDecodeError as error:
                    raise bad_line(
                        path, line, "line", text.strip(), f"not JSON ({error.msg}), one object a line"
                    ) from error
                except (ValueError, RecursionError) as error:
                    raise bad_line(
                        path, line, "line", text.strip(), "nested too deeply, or with a number too long, to be read"
                    ) from error
                if not isinstance(record, dict):
                    raise bad_line(path, line, "line", record, "expected an object {...}, one a line")
                yield line, record
        except UNREADABLE as error:
            raise UserError(f"{path.name} line {line + 1}: unreadable ({error}): get the file again") from error


def _required(path: Path, line: int, record: Mapping[str, object], key: str) -> object:
    if key not in record:
        raise bad_line(path, line, key, None, "the key is missing")
    return record[key]


def _count(path: Path, line: int, field: str, value: object, low: int = 0) -> int:
    number = value
    if isinstance(value, str):
        number = int(value) if re.fullmatch(r"\s*\d{1,18}\s*", value, re.ASCII) else None
    if isinstance(number, bool) or not isinstance(number, int) or number < low:
        raise bad_line(path, line, field, value, f"expected a whole number, at least {low}")
    if number > MOST_TOKENS:
        raise bad_line(path, line, field, value, f"expected a whole number, at most {MOST_TOKENS}")
    return number


def _number(path: Path, line: int, field: str, value: object) -> float:
    number: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value) if value <= MOST_SECONDS else math.inf
    elif isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if number is None or not 0 <= number <= MOST_SECONDS:
        raise bad_line(path, line, field, value, "expected a finite number, not negative")
    return number


def _text(path: Path, line: int, field: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise bad_line(path, line, field, value, "expected a text that is not empty")
    _require_whole(path, line, field, value)
    return value


def _require_whole(path: Path, line: int, field: str, value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        part = value[max(0, error.start - 10) : error.start + 10]
        raise bad_line(path, line, field, part, "holds half a character (a lone surrogate), take it out") from None


def _clock_time(path: Path, line: int, field: str, value: str) -> float:
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?", value.strip(), re.ASCII)
    try:
        if match is None:
            raise ValueError(value)
        # The trace has seven decimals; datetime keeps six. Differences of naive times need no time zone.
        whole = (datetime.fromisoformat(match[1]) - datetime(1970, 1, 1)).total_seconds()
    except ValueError as error:
        raise bad_line(path, line, field, value, "expected a time like 2023-11-16 18:17:03.9799600") from error
    return whole + float(match[2] or 0)
