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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engines.errors import UserError
from engines.strict_json import unique
from repro.workloads.row import UNREADABLE, bad_line, open_text
from repro.workloads.sessions.card import MOST_DELAY_S, SessionFormat
from repro.workloads.trace import MOST_SECONDS, MOST_TOKENS, json_rows

RETRIEVALS = 3
_CJK = range(0x3400, 0xA000)
_ROUND = f"[prefill, decode] or [prefill, decode, seconds], tokens 1 to {MOST_TOKENS}, seconds 0 to {MOST_DELAY_S}"


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


def repeats(num: int, num_recorded: int, unit: str) -> str:
    """The clause that says so where a file's sessions or turns come round again; else nothing."""
    if num <= num_recorded:
        return ""
    return f"; {num - num_recorded} of {num} {unit}s repeat one of the file's {num_recorded}"


def text_tokens(text: str) -> int:
    cjk = sum(ord(char) in _CJK for char in text)
    return max(1, round(0.7 * cjk + (len(text) - cjk) / 4))


def _own(path: Path) -> Iterator[RecordedSession]:
    for line, record in json_rows(path):
        if unknown := sorted(record.keys() - {"arrival_s", "rounds"}):
            raise bad_line(path, line, unknown[0], record[unknown[0]], "unknown: use arrival_s and rounds")
        arrival_s = record.get("arrival_s")
        if arrival_s is not None and not _is_seconds(arrival_s, MOST_SECONDS):
            raise bad_line(path, line, "arrival_s", arrival_s, f"expected seconds, 0 to {MOST_SECONDS:g}")
        rounds = record.get("rounds")
        if not isinstance(rounds, list) or not rounds:
            raise bad_line(path, line, "rounds", rounds, "expected a list of [prefill, decode] or [prefill, decode, s]")
        for entry in rounds:
            is_round = isinstance(entry, list) and len(entry) in (2, 3) and all(map(_is_count, entry[:2]))
            if not is_round or not all(_is_seconds(item, MOST_DELAY_S) for item in entry[2:]):
                raise bad_line(path, line, "rounds", entry, f"expected {_ROUND}")
        yield RecordedSession(
            tuple(RecordedRound(entry[0], entry[1], float(entry[2]) if len(entry) == 3 else None) for entry in rounds),
            None if arrival_s is None else float(arrival_s),  # type: ignore[arg-type]
        )


def _toolbench(path: Path) -> Iterator[RecordedSession]:
    return _read(path, json_rows(path), _toolbench_session, "an answer of ToolBench")


def _toolbench_session(record: Mapping[str, Any]) -> RecordedSession | None:
    """The winning path of each query; tool descriptions come with the first prompt."""
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


def _hotpotqa(path: Path) -> Iterator[RecordedSession]:
    return _read(path, enumerate(_json_array(path), start=1), _hotpotqa_session, "a question of HotpotQA")


def _hotpotqa_session(record: Mapping[str, Any]) -> RecordedSession:
    context = _field(record, "context", dict)
    paragraphs = [
        title + " " + "".join(sentences)
        for title, sentences in zip(context["title"], context["sentences"], strict=True)
    ]
    return _retrieval(_field(record, "question", str), paragraphs)


def _dureader(path: Path) -> Iterator[RecordedSession]:
    return _read(path, json_rows(path), _dureader_session, "a question of DuReader")


def _dureader_session(record: Mapping[str, Any]) -> RecordedSession | None:
    documents = _field(record, "documents", list)
    paragraphs = [paragraph for document in documents for paragraph in document.get("paragraphs", ())]
    return _retrieval(_field(record, "question", str), paragraphs) if paragraphs else None


def _retrieval(question: str, paragraphs: list[str]) -> RecordedSession:
    parts = [
        paragraphs[turn * len(paragraphs) // RETRIEVALS : (turn + 1) * len(paragraphs) // RETRIEVALS]
        for turn in range(RETRIEVALS)
    ]
    texts = [" ".join(part) for part in parts]
    texts[0] = f"{question} {texts[0]}"
    return RecordedSession(tuple(RecordedRound(text_tokens(text), None) for text in texts))


def _read(
    path: Path,
    rows: Iterable[tuple[int, Any]],
    session_of: Callable[[Mapping[str, Any]], RecordedSession | None],
    kind: str,
) -> Iterator[RecordedSession]:
    """Sessions of a published file, whose records are refused as a whole where they are of another make."""
    for line, record in rows:
        try:
            session = session_of(record)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise bad_line(path, line, "line", record, f"not {kind} ({type(error).__name__}: {error})") from error
        if session is not None:
            yield session


def _field(record: Mapping[str, Any], name: str, kind: type) -> Any:
    value = record.get(name)
    if not isinstance(value, kind):
        raise TypeError(f"{name!r} must be a {kind.__name__}")
    return value


def _json_array(path: Path) -> Iterable[Any]:
    try:
        with open_text(path) as file:
            records = json.load(file, object_pairs_hook=unique)
    except (ValueError, RecursionError, *UNREADABLE) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path.name} cannot be read as JSON ({error}): check that it is the whole file") from error
    if not isinstance(records, list):
        raise UserError(f"{path.name} holds {type(records).__name__}: expected a list of questions")
    return records


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= MOST_TOKENS


def _is_seconds(value: object, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
