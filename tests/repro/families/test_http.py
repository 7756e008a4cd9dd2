"""An endpoint as a system: what is sent, what is read off the stamps, and when a run does not count."""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.cells import a_cell
from support.mock_openai import MockOpenAI, mock_server
from support.refusals import refuses
from support.tables import data_beside

from baselines.servers.launch import write_tiny
from engines.errors import UserError
from repro.families.http.endpoint import Endpoint
from repro.families.http.record import CHUNKS, HTTP, tables_of, warnings
from repro.families.http.requests import HttpKnobs, HttpWorkload, resolve, tokenizer_of
from repro.families.platforms import platform
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.http_driver import Ask, Exchange, Reply
from repro.runs.record import RunRecord

DATA = data_beside(__file__, "http")

pytest.importorskip("aiohttp", reason="needs the extra http: aiohttp is not installed")

PLATFORM = "endpoint"


def test_its_options_can_be_read_without_the_client():
    without = "import sys; sys.modules['aiohttp'] = None; from repro.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", without, "list", "--knobs", "openai-http"]
    assert "max_concurrency" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


# -- stamps to numbers ------------------------------------------------------------------------------------------


def exchange(due_s: float, chunks_s: Sequence[float], tokens: int, **fields: Any) -> Exchange:
    reply = Reply(chunks_s=list(chunks_s), prompt_tokens=8, completion_tokens=tokens, **fields.pop("reply", {}))
    values: dict[str, Any] = {
        "session_id": fields.pop("session_id", 0),
        "turn": 0,
        **dict.fromkeys(("due_s", "queued_s", "sent_s"), due_s),
        "ended_s": chunks_s[-1] if chunks_s else due_s,
        "ask": Ask(body={}, prompt_len=8, asked_tokens=tokens),
        "reply": reply,
    }
    return Exchange(**values | fields)


def answering(exchanges: Sequence[Exchange], **changes: Any) -> list[Exchange]:
    """The exchanges with changed replies."""
    return [replace(each, reply=replace(each.reply, **changes)) for each in exchanges if each.reply]


def record_of(exchanges: Sequence[Exchange], **facts: Any) -> RunRecord:
    facts = {"requested_rate": None, "ignore_eos": True, "goodput": {}} | facts
    record = RunRecord(tables=tables_of(exchanges), manifest={"obtained": "measured", "facts": facts})
    HTTP.check_tables(record)
    return record


def steady(num: int = 12, gap_s: float = 1.0) -> list[Exchange]:
    """Ten tokens each, the first after 0.25 s, the others 0.125 s apart."""
    return [
        exchange(i * gap_s, [i * gap_s + 0.25 + 0.125 * k for k in range(10)], 10, session_id=i) for i in range(num)
    ]


@pytest.mark.parametrize(("first", "error", "is_told"), DATA["pieces_of_one_read"])
def test_four_pieces_of_one_read_are_no_chance(first, error, is_told):
    pieces = 1000
    reads = [*first, *range(first[-1] + 1, first[-1] + 1 + pieces - len(first))]
    answer = exchange(0.0, [0.1 + 0.01 * k for k in reads], pieces, error=error, reply={"chunk_reads": reads})
    record = record_of([answer])
    assert any("bunched" in each for each in warnings(record)) is is_told
    assert (HTTP.summarize(record)["bunched_share"] is None) is (error is not None)


def test_of_what_was_not_sent_nothing_is_told():
    record = record_of([*steady(), Exchange(session_id=99, turn=1, due_s=20.0, queued_s=20.0, error="not sent")])
    told = {name: values[-1] for name, values in record.requests.items() if values[-1] is not None}
    assert told == DATA["of_what_was_not_sent"]


