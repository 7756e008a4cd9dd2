"""Files of requests, whose rows are prompts or lengths.

| format         | file                                                   | columns read                                    |
|----------------|--------------------------------------------------------|-------------------------------------------------|
| burstgpt_csv, azure_csv, mooncake_jsonl, ... | published traces (columns.FORMATS) | times, lengths                                |
| trace_jsonl    | ours: {"arrival_s", "prompt_len"|"prompt", "gen_length"} | all of them; others are errors                |
| prompts_jsonl  | one object a line, the prompt in a named column        | that column                                     |
| lengths_csv    | a table of lengths, in tokens or characters            | one named column                                |

A row with an empty prompt (a failed call, in BurstGPT) is parsed, and left to the caller; one with an empty cell has an empty prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

from engines.errors import UserError, require
from repro.workloads.columns import FORMATS, FormatName, columns_as
from repro.workloads.knobs import TimeUnit
from repro.workloads.rows import Row, csv_rows, first_line, is_json, json_rows
from repro.workloads.table import Clock, names_in, read_entries

TraceFormat = Literal[FormatName, "trace_jsonl"]
FileFormat = Literal[TraceFormat, "prompts_jsonl", "lengths_csv"]

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


def parse_trace(
    path: Path, file_format: TraceFormat | None = None, time_unit: TimeUnit | None = None
) -> tuple[PromptRow, ...]:
    """Reads the rows in file order, each a request. The format is read off the names of the file's columns when it is not given."""
    kind = file_format or detect_format(path)
    if kind == "trace_jsonl":
        require(
            time_unit is None, f"time_unit={time_unit!r} has no effect: {path.name} says arrival_s, which is in seconds"
        )
        rows = tuple(map(_own, json_rows(path)))
    else:
        rows = tuple(_recorded(path, kind, time_unit))
    if not rows:
        raise UserError(f"{path.name} has no rows: check that it is the whole file")
    return rows


def _recorded(path: Path, kind: FormatName, time_unit: TimeUnit | None) -> Iterator[PromptRow]:
    columns = columns_as(kind, names_in(path), path.name, time_unit)
    entries = read_entries(path, columns)
    if all(entry.is_empty for entry in entries):
        return
    clock = Clock.of(path.name, columns, entries)
    require(clock.unclear is None, clock.unclear or "")
    for entry in entries:
        yield PromptRow(arrival_s=clock.seconds(entry), prompt_len=entry.tokens, response_len=entry.answer)


def detect_format(path: Path) -> TraceFormat:
    names = names_in(path)
    lengths = {"prompt_len", "context_len"}
    whole = (kind for kind, known in FORMATS.items() if known.fits(names) and lengths & known.columns.keys())
    # A file that lacks another column is told so.
    nearly: tuple[FormatName, ...] = ("burstgpt_csv", "azure_csv", "mooncake_jsonl")
    lacking = (kind for kind in nearly if FORMATS[kind].columns["prompt_len"] in names)
    if (found := next(chain(whole, lacking), None)) is not None:
        return found
    if is_json(path):
        return "trace_jsonl"
    raise Row(f"{path.name} line 1", {}).bad(
        "header", first_line(path), f"not a known trace, use one of {', '.join(get_args(TraceFormat))}"
    )


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
