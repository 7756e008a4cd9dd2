"""Readers for files of sessions: token counts, messages of a chat, or published data sets of agents and retrieval.

| format              | file                                                          | what it lacks          |
|---------------------|---------------------------------------------------------------|------------------------|
| sessions_jsonl      | ours: {"arrival_s"?, "rounds": [[prefill, decode, delay_s?]]} | nothing                |
| toolbench_dfsdt     | ToolBench answers found by DFSDT, one query an object         | times of tool calls    |
| hotpotqa_distractor | HotpotQA with ten paragraphs a question                       | generated text, rounds |
| dureader_search     | DuReader 2.0, documents a question                            | generated text, rounds |
| LMSYS-Chat-1M       | {"conversation": [{"role": "user", "content": "..."}]}        | times, token counts    |
| ShareGPT            | {"conversations": [{"from": "human", "value": "..."}]}        | times, token counts    |

We estimate lengths of texts: 4 characters per token, 0.7 tokens per CJK character. A turn of a chat is all that users (and the system)
say until the model answers. We leave out answers before the first prompt, because ShareGPT's file splits conversations in the middle.
If the generated text is missing, a round's decode length is None. For retrieval sets we divide the paragraphs in order among three
retrievals, as many as AMPD's traces invoke (App. B). The question comes with the first.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from engines.errors import require
from repro.workloads.rounds import (
    MESSAGES,
    MOST_DELAY_S,
    MOST_SECONDS,
    MOST_TOKENS,
    RecordedRound,
    SessionFormat,
    TracedSession,
)
from repro.workloads.rows import Row, array_rows, is_seconds, json_rows, object_rows, parquet_rows

_CJK = range(0x3400, 0xA000)
RETRIEVALS = 3
MOST_CONVERSATIONS = 20_000
"""The most conversations that we read from a data set. More would add minutes and no information."""
_ASKING = frozenset({"user", "human", "system", "developer", "tool", "function"})
_ANSWERING = frozenset({"assistant", "gpt", "chatgpt", "bing", "bard", "model"})


def text_tokens(text: str) -> int:
    cjk = sum(ord(char) in _CJK for char in text)
    return max(1, round(0.7 * cjk + (len(text) - cjk) / 4))


def counted_rounds(row: Row, *, with_delays: bool) -> tuple[RecordedRound, ...]:
    """Read the ``rounds`` of our own format: lists of the prompt's tokens, the answer's tokens and the seconds after it."""
    rounds = row.values.get("rounds")
    form = f"[prefill, decode], tokens 1 to {MOST_TOKENS}"
    if with_delays:
        form = (
            f"[prefill, decode] or [prefill, decode, seconds], tokens 1 to {MOST_TOKENS}, seconds 0 to {MOST_DELAY_S}"
        )
    if not isinstance(rounds, list) or not rounds:
        raise row.bad("rounds", rounds, f"expected a list of {form}")
    for entry in rounds:
        is_round = isinstance(entry, list) and 2 <= len(entry) <= 2 + with_delays
        counts = entry[:2] if is_round else [None]
        is_counted = all(type(count) is int and 1 <= count <= MOST_TOKENS for count in counts)
        if not is_counted or not all(is_seconds(item, MOST_DELAY_S) for item in entry[2:]):
            raise row.bad("rounds", entry, f"expected {form}")
    return tuple(RecordedRound(*entry[:2], *map(float, entry[2:])) for entry in rounds)


def chat_of(row: Row, column: str | None = None) -> tuple[RecordedRound, ...]:
    """Read the messages in ``column``, or else in the row's first column that can hold a chat."""
    name = next((name for name in (column, "rounds", *MESSAGES) if name in row.values), None)
    if name == "rounds":
        return counted_rounds(row, with_delays=False)
    if name is None:
        raise row.bad("conversation", None, "expected conversation, conversations or rounds, or messages")
    messages = row.values[name]
    if not isinstance(messages, list):
        raise row.bad(name, messages, "expected a list of messages")
    if name == "turns":
        return _aiperf_turns(row, messages)
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


def _aiperf_turns(row: Row, turns: list[object]) -> tuple[RecordedRound, ...]:
    """Read a session in AIPerf's form: for each turn the user's text, milliseconds before it, and the answer's length if it is given."""
    rounds: list[RecordedRound] = []
    for turn in turns:
        turn_row = Row(row.where, {"text": turn} if isinstance(turn, str) else turn if isinstance(turn, dict) else {})
        text, texts = turn_row.values.get("text"), turn_row.values.get("texts")
        if text is None and isinstance(texts, list) and all(isinstance(part, str) for part in texts):
            text = "\n".join(texts)
        if not isinstance(text, str):
            raise row.bad("turns", turn, 'expected a text, or {"text": ..., "delay": milliseconds}')
        if rounds and not turn_row.is_empty("delay"):
            rounds[-1] = rounds[-1]._replace(delay_s=turn_row.seconds("delay") / 1000)
        answer = None if turn_row.is_empty("output_length") else turn_row.count("output_length", low=1)
        rounds.append(RecordedRound(text_tokens(text), answer))
    return tuple(rounds)