def test_golden_times():
    summary = HTTP.summarize(record_of(steady(), requested_rate=1.0, goodput={"ttft": 0.25, "tpot": 0.1}))
    assert summary["ttft_s"]["mean"] == summary["ttft_sent_s"]["p90"] == 0.25
    assert summary["tpot_s"]["max"] == summary["itl_s"]["mean"] == summary["icl_s"]["min"] == 0.125
    assert summary["icl_s"]["n"] == 12 * 9
    assert summary["e2el_s"]["mean"] == 1.375
    assert summary["achieved_rate"] == summary["due_rate"] == 1.0
    assert summary["peak_concurrency"] == 2
    assert summary["throughput_tok_s"] == 120 / 12.375
    assert (summary["goodput_http"]["num_good"], summary["goodput_http"]["attainment"]) == (0, 0.0)
    good = HTTP.summarize(record_of(steady(), goodput={"ttft": 0.25, "tpot": 0.125, "e2el": 1.375}))["goodput_http"]
    assert (good["num_good"], good["requests_s"]) == (12, 12 / 12.375)


def test_a_request_with_two_slow_gaps_keeps_a_mean_and_not_its_own_p95():
    slow = exchange(0.0, [0.25, 1.25, 2.25, *(2.25 + 0.01 * k for k in range(1, 18))], 20)

    def num_good(words, reply=slow):
        limits = HttpKnobs(endpoint=Endpoint(url="http://127.0.0.1:1"), goodput=words).limits
        return HTTP.summarize(record_of([reply], goodput=limits))["goodput_http"]["num_good"]

    assert num_good("itl-request:200") == num_good("tpot:200") == num_good("itl-gap:1000") == 1
    assert num_good("itl-gap:200") == num_good("itl:200") == 0
    assert num_good("itl-gap:200", exchange(0.0, [0.25], 1)) == 1
    with refuses("goodput='tpot:1 itl-request:1'"):
        num_good("tpot:1 itl-request:1")


@pytest.mark.parametrize(
    ("chunks_s", "tokens", "tpot", "itl_n", "icl_n"),
    DATA["odd_answers"],
    ids=["all in one piece", "one token", "blocks", "tokens"],
)
def test_times_of_odd_answers(chunks_s, tokens, tpot, itl_n, icl_n):
    summary = HTTP.summarize(record_of([exchange(0.0, chunks_s, tokens)], goodput={"tpot": 0.3}))
    assert (summary["tpot_s"]["mean"], summary["itl_s"]["n"], summary["icl_s"]["n"]) == (tpot, itl_n, icl_n)
    assert summary["goodput_http"]["num_good"] == 1, "what has no time per token breaks no limit of it"


def test_gaps_are_within_an_answer_and_of_whole_ones():
    broken = exchange(0.0, [1.0, 9.0], 2, session_id=1, error="broke off")
    summary = HTTP.summarize(
        record_of([exchange(0.0, [1.0, 2.0], 2), broken, exchange(0.0, [5.0, 6.0], 2, session_id=2)])
    )
    assert (summary["icl_s"]["n"], summary["icl_s"]["max"]) == (2, 1.0)
    assert summary["num_requests"] == {"ok": 2, "failed": 1, "unfinished": 0}


def test_the_wait_for_a_place_is_told_apart():
    held = []
    for e in steady():
        (late,) = answering([e], chunks_s=[e.due_s + 3.0 + k for k in range(10)])
        held.append(replace(late, queued_s=e.due_s + 0.5, sent_s=e.due_s + 2.0, ended_s=e.due_s + 12.0))
    summary = HTTP.summarize(record_of(held))
    assert (summary["client_queue_s"]["mean"], summary["schedule_delay_s"]["mean"]) == (1.5, 0.5)
    assert (summary["ttft_s"]["mean"], summary["ttft_sent_s"]["mean"]) == (3.0, 1.0)


# -- when a run does not count ----------------------------------------------------------------------------------


def reasons(exchanges: Sequence[Exchange], **facts: Any) -> str:
    return "; ".join(HTTP.assess(record_of(exchanges, **facts)).reasons)


