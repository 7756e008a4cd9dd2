"""Files with real sessions. A length nobody tokenized is an estimate: 4 characters a token, 0.7 tokens a CJK character.

| format              | file                                                        | what it lacks                |
|---------------------|-------------------------------------------------------------|------------------------------|
| sessions_jsonl      | ours: {"arrival_s"?, "rounds": [[prefill, decode, delay_s?]]} | nothing                      |
| toolbench_dfsdt     | ToolBench answers found by DFSDT, one query an object         | times of tool calls          |
| hotpotqa_distractor | HotpotQA with ten paragraphs a question                       | generated text, rounds       |
| dureader_search     | DuReader 2.0, documents a question                            | generated text, rounds       |

Where the generated text is missing a round's decode length is None. Retrieval sets have their paragraphs dealt in
order to three retrievals, as AMPD's traces invoke three (App. B); the question comes with the first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from engines.errors import require
from repro.workloads.rounds import RecordedRound, counted_rounds, text_tokens
from repro.workloads.rows import MOST_SECONDS, Row, array_rows, is_seconds, json_rows

SessionFormat = Literal["sessions_jsonl", "toolbench_dfsdt", "hotpotqa_distractor", "dureader_search"]
RETRIEVALS = 3


class RecordedSession(NamedTuple):
    rounds: tuple[RecordedRound, ...]
    arrival_s: float | None = None


def read_sessions(path: Path, kind: SessionFormat | None = None) -> tuple[RecordedSession, ...]:
    """Reads our own format where none is said."""
    published = None if kind is None else _PUBLISHED.get(kind)
    sessions = tuple(map(_own, json_rows(path)) if published is None else _published(path, published))
    require(bool(sessions), f"{path.name} has no session: check that it is the whole file")
    return sessions


def _own(row: Row) -> RecordedSession:
    for key in sorted(row.values.keys() - {"arrival_s", "rounds"}):
        raise row.bad(key, row.values[key], "unknown: use arrival_s and rounds")
    arrival_s = row.values.get("arrival_s")
    if arrival_s is not None and not is_seconds(arrival_s, MOST_SECONDS):
        raise row.bad("arrival_s", arrival_s, f"expected seconds, 0 to {MOST_SECONDS:g}")
    return RecordedSession(counted_rounds(row, with_delays=True), None if arrival_s is None else float(arrival_s))


class _Published(NamedTuple):
    read: Callable[[Mapping[str, Any]], RecordedSession | None]
    """None: to be left out."""
    record: str
    rows: Callable[[Path], Iterator[Row]] = json_rows


def _published(path: Path, kind: _Published) -> Iterator[RecordedSession]:
    """Records of another make are refused as a whole."""
    for row in kind.rows(path):
        try:
            session = kind.read(row.values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise row.bad("line", row.values, f"not {kind.record} ({type(error).__name__}: {error})") from error
        if session is not None:
            yield session


def _toolbench(record: Mapping[str, Any]) -> RecordedSession | None:
    """Takes the winning path of a query; tool descriptions come with the first prompt."""
    answer = _field(record, "answer_generation", dict)
    if not answer.get("valid_data"):
        return None
    chats = _field(answer, "train_messages", list)
    if not chats:
        return None
    prompt = text_tokens(json.dumps(answer.get("function", []), ensure_ascii=False))
    decode = 0
    rounds = []
    for message in chats[-1]:
        tokens = text_tokens(str(message.get("content") or ""))
        if message.get("role") == "assistant":
            call = message.get("function_call")
            decode += tokens + (text_tokens(f"{call['name']} {call['arguments']}") if call else 0)
            continue
        if decode:
            rounds.append(RecordedRound(prompt, decode))
            prompt = decode = 0
        prompt += tokens
    if decode:
        rounds.append(RecordedRound(prompt, decode))
    return RecordedSession(tuple(rounds))


def _hotpotqa(record: Mapping[str, Any]) -> RecordedSession:
    context = _field(record, "context", dict)
    titled = zip(context["title"], context["sentences"], strict=True)
    return _retrieval(record, [title + " " + "".join(sentences) for title, sentences in titled])


def _dureader(record: Mapping[str, Any]) -> RecordedSession | None:
    documents = _field(record, "documents", list)
    paragraphs = [paragraph for document in documents for paragraph in document.get("paragraphs", ())]
    return _retrieval(record, paragraphs) if paragraphs else None


def _retrieval(record: Mapping[str, Any], paragraphs: list[str]) -> RecordedSession:
    question = _field(record, "question", str)
    ends = [turn * len(paragraphs) // RETRIEVALS for turn in range(RETRIEVALS + 1)]
    texts = [" ".join(paragraphs[start:end]) for start, end in pairwise(ends)]
    texts[0] = f"{question} {texts[0]}"
    return RecordedSession(tuple(RecordedRound(text_tokens(text), None) for text in texts))


def _field(record: Mapping[str, Any], name: str, kind: type) -> Any:
    value = record.get(name)
    if not isinstance(value, kind):
        raise TypeError(f"{name!r} must be a {kind.__name__}")
    return value


_PUBLISHED: Mapping[SessionFormat, _Published] = {
    "toolbench_dfsdt": _Published(_toolbench, "an answer of ToolBench"),
    "hotpotqa_distractor": _Published(_hotpotqa, "a question of HotpotQA", array_rows),
    "dureader_search": _Published(_dureader, "a question of DuReader"),
}
