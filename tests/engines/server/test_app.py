"""The routes over a real socket, in front of an engine's process that answers by arithmetic."""

import importlib.metadata
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.http_client import ask, leave, metrics, streaming
from support.http_server import Running, running_server
from support.served_echo import DIE, DIE_AT_ONCE, LONG_ANSWER, LONG_LEN, RAISE, ByteCodec, EchoModel, answer_of, held
from support.tables import data_beside

from engines.errors import UserError
from engines.server.settings import ServerSettings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def text_of(prompt: str, length: int = 16, seed: int = 0) -> str:
    return bytes(answer_of(prompt.encode(), length, seed)).decode()


def body(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "echo", "prompt": prompt, "seed": 0, **fields}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(EchoModel(), ByteCodec(), ServerSettings(max_body_bytes=5000)) as found:
        yield found


def test_a_completion_is_the_engine_s_answer(server):
    said = ask(server.port, COMPLETIONS, body(return_token_ids=True))
    assert said.status == 200
    (choice,) = said.body["choices"]
    assert choice["text"] == text_of("hello")
    assert tuple(choice["token_ids"]) == answer_of(b"hello", 16)
    assert choice["finish_reason"] == "length"
    usage = {"prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21}
    assert said.body["usage"] == {**usage, "prompt_tokens_details": None, "completion_tokens_details": None}
    assert (said.body["object"], said.body["model"]) == ("text_completion", "echo")
    assert choice["prompt_token_ids"] == list(b"hello")
    assert ask(server.port, COMPLETIONS, body(request_id="mine")).body["id"] == "cmpl-mine"


def test_the_header_s_id_goes_before_the_body_s(server):
    headers = {"X-Request-Id": "theirs"}
    assert ask(server.port, COMPLETIONS, body(request_id="mine"), headers=headers).body["id"] == "cmpl-theirs"
    chat = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    with streaming(server.port, CHAT, chat, headers=headers) as events:
        assert {each["id"] for each in [*events][:-1]} == {"chatcmpl-theirs"}
    said = ask(server.port, COMPLETIONS, body(), headers={"X-Request-Id": "a" * 257})
    assert (said.status, said.body["error"]["message"][:31]) == (400, "X-Request-Id has 257 characters")


def test_an_end_of_text_ends_the_answer_and_counts(server):
    said = ask(server.port, COMPLETIONS, body([5, 0]))
    (choice,) = said.body["choices"]
    assert choice["text"] == bytes(answer_of([5, 0], 16)[:8]).decode()
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert (said.body["usage"]["completion_tokens"], choice["token_ids"]) == (9, None)
    (choice,) = ask(server.port, COMPLETIONS, body([5, 0], return_token_ids=True)).body["choices"]
    assert tuple(choice["token_ids"]) == answer_of([5, 0], 16)[:9], "usage counts what is listed"
    for asked, *wanted in (
        ({"min_tokens": 9}, "length", 16),
        ({"min_tokens": 8}, "stop", 9),
        ({"ignore_eos": True}, "length", 16),
    ):
        said = ask(server.port, COMPLETIONS, body([5, 0], **asked))
        assert [said.body["choices"][0]["finish_reason"], said.body["usage"]["completion_tokens"]] == wanted


def test_several_prompts_get_n_answers_each_by_their_seeds(server):
    said = ask(server.port, COMPLETIONS, body(["ab", [99, 100]], n=2, seed=3))
    wanted = [text_of(prompt, seed=seed) for prompt in ("ab", "cd") for seed in (3, 4)]
    assert [choice["text"] for choice in said.body["choices"]] == wanted
    assert [choice["index"] for choice in said.body["choices"]] == [0, 1, 2, 3]
    assert said.body["usage"]["prompt_tokens"] == 4
    for extreme in (-1, -5, -(2**63), 2**63 - 1):
        assert ask(server.port, COMPLETIONS, body(n=2, seed=extreme)).status == 200
    same, other = (ask(server.port, COMPLETIONS, body(seed=seed)).body["choices"][0]["text"] for seed in (-5, -4))
    assert same != other
    assert ask(server.port, COMPLETIONS, body(seed=-5)).body["choices"][0]["text"] == same
    for seed in (None, -1):
        said = ask(server.port, COMPLETIONS, body("ab", seed=seed, temperature=0)).body
        assert said["choices"][0]["text"] == text_of("ab"), "the same each time"


def test_a_stream_is_the_whole_answer_in_block_order(server):
    with streaming(server.port, COMPLETIONS, body(stream=True, stream_options={"include_usage": True})) as events:
        *chunks, last, done = events
    assert done == "[DONE]"
    assert [len(chunk["choices"][0]["text"]) for chunk in chunks] == [4, 4, 4, 4]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of("hello")
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 16)
    assert len({chunk["id"] for chunk in (*chunks, last)}) == 1


