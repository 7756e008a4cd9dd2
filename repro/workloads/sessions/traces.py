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

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engines.errors import UserError
from repro.workloads.row import UNREADABLE, bad_line, open_text
from repro.workloads.sessions.card import SessionFormat

RETRIEVALS = 3
_CJK = range(0x3400, 0xA000)


class RecordedRound(NamedTuple):
    prefill_tokens: int
    decode_tokens: int | None
    delay_s: float | None = None


class RecordedSession(NamedTuple):
    rounds: tuple[RecordedRound, ...]
    arrival_s: float | None = None


def read_sessions(path: Path, kind: SessionFormat) -> tuple[RecordedSession, ...]:
    parsers: dict[SessionFormat, Callable[[Path], Iterator[RecordedSession]]] = {
        "sessions_jsonl": _own,
        "toolbench_dfsdt": _toolbench,
        "hotpotqa_distractor": _hotpotqa,
        "dureader_search": _dureader,
    }
    sessions = tuple(parsers[kind](path))
    if not sessions:
        raise UserError(f"{path.name} has no session: check that it is the whole file")
    return sessions


def text_tokens(text: str) -> int:
    cjk = sum(ord(char) in _CJK for char in text)
    return max(1, round(0.7 * cjk + (len(text) - cjk) / 4))


def _own(path: Path) -> Iterator[RecordedSession]:
    for line, record in _json_lines(path):
        if unknown := sorted(record.keys() - {"arrival_s", "rounds"}):
            raise bad_line(path, line, unknown[0], record[unknown[0]], "unknown: use arrival_s and rounds")
        arrival_s = record.get("arrival_s")
        if arrival_s is not None and not (_is_number(arrival_s) and arrival_s >= 0):
            raise bad_line(path, line, "arrival_s", arrival_s, "expected seconds, 0 or more")
        rounds = record.get("rounds")
        if not isinstance(rounds, list) or not rounds:
            raise bad_line(path, line, "rounds", rounds, "expected a list of [prefill, decode] or [prefill, decode, s]")
        for entry in rounds:
            whole = isinstance(entry, list) and len(entry) in (2, 3) and all(type(item) is int for item in entry[:2])
            if not whole or min(entry[:2]) < 1 or not all(_is_number(item) and item >= 0 for item in entry[2:]):
                raise bad_line(path, line, "rounds", entry, "expected [prefill, decode] or [prefill, decode, seconds]")
        yield RecordedSession(
            tuple(RecordedRound(entry[0], entry[1], float(entry[2]) if len(entry) == 3 else None) for entry in rounds),
            arrival_s,
        )


def _toolbench(path: Path) -> Iterator[RecordedSession]:
    """The winning path of each query; tool descriptions come with the first prompt."""
    for line, record in _json_lines(path):
        answer = _field(path, line, record, "answer_generation", dict)
        if not answer.get("valid_data"):
            continue
        chats = _field(path, line, answer, "train_messages", list)
        if not chats:
            continue
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
        yield RecordedSession(tuple(rounds))


def _hotpotqa(path: Path) -> Iterator[RecordedSession]:
    for number, record in enumerate(_json_array(path), start=1):
        context = _field(path, number, record, "context", dict)
        paragraphs = [
            title + " " + "".join(sentences)
            for title, sentences in zip(context["title"], context["sentences"], strict=True)
        ]
        yield _retrieval(_field(path, number, record, "question", str), paragraphs)


def _dureader(path: Path) -> Iterator[RecordedSession]:
    for line, record in _json_lines(path):
        documents = _field(path, line, record, "documents", list)
        paragraphs = [paragraph for document in documents for paragraph in document.get("paragraphs", ())]
        if paragraphs:
            yield _retrieval(_field(path, line, record, "question", str), paragraphs)


def _retrieval(question: str, paragraphs: list[str]) -> RecordedSession:
    parts = [
        paragraphs[turn * len(paragraphs) // RETRIEVALS : (turn + 1) * len(paragraphs) // RETRIEVALS]
        for turn in range(RETRIEVALS)
    ]
    texts = [" ".join(part) for part in parts]
    texts[0] = f"{question} {texts[0]}"
    return RecordedSession(tuple(RecordedRound(text_tokens(text), None) for text in texts))


def _json_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        with open_text(path) as file:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                record = json.loads(text)
                if not isinstance(record, dict):
                    raise bad_line(path, number, "line", record, "expected one JSON object")
                yield number, record
    except (json.JSONDecodeError, *UNREADABLE) as error:
        raise UserError(
            f"{path.name} cannot be read as JSON lines ({error}): check that it is the whole file"
        ) from error


def _json_array(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        with open_text(path) as file:
            records = json.load(file)
    except (json.JSONDecodeError, gzip.BadGzipFile, *UNREADABLE) as error:
        raise UserError(f"{path.name} cannot be read as JSON ({error}): check that it is the whole file") from error
    if not isinstance(records, list):
        raise UserError(f"{path.name} holds {type(records).__name__}: expected a list of questions")
    return records


def _field(path: Path, line: int, record: Mapping[str, Any], name: str, kind: type) -> Any:
    value = record.get(name)
    if not isinstance(value, kind):
        raise bad_line(path, line, name, value, f"expected {kind.__name__}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
