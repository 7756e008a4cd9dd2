"""Sessions of rounds as files hold them: counted in tokens, as the messages of a chat, or as published sets of agents and retrieval.

| format              | file                                                          | what it lacks          |
|---------------------|---------------------------------------------------------------|------------------------|
| sessions_jsonl      | ours: {"arrival_s"?, "rounds": [[prefill, decode, delay_s?]]} | nothing                |
| toolbench_dfsdt     | ToolBench answers found by DFSDT, one query an object         | times of tool calls    |
| hotpotqa_distractor | HotpotQA with ten paragraphs a question                       | generated text, rounds |
| dureader_search     | DuReader 2.0, documents a question                            | generated text, rounds |
| LMSYS-Chat-1M       | {"conversation": [{"role": "user", "content": "..."}]}        | times, token counts    |
| ShareGPT            | {"conversations": [{"from": "human", "value": "..."}]}        | times, token counts    |

A length nobody tokenized is an estimate: 4 characters a token, 0.7 tokens a CJK character. A turn of a chat is all that users (and the
system) say until the model answers; answers before the first prompt are left out, for ShareGPT's file is split in the middle of
conversations. Where the generated text is missing a round's decode length is None. Retrieval sets have their paragraphs dealt in order to
three retrievals, as AMPD's traces invoke three (App. B); the question comes with the first.
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
"""Read of a data set: more add minutes and no information."""
_ASKING = frozenset({"user", "human", "system", "developer", "tool", "function"})
_ANSWERING = frozenset({"assistant", "gpt", "chatgpt", "bing", "bard", "model"})


def text_tokens(text: str) -> int:
    cjk = sum(ord(char) in _CJK for char in text)
    return max(1, round(0.7 * cjk + (len(text) - cjk) / 4))


def counted_rounds(row: Row, *, with_delays: bool) -> tuple[RecordedRound, ...]:
    """Reads the ``rounds`` of our own format: lists of tokens of a prompt and of its answer, and of seconds after
    it."""
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
        is_counted = all(type(each) is int and 1 <= each <= MOST_TOKENS for each in counts)
        if not is_counted or not all(is_seconds(item, MOST_DELAY_S) for item in entry[2:]):
            raise row.bad("rounds", entry, f"expected {form}")
    return tuple(RecordedRound(*entry[:2], *map(float, entry[2:])) for entry in rounds)


def chat_of(row: Row, column: str | None = None) -> tuple[RecordedRound, ...]:
    """Reads the messages of ``column``; where the row has none, of the first column that has a chat."""
    name = next((name for name in (column, "rounds", *MESSAGES) if name in row.values), None)
    if name == "rounds":
        return counted_rounds(row, with_delays=False)
    if name is None:
        raise row.bad("conversation", None, "expected conversation, conversations or rounds, or messages")
    messages = row.values[name]
    if not isinstance(messages, list):
        raise row.bad(name, messages, "expected a list of messages")
    if name == "turns":
        return _asked_turns(row, messages)
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


def _asked_turns(row: Row, turns: list[object]) -> tuple[RecordedRound, ...]:
    """Reads a session as AIPerf has it: what the user says, milliseconds before it, and how long the answer is, if that is told."""
    rounds: list[RecordedRound] = []
    for turn in turns:
        told = Row(row.where, {"text": turn} if isinstance(turn, str) else turn if isinstance(turn, dict) else {})
        text, several = told.values.get("text"), told.values.get("texts")
        if text is None and isinstance(several, list) and all(isinstance(each, str) for each in several):
            text = "\n".join(several)
        if not isinstance(text, str):
            raise row.bad("turns", turn, 'expected a text, or {"text": ..., "delay": milliseconds}')
        if rounds and not told.is_empty("delay"):
            rounds[-1] = rounds[-1]._replace(delay_s=told.seconds("delay") / 1000)
        answer = None if told.is_empty("output_length") else told.count("output_length", low=1)
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
        parts = [each.get("text") if isinstance(each, dict) else None for each in text]
        if all(isinstance(each, str) for each in parts):
            text = "\n".join(map(str, parts))
    # A model that calls a tool may say nothing beside it.
    if text is None and role in _ANSWERING:
        text = ""
    if not isinstance(text, str):
        raise row.bad("content", text, "expected text")
    return role, text


def read_chats(paths: Sequence[Path], most: int = MOST_CONVERSATIONS) -> tuple[TracedSession, ...]:
    """Reads conversations with at least one prompt, the first ``most`` of these files."""
    readers = (parquet_rows(path, *MESSAGES) if path.suffix == ".parquet" else object_rows(path) for path in paths)
    rows = chain.from_iterable(readers)
    chats = (TracedSession(rounds, where=row.where) for row in rows if (rounds := chat_of(row)))
    found = tuple(islice(chats, most))
    require(bool(found), f"{paths[0].name} has no conversation with a prompt: check that it is the whole file")
    return found


def read_sessions(path: Path, kind: SessionFormat | None = None) -> tuple[TracedSession, ...]:
    """Reads sessions with at least one round; in our own format where none is said."""
    published = None if kind is None else _PUBLISHED.get(kind)
    sessions = tuple(map(_own_session, json_rows(path)) if published is None else _published(path, published))
    require(bool(sessions), f"{path.name} has no session: check that it is the whole file")
    bare = next((number for number, session in enumerate(sessions, start=1) if not session.rounds), None)
    require(bare is None, f"{path.name}: session {bare} has no round: take it out")
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
    """None: to be left out."""
    record: str
    rows: Callable[[Path], Iterator[Row]] = json_rows


def _published(path: Path, kind: _Published) -> Iterator[TracedSession]:
    """Records of another make are refused as a whole."""
    for row in kind.rows(path):
        try:
            session = kind.read(row.values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise row.bad("line", row.values, f"not {kind.record} ({type(error).__name__}: {error})") from error
        if session is not None:
            yield session


def _toolbench(record: Mapping[str, Any]) -> TracedSession | None:
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