def test_a_conversation_is_answered_whole_and_streamed(server):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    asked = {"model": "echo", "messages": messages, "seed": 0, "max_completion_tokens": 8}
    said = ask(server.port, CHAT, asked).body
    wanted = text_of("user:hi\n", 8)
    message = said["choices"][0]["message"]
    given = {name: value for name, value in message.items() if value is not None}
    assert given == {"role": "assistant", "content": wanted}
    assert {"refusal", "annotations", "audio", "function_call"} < message.keys()
    assert said["object"] == "chat.completion"
    assert ask(server.port, CHAT, {**asked, "max_tokens": 8}).status == 200
    refused = ask(server.port, CHAT, {**asked, "max_tokens": 9}).body["error"]["message"]
    assert refused.startswith("max_tokens=9 and max_completion_tokens=8 are two lengths of one answer")
    with streaming(server.port, CHAT, {**asked, "stream": True}) as events:
        opening, *chunks, done = events
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == wanted
    assert done == "[DONE]"


REQUESTS = data_beside(__file__, "requests")["by the model"]
REFUSALS = [
    *((body(**fields), status, sentence) for fields, status, sentence in REQUESTS),
    (b"{", 400, "the body is not JSON"),
    ({"model": "gpt", "prompt": "a"}, 404, "model='gpt' is not served here: use 'echo'"),
    ({"model": "echo"}, 400, "prompt is missing"),
    (body("a" * 500, max_tokens=16, min_tokens=13), 400, "min_tokens=13 is more than the 12 tokens"),
    (body("a" * 512), 400, "prompt of 512 tokens"),
    (body("a" * 600), 400, "prompt of 600 tokens"),
    (body(seed=2**63), 400, "must be at most 9,223,372,036,854,775,807"),
    (b"x" * 6000, 413, "the body has more than 5000 bytes"),
]


@pytest.mark.parametrize(("given", "status", "sentence"), REFUSALS)
def test_refusals_are_one_sentence_in_openai_s_form(server, given, status, sentence):
    said = ask(server.port, COMPLETIONS, given)
    assert said.status == status
    error = said.body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert sentence in error["message"]
    assert "\n" not in error["message"]
    assert server.call(lambda: (server.service.num_open, server.service.num_waiting)) == (0, 0)


def test_a_request_has_as_many_prompts_as_the_queue_has_places(server):
    prompts = [f"{i}" for i in range(300)]
    said = ask(server.port, COMPLETIONS, body(prompts, max_tokens=2))
    assert [each["text"] for each in said.body["choices"]] == [text_of(prompt, 2) for prompt in prompts]
    assert said.body["usage"]["completion_tokens"] == 600