def test_reasons_not_to_use_a_run():
    assert reasons(steady(40), requested_rate=1.0) == ""
    late = [replace(e, queued_s=e.due_s + 0.1, sent_s=e.due_s + 0.1) for e in steady()]
    assert "submitted more than" in reasons(late)
    assert "too few" in reasons(steady(9))
    failed = [*steady(), exchange(0.0, [], 1, session_id=99, error="status 500: no")]
    assert "1 of 13 requests failed, the first with: status 500: no" in reasons(failed)
    slow = [replace(exchange(1.5 * i, [1.5 * i + 1], 10, session_id=i), due_s=i, queued_s=i) for i in range(12)]
    assert "sent at 0.667 per second and fell due at 1 (max_concurrency held requests back)" in reasons(slow)
    nine = [answering([e], chunks_s=e.reply.chunks_s[:9])[0] for e in steady() if e.reply]
    short = answering(nine, completion_tokens=9)
    assert "12 answers have not exactly the tokens" in reasons(short)
    assert reasons(short, ignore_eos=False) == ""
    ended = answering(nine, token_ids=[7] * 9, finish_reason="stop")
    assert reasons(ended) == "", "the end of the text, which was heeded, is a token without an id"
    cut = "12 answers have not the tokens that the endpoint counts (usage), the first 10 (pieces: 9, ids: 9)"
    assert cut in reasons(answering(ended, finish_reason="length"))
    warm = answering(steady(), cached_tokens=16)
    assert "12 first turns found a part of their prompt in a cache" in reasons(warm)
    later = [*steady(), replace(warm[0], turn=1, session_id=99)]
    assert "cache" not in reasons(later), "its own history may be cached"


def test_a_rate_that_is_not_served_is_seen_in_the_waits():
    waits = [exchange(float(i), [i + 0.2 + 0.1 * i] * 2, 2, session_id=i) for i in range(40)]
    assert "the wait for the first output grew" in reasons(waits, requested_rate=1.0)
    assert reasons(waits) == "", "all at once, they wait as long as they must"


# -- what is sent -----------------------------------------------------------------------------------------------


def cell(url: str, dataset: str = "osc", rate: float | None = None, **knobs: Any) -> Cell:
    own = {"url": url, "num_prompts": 12, "gen_length": 4, "max_prompt_len": 64, **knobs}
    return a_cell("openai-http", dataset=dataset, platform=PLATFORM, executor="http", rate=rate, **own)


def test_requests_have_the_lengths_that_were_drawn_and_fresh_prefixes():
    mock = MockOpenAI(has_ids=False)
    with mock_server(mock) as url:
        experiment = prepare(cell(url))
        workload = experiment.workload
        assert isinstance(workload, HttpWorkload)
        first, second = experiment.run(), experiment.run()
    lengths = [len(each.turns[0].new_ids) for each in workload.conversations]
    bodies = [mock.bodies[1:13], mock.bodies[14:]]  # a warm-up in front of each
    assert [len(body["prompt"]) for body in bodies[0]] == lengths == first.requests["prompt_len"]
    for own, other in zip(*bodies, strict=True):
        assert own["prompt"][:16] != other["prompt"][:16], "another run, another prefix"
        assert own["prompt"][16:] == other["prompt"][16:]
        assert (own["max_tokens"], own["ignore_eos"], own["model"], own["stream"]) == (4, True, "mock", True)
    prefixes = {tuple(body["prompt"][:16]) for body in mock.bodies if len(body["prompt"]) >= 16}
    assert len(prefixes) == sum(len(body["prompt"]) >= 16 for body in mock.bodies)
    assert first.requests["output_len"] == [4] * 12
    for run in (first, second):
        # Where the machine is busy, either may be late.
        assert all("late by the harness" in each for each in HTTP.assess(run).reasons)
    assert first.facts["prefix_nonce"] != second.facts["prefix_nonce"]


def test_prompts_are_of_any_checkpoint_s_tokenizer(tmp_path):
    """A model's that has no mask, too."""
    folder = write_tiny(tmp_path / "model")
    own, embedded = tokenizer_of(str(folder)), tokenizer_of("tiny")
    assert own.encode("How many coins?") == embedded.encode("How many coins?")
    assert own.decode([*own.encode("coins"), 0, *own.encode("more")]) == "coins", "up to the end of text"
    (folder / "tokenizer.json").write_text("{}")
    tokenizer_of.cache_clear()
    with pytest.raises(UserError, match=r"tokenizer.json is no tokenizer"):
        tokenizer_of(str(folder))


