"""Streams as servers write them: what is an answer, when it began and ended, and what counted its tokens."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

import pytest
from support.cells import a_cell
from support.mock_openai import MockOpenAI, mock_server
from support.tables import data_beside

from repro.families.http import endpoint
from repro.families.http.record import CHUNKS, HTTP
from repro.runs.experiment import prepare
from repro.runs.record import RunRecord

pytest.importorskip("aiohttp", reason="needs the extra http: aiohttp is not installed")

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
DONE = b"data: [DONE]\n\n"
SOON = 0.01


def event(said: Any, *, ends: bytes = b"\n") -> bytes:
    return b"data: " + json.dumps(said).encode() + 2 * ends


def piece(text: str | None, reason: str | None = None, *, chat: bool = False, **more: Any) -> bytes:
    """``usage`` stands beside the choices, all else inside."""
    usage = {"usage": more.pop("usage")} if "usage" in more else {}
    said = {"delta": {"content": text, **more.pop("delta", {})}} if chat else {"text": text}
    return event({"choices": [{"index": 0, **said, "finish_reason": reason, **more}], **usage})


def usage(tokens: int, **more: Any) -> bytes:
    return event({"choices": [], **more, "usage": {"prompt_tokens": 8, "completion_tokens": tokens}})


def counted(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 8, "completion_tokens": tokens}


def run(mock: MockOpenAI, dataset: str = "osc", **knobs: Any) -> RunRecord:
    with mock_server(mock) as url:
        record = prepare(a_cell("openai-http", dataset, "endpoint", "http", url=url, **knobs)).run()
    HTTP.check_tables(record)
    return record


def record_of(*pieces: bytes | float, **knobs: Any) -> RunRecord:
    """Of one request that is answered so."""
    own = {"num_prompts": 1, "gen_length": 64, "input_len": 8, "num_warmups": 0, "ignore_eos": False, **knobs}
    return run(MockOpenAI(raw={"post /v1/": lambda: (HEAD, *pieces)}), **own)


def row(*pieces: bytes | float, **options: Any) -> dict[str, Any]:
    """The request, which is ok."""
    record = record_of(*pieces, **options)
    found = {name: values[0] for name, values in record.requests.items()}
    assert found["error"] is None
    return found


def error(*pieces: bytes | float, **options: Any) -> str:
    (said,) = record_of(*pieces, **options).requests["error"]
    assert said is not None
    return str(said)


def warnings(record: RunRecord) -> str:
    return "; ".join(record.facts["warnings"])


# -- events -----------------------------------------------------------------------------------------------------

PLAIN = piece("a") + piece("b", "stop") + usage(2) + DONE
SPLIT = json.dumps({"choices": [{"text": "a\u20ac", "finish_reason": None}]}, indent=1, ensure_ascii=False)
LINES = b"".join(b"data: " + line.encode() + b"\n" for line in SPLIT.splitlines()) + b"\n"
EVENTS = {
    "plain": PLAIN,
    "CRLF": PLAIN.replace(b"\n", b"\r\n"),
    "CR": PLAIN.replace(b"\n", b"\r"),
    "no space": PLAIN.replace(b"data: ", b"data:"),
    "a mark of the byte order": b"\xef\xbb\xbf" + PLAIN,
    "comments": b": ping\n\n" + PLAIN.replace(b"\n\n", b"\n\n: ping\n\n:\n\n"),
    "other fields": PLAIN.replace(b"data: {", b"id: 7\nretry: 10\nevent: message\nunknown\ndata: {"),
    "kinds": b"event: ping\ndata: still here\n\n" + PLAIN.replace(b"data: {", b"event: completion\ndata: {"),
    "events of nothing": b"data:\n\ndata\n\ndata: \n\n" + PLAIN,
    "a comment inside": PLAIN.replace(b"data: {", b": ping\ndata: {"),
    "several lines of data": LINES + piece("b", "stop") + usage(2) + DONE,
    "no empty line at the end": PLAIN[:-2],
    "no line end at the end": PLAIN[:-1],
}


@pytest.mark.parametrize("what", EVENTS)
@pytest.mark.parametrize("is_whole", [True, False], ids=["at once", "byte by byte"])
def test_events_are_read_as_the_standard_has_them(what, is_whole):
    body = EVENTS[what]
    pieces = [body] if is_whole else [body[i : i + 1] for i in range(len(body))]
    found = row(*pieces)
    assert (found["num_chunks"], found["output_len"], found["finish_reason"]) == (2, 2, "stop")
    assert found["text_bytes"] == (5 if what == "several lines of data" else 2), "a character of three bytes is whole"


class Reads:
    """A body, as reads of the network divide it."""

    def __init__(self, reads: Sequence[bytes]) -> None:
        self._reads = reads

    async def iter_any(self) -> AsyncIterator[bytes]:
        for each in self._reads:
            yield each


async def events_of(*reads: bytes) -> list[endpoint.Event]:
    content: Any = Reads(reads)
    return [each async for each in endpoint.Events(content, count().__next__)]


@pytest.mark.parametrize("what", EVENTS)
def test_events_are_the_same_wherever_reads_divide_them(what):
    async def compare() -> None:
        body = EVENTS[what]
        whole = [each[:2] for each in await events_of(body)]
        assert len(whole) >= 4
        assert [each[:2] for each in await events_of(*(body[i : i + 1] for i in range(len(body))))] == whole
        for i in range(1, len(body)):
            assert [each[:2] for each in await events_of(body[:i], body[i:])] == whole, body[i - 20 : i]

    asyncio.run(compare())


def test_lines_of_one_event_are_bounded_together(monkeypatch):
    monkeypatch.setattr(endpoint, "LONGEST_LINE", 64)
    line = b"data: " + b"x" * 20 + b"\n"
    (event,) = asyncio.run(events_of(line, line, line, b"\n"))
    assert len(event.data) == 62
    with pytest.raises(ValueError, match="more than 64 bytes"):
        asyncio.run(events_of(line, line, line, line, b"\n"))


def test_lines_of_one_event_are_not_two_events():
    said = error(piece("a").strip() + b"\n" + piece("b", "stop") + DONE)
    assert "several lines of data" in said


def test_an_event_is_as_late_as_its_data_and_not_as_the_line_that_ends_it():
    first, last = piece("a"), piece("b", "stop")
    record = record_of(first, last[:-1], 5 * SOON, b"\n" + usage(2) + DONE)
    assert record.requests["finished_s"][0] == record.tables[CHUNKS]["arrived_s"][-1]
    assert record.requests["usage_lag_s"][0] >= SOON


# -- what ends an answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize(
    ("has_done", "has_reason", "is_whole"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_a_reason_or_the_mark_ends_an_answer(has_done, has_reason, is_whole, chat):
    last = piece("b", "length" if has_reason else None, chat=chat)
    pieces = (piece("a", chat=chat), last, usage(2), DONE if has_done else b"")
    options = {"api": "chat" if chat else "completions"}
    if is_whole:
        assert row(*pieces, **options)["output_len"] == 2
    else:
        assert "broke off" in error(*pieces, **options)
        assert "broke off" in error(piece("a", "", chat=chat), usage(1), **options), "a reason of nothing is none"


def test_the_answer_ends_with_its_last_content_and_what_is_late_is_told():
    record = record_of(piece("a"), SOON, piece("b"), 4 * SOON, piece("", "stop"), 8 * SOON, usage(2), 12 * SOON, DONE)
    table, arrived = record.requests, record.tables[CHUNKS]["arrived_s"]
    assert (table["num_chunks"], table["finished_s"]) == ([2], [arrived[1]])
    (finish,), (usages,), (close,) = (table[f"{name}_lag_s"] for name in ("finish", "usage", "close"))
    assert SOON < finish < usages < close
    summary = HTTP.summarize(record)
    assert (summary["finish_lag_s"]["mean"], summary["usage_lag_s"]["max"]) == (finish, usages)
    assert summary["itl_s"]["n"] == 1, "a late reason is no gap between tokens"
    repeated = row(piece("a", "stop"), piece("b", "stop"), 2 * SOON, piece("", "stop"), usage(2), DONE)
    assert repeated["finish_lag_s"] == 0.0
    assert repeated["usage_lag_s"] > 0.0
    early = row(piece("a", "stop"), piece("b"), 2 * SOON, piece("", "stop"), usage(2), DONE)
    assert early["finish_lag_s"] > 0.0, "a reason before the last content is none"


OPENINGS = {
    "no text": piece(""),
    "null": piece(None),
    "a role": event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
    "a role alone": event({"choices": [{"delta": {"role": "assistant"}}]}),
    "no choices": event({"choices": [], "usage": None}),
    "choices of null": event({"choices": None}),
    "usage of nothing": event({"choices": [{"text": "", "delta": {}}], "usage": counted(0)}),
}


@pytest.mark.parametrize("what", OPENINGS)
@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_an_opening_without_content_is_no_first_token(what, chat):
    end = piece("b", "stop", chat=chat) + usage(2) + DONE
    record = record_of(OPENINGS[what], 3 * SOON, piece("a", chat=chat), end, api="chat" if chat else "completions")
    assert record.requests["error"] == [None]
    assert record.requests["num_chunks"] == [2]
    assert record.requests["first_output_s"][0] - record.requests["arrival_s"][0] >= 3 * SOON
    assert record.requests["is_single"] == [True]


CONTENT: dict[str, tuple[dict[str, Any], int]] = data_beside(__file__, "streams")["content"]


@pytest.mark.parametrize("what", CONTENT)
def test_all_that_a_model_says_is_content(what):
    delta, num_bytes = CONTENT[what]
    first = event({"choices": [{"delta": {"role": "assistant", "content": None, **delta}}]})
    found = row(first, piece("a", "stop", chat=True), usage(2), DONE, api="chat")
    assert (found["num_chunks"], found["text_bytes"]) == (2, 1 + num_bytes)


@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        ((piece("a"), event({"error": {"message": "out of room", "code": 500}}), DONE), "in the stream: out of room"),
        ((piece("a"), event({"error": "out of room"}), DONE), "out of room"),
        ((piece("a"), event({"object": "error", "message": "out of room"}), DONE), "out of room"),
        ((piece("a"), b"event: error\ndata: out of room\n\n", DONE), "out of room"),
        ((piece("", "stop"), DONE), "empty"),
        ((DONE,), "empty"),
        ((json.dumps({"choices": [{"text": "ab"}], "usage": counted(2)}).encode(),), "one JSON object"),
        ((json.dumps({"error": {"message": "out of room"}}, indent=2).encode(),), "out of room"),
    ],
)
def test_what_is_no_answer_is_said(pieces, sentence):
    assert sentence in error(*pieces)


@pytest.mark.parametrize(
    "end", [event({"error": "out of room"}), b"data: {\n\n", b""], ids=["said", "no JSON", "cut off"]
)
def test_what_came_before_a_fault_is_told(end):
    record = record_of(piece("ab", chat=True), piece(None, chat=True, delta={"reasoning": "c"}), end, api="chat")
    assert record.requests["error"] != [None]
    assert (record.requests["text_bytes"], record.requests["num_chunks"]) == ([3], [2])


def test_errors_of_nothing_are_none():
    assert row(event({"choices": [{"text": "a"}], "error": None}), usage(1, error=None), DONE)["output_len"] == 1


# -- tokens -----------------------------------------------------------------------------------------------------


def blocks(*, with_ids: bool = False, each_counted: bool = False, num: int = 4) -> list[bytes | float]:
    """Four pieces of eight tokens, the last with the reason, each a little later."""
    found: list[bytes | float] = []
    for k in range(num):
        more: dict[str, Any] = {"token_ids": list(range(8))} if with_ids else {}
        if each_counted:
            more["usage"] = counted(8 * (k + 1))
        found += [SOON * k, piece("wxyz wx ", "length" if k == num - 1 else None, **more)]
    return found


@pytest.mark.parametrize(
    ("pieces", "by", "first_by"),
    [
        ((*blocks(with_ids=True), usage(32), DONE), "usage", "token_ids"),
        ((*blocks(with_ids=True), DONE), "token_ids", "token_ids"),
        ((*blocks(with_ids=True),), "token_ids", "token_ids"),
        ((*blocks(each_counted=True), DONE), "usage", "usage"),
        ((*blocks(each_counted=True), usage(32), DONE), "usage", "usage"),
        ((event({"choices": [{"text": ""}], "usage": counted(0)}), *blocks(each_counted=True)), "usage", "usage"),
        ((*blocks(), usage(32), DONE), "usage", "text"),
    ],
)
def test_several_tokens_in_a_piece(pieces, by, first_by):
    record = record_of(*pieces)
    found, summary = {name: values[0] for name, values in record.requests.items()}, HTTP.summarize(record)
    assert (found["output_len"], found["counted_by"], found["num_chunks"]) == (32, by, 4)
    assert (found["first_tokens"], found["first_by"]) == (8, first_by)
    assert record.facts["tokens_counted_by"] == {by: 1}
    assert summary["tpot_s"]["mean"] == (found["finished_s"] - found["first_output_s"]) / 24
    assert (summary["itl_s"]["n"], summary["icl_s"]["n"]) == (0, 3)
    assert ("share of the text" in warnings(record)) is (first_by == "text")
    assert ("no count of tokens (usage)" in warnings(record)) is (by != "usage")


def test_each_later_piece_has_a_token():
    """However much of the text is in the first."""
    found = row(piece("a" * 97), piece("b"), piece("c", "length"), usage(8), DONE)
    assert (found["first_tokens"], found["first_by"]) == (6, "text")


@pytest.mark.parametrize("tokens", [3, 4])
def test_more_tokens_than_bytes_are_told(tokens):
    found = record_of(piece("a"), piece("bc", "length"), usage(tokens), DONE)
    assert ("fewer bytes of text than tokens" in warnings(found)) is (tokens > 3)


def test_usage_that_came_before_the_last_content_counts_nothing():
    first = event({"choices": [{"text": "a"}], "usage": counted(1)})
    assert "how many tokens" in error(first, piece("b", "stop"), DONE)


@pytest.mark.parametrize("where", ["choices", "none", "null", "with the reason", "with the content", "behind the mark"])
def test_usage_counts_wherever_it_stands(where):
    body = {
        "choices": piece("b", "stop") + usage(2) + DONE,
        "none": piece("b", "stop") + event({"usage": counted(2)}) + DONE,
        "null": piece("b", "stop") + event({"choices": None, "usage": counted(2)}) + DONE,
        "with the reason": piece("b") + piece("", "stop", usage=counted(2)) + DONE,
        "with the content": piece("b", "stop", usage=counted(2)) + DONE,
        "behind the mark": piece("b", "stop") + DONE + usage(2),
    }[where]
    found = row(piece("a"), body)
    assert (found["output_len"], found["counted_by"], found["is_single"]) == (2, "usage", True)


def test_a_tokenizer_that_is_given_counts_where_nobody_else_does():
    record = record_of(*blocks(), DONE, tokenizer="tiny")
    from repro.families.http.requests import tokenizer_of

    encode = tokenizer_of("tiny").encode
    assert record.requests["output_len"] == [len(encode("wxyz wx " * 4))]
    assert record.requests["first_tokens"] == [len(encode("wxyz wx "))]
    assert record.facts["tokens_counted_by"] == {"tokenizer": 1}
    assert "counted by the tokenizer that is given" in warnings(record)
    assert HTTP.summarize(record)["tpot_s"]["n"] == 1
    told = record_of(*blocks(), usage(32), DONE, tokenizer="tiny")
    assert (told.requests["output_len"], told.requests["first_by"]) == ([32], ["tokenizer"])


def test_without_any_count_the_request_fails_and_says_what_to_give():
    said = error(piece("a"), piece("b", "stop"), DONE)
    assert "return_token_ids" in said
    assert "tokenizer=" in said


def test_a_session_goes_on_with_answers_that_a_tokenizer_counts():
    mock = MockOpenAI(has_usage=False, has_ids=False)
    knobs = {"num_prompts": 1, "length_scale": 0.01, "max_prompt_len": 4000, "delay_mean_s": 0.0, "tokenizer": "tiny"}
    record = run(mock, "hotpotqa", **knobs)
    assert set(record.requests["status"]) == {"ok"}
    assert set(record.requests["counted_by"]) == {"tokenizer"}
    lengths = record.requests["prompt_len"]
    assert len(lengths) > 1
    assert lengths == sorted(set(lengths)), "answers are in the history"


@pytest.mark.parametrize(
    ("pieces", "is_single"),
    [
        ((piece("a"), piece("b"), piece("", "stop"), usage(3), DONE), True),
        ((piece("a"), piece("b"), piece("", "length"), usage(3), DONE), False),
        ((piece("a", token_ids=[1]), piece("", "stop", token_ids=[2]), usage(2), DONE), True),
        ((piece("a", token_ids=[1, 2]), piece("b", "stop", token_ids=[3]), usage(3), DONE), False),
        ((piece("a", usage=counted(1)), piece("b", "stop", usage=counted(2)), DONE), True),
        ((piece("a", usage=counted(1)), piece("b", "stop", usage=counted(3)), DONE), False),
    ],
)
def test_gaps_are_between_tokens_only_where_each_piece_is_one(pieces, is_single):
    """An end of text may be counted and not said."""
    record = record_of(*pieces)
    assert record.requests["is_single"] == [is_single]
    assert HTTP.summarize(record)["itl_s"]["n"] == (1 if is_single else 0)


def test_a_token_that_usage_counts_is_content_though_it_says_nothing():
    """Half a character, for one."""
    silent = piece("", usage=counted(2))
    record = record_of(piece("a", usage=counted(1)), SOON, silent, 3 * SOON, piece("", "stop", usage=counted(2)), DONE)
    assert record.requests["num_chunks"] == [2]
    assert record.requests["finished_s"][0] == record.tables[CHUNKS]["arrived_s"][1]


# -- how pieces come --------------------------------------------------------------------------------------------


def test_events_of_one_read_are_marked():
    ten = b"".join(piece("a", token_ids=[i]) for i in range(10))
    record = record_of(ten, 2 * SOON, piece("b", "stop", token_ids=[10]), usage(11), DONE)
    marks, stamps = record.tables[CHUNKS]["is_bunched"], record.tables[CHUNKS]["arrived_s"]
    assert marks == [False] + [True] * 9 + [False]
    assert len(set(stamps)) == 2
    assert HTTP.summarize(record)["bunched_share"] == 0.9
    assert "bunched" in warnings(record)
    assert "up to 10 at once" in warnings(record)


@pytest.mark.parametrize(("dropped", "error"), [(b"", None), (b"HTTP/1.1 2", "is no HTTP|Error|disconnected")])
def test_a_request_that_is_cut_off_on_a_kept_connection_is_sent_once_more(dropped, error):
    mock = MockOpenAI(drops=frozenset({2}), dropped=dropped)
    knobs = {"num_prompts": 4, "gen_length": 2, "input_len": 8, "num_warmups": 1, "max_concurrency": 1}
    record = run(mock, **knobs)
    resent = record.requests["was_resent"]
    if error is None:
        assert record.requests["status"] == ["ok"] * 4
        assert sum(resent) == HTTP.summarize(record)["num_resent"] == 1
        assert "sent once more" in warnings(record)
        assert mock.num_posts == 6
    else:
        assert record.requests["status"].count("failed") == 1, "some of the answer was there"
        assert not any(resent)
        assert mock.num_posts == 5


@pytest.mark.parametrize("drops", [{0}, {1, 2}])
def test_a_fresh_connection_that_is_cut_off_is_an_error(drops):
    """The first of all, and the one of the second try."""
    mock = MockOpenAI(drops=frozenset(drops))
    knobs = {"num_prompts": 3, "gen_length": 2, "input_len": 8, "num_warmups": 0, "max_concurrency": 1}
    record = run(mock, **knobs)
    assert record.requests["status"].count("failed") == 1
    assert sum(record.requests["was_resent"]) == (0 if drops == {0} else 1)