def choices_of(server: Running, path: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the whole answer, and of the streamed one put together; told alike."""
    whole = ask(server.port, path, asked)
    assert whole.status == 200
    joined: dict[int, dict[str, Any]] = {}
    with streaming(server.port, path, {**asked, "stream": True}) as events:
        for event in events:
            for choice in [] if event == "[DONE]" else event["choices"]:
                found = joined.setdefault(choice["index"], {"text": "", "token_ids": []})
                found["text"] += choice["text"] if path == COMPLETIONS else choice["delta"]["content"]
                found["token_ids"] += choice.get("token_ids") or []
                found |= {name: choice.get(name) for name in ("finish_reason", "stop_reason")}
    for choice in whole.body["choices"]:
        other = joined[choice["index"]]
        assert other["text"] == (choice["text"] if path == COMPLETIONS else choice["message"]["content"])
        assert other["token_ids"] == (choice["token_ids"] or [])
        assert (other["finish_reason"], other["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    return whole.body["choices"]


def test_ids_and_texts_that_stop_an_answer_are_told(server):
    ids = answer_of(b"hello", 40)
    text = bytes(ids).decode()
    asked = body(max_tokens=40, return_token_ids=True)
    (choice,) = choices_of(server, COMPLETIONS, {**asked, "stop_token_ids": [ids[9]]})
    assert (choice["text"], choice["stop_reason"], tuple(choice["token_ids"])) == (text[:9], ids[9], ids[:10])
    shown = {**asked, "include_stop_str_in_output": True}
    (choice,) = choices_of(server, COMPLETIONS, {**shown, "stop_token_ids": [ids[9]]})
    assert (choice["text"], choice["finish_reason"]) == (text[:10], "stop")
    (choice,) = choices_of(server, COMPLETIONS, {**asked, "stop": [text[9:12]]})
    assert (choice["text"], choice["stop_reason"], len(choice["token_ids"])) == (text[:9], text[9:12], 12)
    assert choice["finish_reason"] == "stop"
    (choice,) = choices_of(server, COMPLETIONS, {**shown, "stop": [text[9:12]]})
    assert (choice["text"], choice["stop_reason"]) == (text[:12], text[9:12])
    many = [f"n{i}" for i in range(500)]
    (choice,) = choices_of(server, COMPLETIONS, {**asked, "stop": [*many, text[20:24]]})
    assert (choice["text"], choice["stop_reason"]) == (text[:20], text[20:24])
    (choice,) = choices_of(server, COMPLETIONS, {**asked, "stop": [text[9:12]], "min_tokens": 12})
    assert choice["text"] == text[: text.index(text[9:12], 10)], "the letters come again after 26"
    server.wait_until_idle()


def test_an_end_of_text_is_a_reason_to_tell_where_it_was_asked_for(server):
    (choice,) = choices_of(server, COMPLETIONS, body([5, 0], stop_token_ids=[0]))
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None), "it ends any answer"
    (choice,) = choices_of(server, COMPLETIONS, body([5, 0], stop_token_ids=[0], ignore_eos=True))
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 0)
    shown = body([5, 0], include_stop_str_in_output=True, skip_special_tokens=False)
    (choice,) = choices_of(server, COMPLETIONS, shown)
    assert choice["text"].endswith("\0")


def test_a_stream_tells_usage_in_each_chunk_where_it_is_asked(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, asked in ((COMPLETIONS, body(n=2)), (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 2})):
        with streaming(server.port, path, {**asked, "stream": True, "stream_options": options}) as events:
            *chunks, last, done = events
        assert done == "[DONE]"
        counts: dict[int, list[int]] = {}
        for chunk in chunks:
            usage = chunk["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            counts.setdefault(chunk["choices"][0]["index"], []).append(usage["completion_tokens"])
        wanted = [4, 8, 12, 16] if path == COMPLETIONS else [0, 4, 8, 12, 16]
        assert counts == {0: wanted, 1: wanted}
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 32)
    with streaming(server.port, COMPLETIONS, body(stream=True, stream_options={"include_usage": True})) as events:
        assert sum("usage" in event for event in events if event != "[DONE]") == 1
    alone = {"continuous_usage_stats": True}
    with streaming(server.port, COMPLETIONS, body(stream=True, stream_options=alone)) as events:
        assert not any("usage" in event for event in events if event != "[DONE]"), "as vLLM"


def test_prompts_are_told_beside_ids(server):
    asked = body(["ab", "c"], n=2, return_token_ids=True)
    told = [choice["prompt_token_ids"] for choice in ask(server.port, COMPLETIONS, asked).body["choices"]]
    assert told == [[97, 98], [97, 98], [99], [99]]
    with streaming(server.port, COMPLETIONS, {**asked, "stream": True}) as events:
        choices = [event["choices"][0] for event in events if event != "[DONE]"]
    firsts = {choice["index"]: choice["prompt_token_ids"] for choice in reversed(choices) if choice["prompt_token_ids"]}
    assert firsts == dict(enumerate(told))
    assert sum(choice["prompt_token_ids"] is not None for choice in choices) == 4, "once an answer"
    messages = [{"role": "user", "content": "a"}]
    chat = {"messages": messages, "return_token_ids": True}
    wanted = list(b"user:a\n")
    assert ask(server.port, CHAT, chat).body["prompt_token_ids"] == wanted
    with streaming(server.port, CHAT, {**chat, "stream": True}) as events:
        opening, *chunks, _done = events
    assert opening["prompt_token_ids"] == wanted
    assert not any(chunk.get("prompt_token_ids") for chunk in chunks)
    assert ask(server.port, COMPLETIONS, body()).body["choices"][0]["prompt_token_ids"] is None


def test_the_context_cuts_an_answer_short(server):
    said = ask(server.port, COMPLETIONS, body("a" * 508, max_tokens=8)).body
    assert (said["choices"][0]["finish_reason"], said["usage"]["completion_tokens"]) == ("length", 4)
    said = ask(server.port, COMPLETIONS, body("a" * 510)).body
    assert said["usage"]["completion_tokens"] == 2, "the default length too"
    said = ask(server.port, COMPLETIONS, body(["a", "a" * 508], max_tokens=8)).body
    assert said["usage"]["completion_tokens"] == 12
    assert ask(server.port, COMPLETIONS, body("a", max_tokens=512)).body["usage"]["completion_tokens"] == 511


def test_prompts_are_cut_where_that_is_asked_for(server):
    def prompt_of(**fields: Any) -> str:
        said = ask(server.port, COMPLETIONS, body(return_token_ids=True, max_tokens=1, **fields))
        return bytes(said.body["choices"][0]["prompt_token_ids"]).decode()

    assert prompt_of(prompt="abcdef", truncate_prompt_tokens=4) == "cdef"
    assert prompt_of(prompt="abcdef", truncate_prompt_tokens=4, truncation_side="right") == "abcd"
    assert prompt_of(prompt=list(b"abcdef"), truncate_prompt_tokens=2) == "ef"
    assert prompt_of(prompt="abc", truncate_prompt_tokens=8) == "abc"
    assert len(prompt_of(prompt="a" * 600, truncate_prompt_tokens=-1)) == 511
    assert prompt_of(prompt="a" * 2048 + "b" * 2048, truncate_prompt_tokens=2) == "bb", "longer than any that fits"
    assert prompt_of(prompt="a", add_special_tokens=True) == "\1a"
    assert ask(server.port, COMPLETIONS, body(truncate_prompt_tokens=512)).status == 200, "all that fits"
    assert ask(server.port, COMPLETIONS, body("abc", truncate_prompt_tokens=0)).status == 400


def test_a_conversation_is_rendered_as_it_is_asked(server):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    asked = {"messages": messages, "return_token_ids": True, "add_generation_prompt": False}
    said = ask(server.port, CHAT, {**asked, "continue_final_message": True, "chat_template_kwargs": {"x": 1}}).body
    assert bytes(said["prompt_token_ids"]) == b"user:a\nassistant:bx=1\n"
    said = ask(server.port, CHAT, {**asked, "messages": messages[:1]}).body
    assert said["choices"][0]["message"]["role"] == "user", "whose turn goes on"
    assert ask(server.port, CHAT, {"messages": messages, "continue_final_message": True}).status == 400


def test_unknown_fields_are_counted_by_name_and_a_strict_server_refuses_them():
    with running_server(EchoModel(), ByteCodec()) as server:
        for number in range(80):
            said = ask(server.port, COMPLETIONS, body(chat_id="c", **{f"field{number}": 1, "line\nbreak": 2}))
            assert said.status == 200
        counted = {name: value for name, value in metrics(server.port).items() if "unknown_fields_total" in name}
        assert counted['repro_unknown_fields_total{field="chat_id"}'] == 80
        assert counted['repro_unknown_fields_total{field="other"}'] == 80, "each request once"
        assert len(counted) == 65, "clients choose the names, not how many are kept"
    with running_server(EchoModel(), ByteCodec(), ServerSettings(unknown_fields="refuse")) as server:
        said = ask(server.port, COMPLETIONS, body(chat_id="c"))
        assert (said.status, said.body["error"]["param"]) == (400, "chat_id")
        assert ask(server.port, COMPLETIONS, body(user="u")).status == 200


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/v2", "GET", 404), (COMPLETIONS, "GET", 405), ("/v1/models/other", "GET", 404), ("/health", "POST", 405)],
)
def test_what_is_not_there_is_refused_in_the_same_form(server, path, method, status):
    said = ask(server.port, path, method=method)
    assert (said.status, list(said.body)) == (status, ["error"])
    assert ("allow" in {*map(str.lower, said.headers)}) == (status == 405)


def test_models_health_page_and_metrics(server):
    ask(server.port, COMPLETIONS, body())
    for path in ("/v1/models", "/v1/models/"):
        assert [card["id"] for card in ask(server.port, path).body["data"]] == ["echo"]
    card = ask(server.port, "/v1/models/echo").body
    assert (card["max_model_len"], card["default_max_tokens"]) == (512, 16)
    assert ask(server.port, "/health").status == ask(server.port, "/ready").status == 200
    assert ask(server.port, "/ping").status == ask(server.port, "/ping", method="POST").status == 200
    assert ask(server.port, "/version").body == {"version": importlib.metadata.version("dllm-serve-repro")}
    values = metrics(server.port)
    read = {*re.findall(r"\b(?:s|status)\.([a-z_]+)", ask(server.port, "/").body)} - {"t", "rate", "busy"}
    assert {"requests_total", "pool_rows", "uptime_seconds"} < read
    assert {f"repro_{name}" for name in read} <= values.keys(), "what the page draws is told"
    assert values['repro_model_info{name="echo"}'] == 1
    assert values["repro_requests_total"] > 0
    assert values["repro_forward_passes_total"] > 0
    assert values["repro_pool_rows"] == 40
    assert values["repro_budget_tokens"] == 16
    assert {'repro_step_requests{phase="refresh"}', 'repro_step_requests{phase="reuse"}'} <= values.keys()
    assert values["repro_committed_tokens_total"] >= 16
    assert values["repro_requests_waiting"] == values["repro_requests_running"] == 0


def test_streams_are_timed_to_their_first_token_and_between_the_others():
    """Two blocks, the second of one token."""
    with running_server(EchoModel(step_s=0.02), ByteCodec()) as server:
        assert not any("quantile" in name for name in metrics(server.port))
        with streaming(server.port, COMPLETIONS, body(stream=True, max_tokens=5)) as events:
            assert [*events][-1] == "[DONE]"
        server.wait_until_idle()
        values = metrics(server.port)
        names = ("time_to_first_block", "time_per_output_token", "request")
        ttft_s, tpot_s, e2el_s = (values[f"repro_{name}_seconds_sum"] for name in names)
        assert 4 * tpot_s == pytest.approx(e2el_s - ttft_s), "one clock reading ends both"
        assert values['repro_recent_time_to_first_block_seconds{quantile="0.5"}'] == ttft_s
        assert values['repro_recent_time_per_output_token_seconds{quantile="0.9"}'] == tpot_s


def test_a_step_that_raises_costs_its_batch_alone(server):
    failed = ask(server.port, COMPLETIONS, body([RAISE, 1]))
    assert (failed.status, failed.body["error"]["code"]) == (500, "engine_failed")
    assert "the engine failed in a step of this request (RuntimeError)" in failed.body["error"]["message"]
    assert ask(server.port, COMPLETIONS, body()).status == 200
    assert server.call(lambda: server.service.num_restarts) == 0
    with streaming(server.port, COMPLETIONS, body([RAISE, 1], stream=True)) as events:
        *_, error, done = events
    assert (error["error"]["code"], done) == ("engine_failed", "[DONE]")
    server.wait_until_idle()


def test_a_chat_s_role_waits_for_the_first_token():
    """Clients take the time of a stream's first chunk for the time to its first token."""
    model = EchoModel(max_running=1, step_s=0.02, max_model_len=LONG_LEN)
    asked = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    with running_server(model, ByteCodec()) as server, leave(server.port, COMPLETIONS, body(max_tokens=LONG_ANSWER)):
        server.wait_until(lambda: server.service.status.running == 1)
        with streaming(server.port, CHAT, asked) as events:
            server.call(lambda: server.service.fail_open("it ends"))
            error, _done = events
    assert error["error"]["message"] == "it ends"


def test_a_fault_of_the_server_is_said_without_its_traceback(caplog):
    class Broken(ByteCodec):
        def encode(self, text: str, **_: Any) -> tuple[int, ...]:
            raise RuntimeError("a secret")

    with running_server(EchoModel(), Broken()) as server:
        said = ask(server.port, COMPLETIONS, body())
        assert (said.status, said.body["error"]["type"]) == (500, "server_error")
        assert said.body["error"]["message"] == "a fault of this server (RuntimeError): see its log"
        assert "a secret" in caplog.text
        assert ask(server.port, COMPLETIONS, body([104, 105])).status == 200
        server.wait_until_idle()


def test_a_client_that_leaves_frees_its_rows():
    with running_server(EchoModel(max_running=2, step_s=0.02, max_model_len=LONG_LEN), ByteCodec()) as server:
        long = body(max_tokens=LONG_ANSWER)
        ends = [leave(server.port, COMPLETIONS, long | {"stream": stream}) for stream in (False, True, False)]
        server.wait_until(lambda: server.service.status.pool_used == 20 and server.service.num_open == 3)
        for end in ends:
            end.close()
        server.wait_until_idle()
        assert server.call(lambda: server.service.status.pool_used) == 0
        assert metrics(server.port)["repro_disconnects_total"] == 3
        assert ask(server.port, COMPLETIONS, body()).status == 200


def test_a_full_queue_refuses_and_keeps_its_word_to_the_others():
    settings = ServerSettings(max_queue=2)
    model = EchoModel(max_running=1, step_s=0.02, max_model_len=LONG_LEN)
    with running_server(model, ByteCodec(), settings) as server:
        end = leave(server.port, COMPLETIONS, body(max_tokens=LONG_ANSWER))
        server.wait_until(lambda: server.service.status.running == 1)
        with ThreadPoolExecutor(2) as pool:
            others = [pool.submit(ask, server.port, COMPLETIONS, body(max_tokens=4)) for _ in range(2)]
            server.wait_until(lambda: server.service.num_waiting == 2)
            refused = ask(server.port, COMPLETIONS, body())
            assert (refused.status, refused.body["error"]["code"]) == (429, "queue_full")
            assert refused.headers["retry-after"] == "1"
            error = ask(server.port, COMPLETIONS, body(n=3)).body["error"]
            assert (error["param"], "more than max_queue=2" in error["message"]) == ("n", True), "never fits"
            end.close()
            assert [other.result().status for other in others] == [200, 200]
        assert metrics(server.port)['repro_rejections_total{status="429"}'] == 1
        assert len(ask(server.port, COMPLETIONS, body(n=2)).body["choices"]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request_that_waits_or_runs(stream):
    with running_server(EchoModel(max_running=1, step_s=0.05, max_model_len=LONG_LEN), ByteCodec()) as server:
        end = leave(server.port, COMPLETIONS, body(max_tokens=LONG_ANSWER))
        server.wait_until(lambda: server.service.status.running == 1)
        asked = body(timeout=0.2, stream=stream)
        if stream:
            with streaming(server.port, COMPLETIONS, asked) as events:
                error, done = events
            assert done == "[DONE]"
        else:
            said = ask(server.port, COMPLETIONS, asked)
            assert said.status == 504
            error = said.body
        assert error["error"]["code"] == "deadline_exceeded"
        assert "timeout=0.2 s" in error["error"]["message"]
        server.wait_until(lambda: server.service.num_open == 1)
        end.close()
        server.wait_until_idle()


def test_an_engine_that_dies_costs_what_is_open(caplog):
    with running_server(EchoModel(max_running=1, step_s=0.05, max_model_len=LONG_LEN), ByteCodec()) as server:
        first = server.service._process.pid
        with ThreadPoolExecutor(2) as pool:
            taken = [pool.submit(ask, server.port, COMPLETIONS, body(max_tokens=LONG_ANSWER)) for _ in range(2)]
            server.wait_until(lambda: server.service.status.running == 1 and server.service.num_open == 2)
            server.call(lambda: server.service._process.kill())
            for each in taken:
                assert each.result().status == 500
                assert "lost in the middle" in each.result().body["error"]["message"]
        assert server.call(lambda: (server.service.num_waiting, server.service.status.running)) == (0, 0)
        server.wait_until(lambda: server.service.is_ready)
        assert ask(server.port, COMPLETIONS, body("w", max_tokens=4)).body["choices"][0]["text"] == text_of("w", 4)
        assert server.service._process.pid != first
        assert server.call(lambda: server.service.num_restarts) == 1
    died, back = (re.sub(r"[\d.]+ s", "N s", record.getMessage()) for record in caplog.records)
    assert died == f"engine {first} was lost (its process ended: killed by signal 9): 2 requests fail"
    assert re.fullmatch(r"engine \d+ is ready after N s", back)


@pytest.mark.parametrize("poison", [DIE, DIE_AT_ONCE])
def test_a_request_that_kills_the_engine_is_not_given_to_the_next(poison):
    with running_server(EchoModel(), ByteCodec()) as server:
        said = ask(server.port, COMPLETIONS, body([poison, 1]))
        assert (said.status, said.body["error"]["code"]) == (500, "engine_failed")
        loading = ask(server.port, COMPLETIONS, body())
        assert (loading.status, loading.body["error"]["code"]) == (503, "unavailable")
        server.wait_until(lambda: server.service.is_ready)
        assert ask(server.port, COMPLETIONS, body()).status == 200
        assert server.call(lambda: server.service.num_restarts) == 1


def test_a_key_is_asked_for_under_v1_alone():
    with running_server(EchoModel(), ByteCodec(), ServerSettings(api_key="sesame")) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic sesame"}):
            said = ask(server.port, COMPLETIONS, body(), headers=headers)
            assert (said.status, said.body["error"]["code"]) == (401, "invalid_api_key")
        assert ask(server.port, "/v1/models").status == 401
        assert ask(server.port, COMPLETIONS, body(), headers={"Authorization": "Bearer sesame"}).status == 200
        assert ask(server.port, "/health").status == ask(server.port, "/metrics").status == 200
        assert "sesame" not in ask(server.port, "/metrics").body


def test_before_the_model_is_loaded_requests_are_asked_to_come_again():
    with running_server(EchoModel(load_s=0.2), ByteCodec(), is_ready=False) as server:
        assert ask(server.port, "/health").status == 200
        said = ask(server.port, COMPLETIONS, body())
        if said.status == 503:  # it loads in a fifth of a second, by the machine's clock
            assert said.body["error"]["code"] == "unavailable"
            assert said.headers["retry-after"] == "1"
        server.wait_until(lambda: server.service.is_ready)
        assert ask(server.port, "/ready").body == {"status": "ready"}
        assert ask(server.port, COMPLETIONS, body()).status == 200


def test_a_model_that_cannot_be_loaded_ends_the_service_with_its_sentence():
    model = EchoModel(refusal="dtype='float8' is unknown: use another")
    with running_server(model, ByteCodec(), is_ready=False) as server:
        server.wait_until(lambda: server.service.ended.done())
        error = server.service.ended.result()
        assert isinstance(error, UserError)
        assert str(error) == "dtype='float8' is unknown: use another"
        assert ask(server.port, COMPLETIONS, body()).body["error"]["message"].startswith("the engine has ended")


def test_a_draining_server_ends_what_it_has_and_takes_nothing_more(tmp_path):
    by = tmp_path / "held"
    with running_server(EchoModel(held_by=by), ByteCodec()) as server, ThreadPoolExecutor(1) as pool:
        with held(by):
            taken = pool.submit(ask, server.port, COMPLETIONS, body(max_tokens=60))
            server.wait_until(lambda: server.service.status.running == 1)
            server.call(server.server.drain)
            refused = ask(server.port, COMPLETIONS, body())
            assert (refused.status, refused.headers["connection"]) == (503, "close")
            assert ask(server.port, "/ready").status == 503
        assert taken.result().body["usage"]["completion_tokens"] == 60


def test_many_clients_that_come_and_go_leave_nothing_behind():
    """Answers are right, whoever else left in the middle; afterwards nothing is held."""
    with running_server(EchoModel(max_running=8), ByteCodec()) as server, ThreadPoolExecutor(16) as pool:

        def one(i: int) -> None:
            prompt = f"request {i}"
            asked = body(prompt, max_tokens=8 + i % 40, stream=i % 3 == 0)
            if i % 5 == 0:
                end = leave(server.port, COMPLETIONS, asked)
                time.sleep(0.001 * (i % 7))
                end.close()
            elif i % 7 == 0:
                assert ask(server.port, COMPLETIONS, body("a" * 600)).status == 400
            elif asked["stream"]:
                with streaming(server.port, COMPLETIONS, asked) as events:
                    text = "".join(event["choices"][0]["text"] for event in events if event != "[DONE]")
                assert text == text_of(prompt, 8 + i % 40)
            else:
                assert ask(server.port, COMPLETIONS, asked).body["choices"][0]["text"] == text_of(prompt, 8 + i % 40)

        list(pool.map(one, range(80)))
        server.wait_until_idle()
        assert server.call(lambda: server.service.num_waiting) == 0
        assert server.call(lambda: server.service.status.pool_used) == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["closed", "half-closed", "closed behind its next request"])
def test_whoever_leaves_in_a_long_step_has_no_row_in_the_next(tmp_path, how, stream):
    """Cancelled while its first step still runs: nothing of it is in the second."""
    (held_by := tmp_path / "held").touch()
    long = body(max_tokens=LONG_ANSWER, stream=stream)
    with running_server(EchoModel(held_by=held_by, max_model_len=LONG_LEN), ByteCodec()) as server:
        end = leave(server.port, COMPLETIONS, long)
        server.wait_until(lambda: server.service.status.running == 1)
        if how == "closed behind its next request":
            end.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            time.sleep(0.05)
        if how == "half-closed":
            end.shutdown(socket.SHUT_WR)
        else:
            end.close()
        server.wait_until(lambda: server.service.num_open == 0)
        assert server.call(lambda: server.service.status.forward_passes) == 1
        held_by.unlink()
        server.wait_until_idle()
        assert server.call(lambda: server.service.status.forward_passes) <= 2, "the step that was held, and no other"
        assert metrics(server.port)["repro_disconnects_total"] == 1
        end.close()


def test_bad_words_are_looked_up_beside_the_event_loop(server, monkeypatch):
    threads = []
    make = EchoModel.generation

    def generation(self: EchoModel, asked: Any) -> Any:
        threads.append(threading.current_thread())
        return make(self, asked)

    monkeypatch.setattr(EchoModel, "generation", generation)
    assert ask(server.port, COMPLETIONS, body(n=3, bad_words=["no"])).status == 200
    assert len(threads) == 4, "one is checked before a place is taken in the queue"
    assert len(set(threads)) == 1
    assert ask(server.port, COMPLETIONS, body()).status == 200
    loop, lane = threads[4:]
    assert loop not in threads[:4]
    assert lane is threads[0]
