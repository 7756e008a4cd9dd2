"""Rounds of a session as files write them: counted in tokens, or as the messages of a chat. A length nobody tokenized is an estimate:
4 characters a token, 0.7 tokens a CJK character."""

from __future__ import annotations

from typing import NamedTuple

from repro.workloads.rows import MOST_TOKENS, Row, is_seconds

MOST_DELAY_S = 10**6
"""Between two rounds; twelve days."""
_CJK = range(0x3400, 0xA000)


class RecordedRound(NamedTuple):
    prefill_tokens: int
    decode_tokens: int | None
    delay_s: float | None = None
    """From its answer to the next round."""


class TracedSession(NamedTuple):
    """A request is a session of one round."""

    rounds: tuple[RecordedRound, ...]
    arrival_s: float | None = None
    """Seconds from any moment on."""
    prompt: str | None = None
    """The text of its one prompt."""
    where: str = ""
    """File and line of its first row, for what is said of it."""


Chat = tuple[RecordedRound, ...]
"""Turns of one conversation, prompts and answers in tokens."""
MESSAGES = ("conversation", "conversations", "messages", "turns")
"""Columns of a whole chat."""
_ASKING = frozenset({"user", "human", "system", "developer", "tool", "function"})
_ANSWERING = frozenset({"assistant", "gpt", "chatgpt", "bing", "bard", "model"})


def repeats(num: int, num_recorded: int, unit: str, noun: str = "file") -> str:
    """Writes a clause where a file's sessions or turns, or a workload's, come round again; else nothing."""
    if num <= num_recorded:
        return ""
    return f"; {num - num_recorded} of {num} {unit}s repeat one of the {noun}'s {num_recorded}"


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
        is_round = isinstance(entry, list) and 2 <= len(entry) <= 2 + with_delays and all(map(_is_count, entry[:2]))
        if not is_round or not all(is_seconds(item, MOST_DELAY_S) for item in entry[2:]):
            raise row.bad("rounds", entry, f"expected {form}")
    return tuple(RecordedRound(*entry[:2], *map(float, entry[2:])) for entry in rounds)


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= MOST_TOKENS


def chat_of(row: Row, column: str | None = None) -> Chat:
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


def _asked_turns(row: Row, turns: list[object]) -> Chat:
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