@pytest.mark.parametrize(("api", "has_ids"), [("completions", True), ("completions", False), ("chat", True)])
def test_sessions_repeat_their_history(api, has_ids):
    mock = MockOpenAI(has_ids=has_ids)
    with mock_server(mock) as url:
        knobs = {"num_prompts": 2, "length_scale": 0.01, "max_prompt_len": 4000, "delay_mean_s": 0.0, "api": api}
        experiment = prepare(cell(url, "hotpotqa", num_warmups=0, gen_length=64, **knobs))
        record = experiment.run()
    turns = {each.session_id: each.turns for each in experiment.workload.conversations}
    assert len(record.requests["request_id"]) == sum(map(len, turns.values()))
    assert set(record.requests["status"]) == {"ok"}
    if api == "chat":
        for body in mock.bodies:
            roles = [message["role"] for message in body["messages"]]
            assert roles == [("user", "assistant")[i % 2] for i in range(len(roles))]
        return
    columns = (record.requests[name] for name in ("session_id", "turn", "prompt_len"))
    for session, turn, prompt_len in zip(*columns, strict=True):
        before = turns[session][:turn]
        wanted = sum(len(t.new_ids) + t.asked_tokens for t in before) + len(turns[session][turn].new_ids)
        assert prompt_len == wanted
    assert record.facts["history"] == ("token ids as answered" if has_ids else "text as answered")


def test_failures_are_told_and_make_the_run_invalid():
    with mock_server(MockOpenAI(fails_every=4)) as url:
        record = prepare(cell(url, num_warmups=0)).run()
    errors = {error for error in record.requests["error"] if error is not None}
    assert "status 400: refused by the mock" in errors
    assert any("broke off" in error or "Payload" in error for error in errors)
    assert not HTTP.assess(record).valid


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_an_answer_ends_with_its_last_token_though_that_says_nothing(api):
    mock = MockOpenAI(gap_s=0.01, num_silent=2)
    with mock_server(mock) as url:
        record = prepare(cell(url, num_warmups=0, api=api)).run()
    assert record.requests["num_chunks"] == [2] * 12
    arrived = record.tables[CHUNKS]["arrived_s"][1::2]
    later = [end - last for end, last in zip(record.requests["finished_s"], arrived, strict=True)]
    # A busy machine may read all pieces of an answer at once, though hardly of every answer.
    assert min(later) >= 0
    assert max(later) > 0


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"goodput": f"ttft:{'9' * 400}"}, "each is above 0 ms and at most 1e+09"),
        ({"extra": '{"a": NaN}'}, "is no JSON object"),
        ({"extra": "[" * 100_000}, "is no JSON object"),
        ({"extra": "[1]"}, "is no JSON object"),
    ],
)
def test_knobs_are_refused_in_a_sentence(knobs, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        resolve("openai-http", {"url": "http://127.0.0.1:1", **knobs})


@pytest.mark.parametrize("key", ["a\nb", "é", "a b"])
def test_a_key_that_is_none_is_not_shown(key, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UserError, match=r"^OPENAI_API_KEY must be printable ASCII"):
        prepare(cell("http://127.0.0.1:9"))


def test_an_endpoint_that_does_not_answer_is_refused_before_anything_runs():
    with pytest.raises(UserError, match=r"does not answer .*start the server"):
        prepare(cell("http://127.0.0.1:9"))
    with mock_server(MockOpenAI()) as url:
        with refuses("model='gpt'"):
            prepare(cell(url, model="gpt"))
        with refuses("threshold=0.5"):
            prepare(cell(url, threshold=0.5))
        with refuses("executor='torch'"):
            prepare(replace(cell(url), executor="torch"))
        assert prepare(cell(url)).cell.key == prepare(cell(url)).cell.key, "a time in a card is no other server"
        assert Endpoint(url=f"{url}/v1/").base == url
    assert platform(PLATFORM).executor == "http"
