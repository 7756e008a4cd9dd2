"""Files with real conversations: LMSYS-Chat-1M's and ShareGPT's rows, as parquet, JSON lines or one JSON array.

| rows                                                       | messages                                        |
|------------------------------------------------------------|-------------------------------------------------|
| LMSYS-Chat-1M: {"conversation": [...], ...}                | {"role": "user", "content": "..."}              |
| ShareGPT: {"conversations": [...], ...}                    | {"from": "human", "value": "..."}               |
| ours: {"rounds": [[prompt, answer], ...]}                  | tokens, as in a file of sessions                |

A turn is what users (and the system) say until the model answers. Answers before the first prompt are left out: ShareGPT's file
is split in the middle of conversations. A length nobody tokenized is an estimate: 4 characters a token, 0.7 tokens a CJK character.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from engines.errors import UserError
from engines.strict_json import DECODER, RepeatedKeyError
from repro.workloads.row import UNREADABLE, bad_line, open_text
from repro.workloads.sessions.traces import RecordedRound, text_tokens

MOST_CONVERSATIONS = 20_000
"""Read of a data set: more add minutes and no information."""
Chat = tuple[RecordedRound, ...]
"""Turns of one conversation, prompts and answers in tokens."""

_ASKING = frozenset({"user", "human", "system"})
_ANSWERING = frozenset({"assistant", "gpt", "chatgpt", "bing", "bard", "model"})
_CHUNK = 1 << 20


def read_chats(paths: Sequence[Path], most: int = MOST_CONVERSATIONS) -> tuple[Chat, ...]:
    """Conversations with at least one prompt, the first ``most`` of these files."""
    found = tuple(islice((chat for path in paths for chat in _chats(path)), most))
    if not found:
        raise UserError(f"{paths[0].name} has no conversation with a prompt: check that it is the whole file")
    return found


def _chats(path: Path) -> Iterator[Chat]:
    for line, row in _rows(path):
        chat = _chat(path, line, row)
        if chat:
            yield chat


def _chat(path: Path, line: int, row: Mapping[str, Any]) -> Chat:
    if "rounds" in row:
        return _counted(path, line, row["rounds"])
    name = next((name for name in ("conversation", "conversations") if name in row), None)
    if name is None:
        raise bad_line(path, line, "conversation", None, "expected conversation, conversations or rounds")
    messages = row[name]
    if not isinstance(messages, list):
        raise bad_line(path, line, name, messages, "expected a list of messages")
    turns: list[RecordedRound] = []
    prompt: int | None = None
    answer = 0
    for message in messages:
        role, text = _message(path, line, name, message)
        if role in _ANSWERING:
            answer += text_tokens(text) if prompt is not None else 0
            continue
        if prompt is not None and answer:
            turns.append(RecordedRound(prompt, answer))
            prompt, answer = None, 0
        prompt = (prompt or 0) + text_tokens(text)
    if prompt is not None:
        turns.append(RecordedRound(prompt, answer or None))
    return tuple(turns)


def _message(path: Path, line: int, name: str, message: object) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise bad_line(path, line, name, message, "expected messages with role and content, or from and value")
    role = message.get("role", message.get("from"))
    text = message.get("content", message.get("value"))
    if not isinstance(role, str) or role not in _ASKING | _ANSWERING:
        raise bad_line(path, line, "role", role, f"expected one of {', '.join(sorted(_ASKING | _ANSWERING))}")
    if not isinstance(text, str):
        raise bad_line(path, line, "content", text, "expected text")
    return role, text


def _counted(path: Path, line: int, rounds: object) -> Chat:
    def is_round(entry: object) -> bool:
        return isinstance(entry, list) and len(entry) == 2 and all(type(item) is int and item >= 1 for item in entry)

    if not isinstance(rounds, list) or not rounds or not all(map(is_round, rounds)):
        raise bad_line(path, line, "rounds", rounds, "expected a list of [prompt, answer], whole tokens of 1 or more")
    return tuple(RecordedRound(prompt, answer) for prompt, answer in rounds)


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows with their number; nothing is read before it is asked for."""
    rows = _parquet(path) if path.suffix == ".parquet" else _json(path)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise bad_line(path, number, "row", row, "expected one JSON object")
        yield number, row


def _parquet(path: Path) -> Iterator[object]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{path.name}: reading parquet needs pyarrow: pip install pyarrow") from None
    from pyarrow.lib import ArrowException

    if not path.is_file():
        raise UserError(f"file {str(path)!r} does not exist: check the path")
    try:
        with parquet.ParquetFile(path) as file:
            names = [name for name in ("conversation", "conversations") if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=1000, columns=names):
                yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise UserError(f"{path.name} cannot be read as parquet ({error}): check that it is the whole file") from error


def _json(path: Path) -> Iterator[object]:
    """The values of one array, or one value a line."""
    try:
        with open_text(path) as file:
            start = file.read(1)
            while start.isspace():
                start = file.read(1)
            yield from _array(file) if start == "[" else _lines(file, start)
    except (json.JSONDecodeError, RecursionError, *UNREADABLE) as error:
        raise UserError(f"{path.name} cannot be read as JSON ({error}): check that it is the whole file") from error


def _lines(file: TextIO, start: str) -> Iterator[object]:
    for text in file:
        if (start + text).strip():
            yield DECODER.decode(start + text)
        start = ""


def _array(file: TextIO) -> Iterator[object]:
    """Values between the brackets, a piece of the file in memory at a time: ShareGPT's is 673 MB."""
    text, is_whole = "", False
    while True:
        text = text.lstrip().removeprefix(",").lstrip()
        if text.startswith("]"):
            return
        try:
            value, end = DECODER.raw_decode(text)
            # A number at the end of a piece may go on in the next.
            if end == len(text) and not is_whole:
                raise json.JSONDecodeError("it may go on", text, end)
        except json.JSONDecodeError as error:
            if is_whole or isinstance(error, RepeatedKeyError):
                raise
            # Growing pieces: a value of many of them is parsed a few times, not once for each.
            piece = file.read(max(_CHUNK, len(text)))
            is_whole = not piece
            text += piece
            continue
        yield value
        text = text[end:]
