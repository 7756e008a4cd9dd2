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
from repro.workloads.rounds import MESSAGES, Chat, chat_of
from repro.workloads.rows import Row, object_rows, parquet_rows

MOST_CONVERSATIONS = 20_000
"""Read of a data set: more add minutes and no information."""


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
    return object_rows(path)