def _message(row: Row, name: str, message: object) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise row.bad(name, message, "expected messages with role and content, or from and value")
    role = message.get("role", message.get("from"))
    text = message.get("content", message.get("value"))
    if not isinstance(role, str) or role not in _ASKING | _ANSWERING:
        raise row.bad("role", role, f"expected one of {', '.join(sorted(_ASKING | _ANSWERING))}")
    if isinstance(text, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in text]
        if all(isinstance(part, str) for part in parts):
            text = "\n".join(map(str, parts))
    # A model that calls a tool may say nothing else.
    if text is None and role in _ANSWERING:
        text = ""
    if not isinstance(text, str):
        raise row.bad("content", text, "expected text")
    return role, text


def read_chats(paths: Sequence[Path], limit: int = MOST_CONVERSATIONS) -> tuple[TracedSession, ...]:
    """Read the first ``limit`` conversations with at least one prompt from these files."""
    readers = (parquet_rows(path, *MESSAGES) if path.suffix == ".parquet" else object_rows(path) for path in paths)
    rows = chain.from_iterable(readers)
    chats = (TracedSession(rounds, where=row.where) for row in rows if (rounds := chat_of(row)))
    sessions = tuple(islice(chats, limit))
    require(bool(sessions), f"{paths[0].name} has no conversation with a prompt: check that it is the whole file")
    return sessions


def read_sessions(path: Path, kind: SessionFormat | None = None) -> tuple[TracedSession, ...]:
    """Read sessions with at least one round, in our own format unless ``kind`` names another."""
    published = None if kind is None else _PUBLISHED.get(kind)
    sessions = tuple(map(_own_session, json_rows(path)) if published is None else _published(path, published))
    require(bool(sessions), f"{path.name} has no session: check that it is the whole file")
    empty = next((number for number, session in enumerate(sessions, start=1) if not session.rounds), None)
    require(empty is None, f"{path.name}: session {empty} has no round: take it out")
    return sessions


def _own_session(row: Row) -> TracedSession:
    for key in sorted(row.values.keys() - {"arrival_s", "rounds"}):
        raise row.bad(key, row.values[key], "unknown: use arrival_s and rounds")
    arrival_s = row.values.get("arrival_s")
    if arrival_s is not None and not is_seconds(arrival_s, MOST_SECONDS):
        raise row.bad("arrival_s", arrival_s, f"expected seconds, 0 to {MOST_SECONDS:g}")
    rounds = counted_rounds(row, with_delays=True)
    return TracedSession(rounds, None if arrival_s is None else float(arrival_s), where=row.where)


class _Published(NamedTuple):
    read: Callable[[Mapping[str, Any]], TracedSession | None]
    """Reads a record. Returns None for one to leave out."""
    record: str
    rows: Callable[[Path], Iterator[Row]] = json_rows


def _published(path: Path, kind: _Published) -> Iterator[TracedSession]:
    """Yield the sessions of a published data set. Raises UserError for a record in another form."""
    for row in kind.rows(path):
        try:
            session = kind.read(row.values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise row.bad("line", row.values, f"not {kind.record} ({type(error).__name__}: {error})") from error
        if session is not None:
            yield session


def _toolbench(record: Mapping[str, Any]) -> TracedSession | None:
    """The session of a query's winning path. Tool descriptions come with the first prompt."""
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
    return TracedSession(tuple(rounds))


def _hotpotqa(record: Mapping[str, Any]) -> TracedSession:
    context = _field(record, "context", dict)
    titled = zip(context["title"], context["sentences"], strict=True)
    return _retrieval(record, [title + " " + "".join(sentences) for title, sentences in titled])


def _dureader(record: Mapping[str, Any]) -> TracedSession | None:
    documents = _field(record, "documents", list)
    paragraphs = [paragraph for document in documents for paragraph in document.get("paragraphs", ())]
    return _retrieval(record, paragraphs) if paragraphs else None


def _retrieval(record: Mapping[str, Any], paragraphs: list[str]) -> TracedSession:
    question = _field(record, "question", str)
    ends = [turn * len(paragraphs) // RETRIEVALS for turn in range(RETRIEVALS + 1)]
    texts = [" ".join(paragraphs[start:end]) for start, end in pairwise(ends)]
    texts[0] = f"{question} {texts[0]}"
    return TracedSession(tuple(RecordedRound(text_tokens(text), None) for text in texts))


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
