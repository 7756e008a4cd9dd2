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

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from engines.errors import UserError
from repro.workloads.rows import Row, array_rows, is_array, json_rows, parquet_rows
from repro.workloads.sessions.traces import RecordedRound, counted_rounds, text_tokens

MOST_CONVERSATIONS = 20_000
"""Read of a data set: more add minutes and no information."""
Chat = tuple[RecordedRound, ...]
"""Turns of one conversation, prompts and answers in tokens."""

MESSAGES = ("conversation", "conversations")
_ASKING = frozenset({"user", "human", "system"})
_ANSWERING = frozenset({"assistant", "gpt", "chatgpt", "bing", "bard", "model"})


def read_chats(paths: Sequence[Path], most: int = MOST_CONVERSATIONS) -> tuple[Chat, ...]:
    """Reads conversations with at least one prompt, the first ``most`` of these files."""
    chats = (chat_of(row) for path in paths for row in _rows(path))
    found = tuple(islice(filter(None, chats), most))
    if not found:
        raise UserError(f"{paths[0].name} has no conversation with a prompt: check that it is the whole file")
    return found


def _rows(path: Path) -> Iterator[Row]:
    if path.suffix == ".parquet":
        return parquet_rows(path, *MESSAGES)
    return array_rows(path) if is_array(path) else json_rows(path)


def chat_of(row: Row) -> Chat:
    if "rounds" in row.values:
        return counted_rounds(row, with_delays=False)
    name = next((name for name in MESSAGES if name in row.values), None)
    if name is None:
        raise row.bad("conversation", None, "expected conversation, conversations or rounds")
    messages = row.values[name]
    if not isinstance(messages, list):
        raise row.bad(name, messages, "expected a list of messages")
    turns: list[RecordedRound] = []
    prompt: int | None = None
    answer = 0
    for message in messages:
        role, text = _message(row, name, message)
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


def _message(row: Row, name: str, message: object) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise row.bad(name, message, "expected messages with role and content, or from and value")
    role = message.get("role", message.get("from"))
    text = message.get("content", message.get("value"))
    if not isinstance(role, str) or role not in _ASKING | _ANSWERING:
        raise row.bad("role", role, f"expected one of {', '.join(sorted(_ASKING | _ANSWERING))}")
    if not isinstance(text, str):
        raise row.bad("content", text, "expected text")
    return role, text
