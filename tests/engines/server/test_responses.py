"""``/v1/responses``, by the types and the client of the ``openai`` package."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs the extra dev: openai is not installed")

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.http_client import ask, metrics, streaming
from support.http_server import Running, running_server
from support.served_echo import RAISE, ByteCodec, EchoModel, answer_of
from support.tables import data_beside

from engines.server.answer import Piece
from engines.server.body import Schema
from engines.server.completion import AnswerPiece
from engines.server.responses import ResponseFormat, ResponsesBody
from engines.server.settings import ServerSettings

REQUESTS = data_beside(__file__, "requests")
RESPONSES = "/v1/responses"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HI = "user:hi\n"
"""What the model is given of the input "hi"."""


def text_of(prompt: str, length: int = 16) -> str:
    return bytes(answer_of(prompt.encode(), length)).decode()


def body(given: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "echo", "input": given, "seed": 0, **fields}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(EchoModel(), ByteCodec()) as found:
        yield found


def test_a_response_is_the_answer_to_the_conversation(server):
    said = ask(server.port, RESPONSES, body(max_output_tokens=8, metadata={"a": "b"}, store=True))
    assert said.status == 200
    response = Response.model_validate(said.body)
    assert response.output_text == text_of(HI, 8)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (8, 8, 16)
    assert (response.max_output_tokens, response.metadata, said.body["store"]) == (8, {"a": "b"}, False)


def test_an_answer_that_ends_is_completed(server):
    response = Response.model_validate(ask(server.port, RESPONSES, body(stop=text_of(HI)[4:6])).body)
    assert (response.status, response.incomplete_details, response.output[0].status) == ("completed", None, "completed")
    assert response.output_text == text_of(HI)[:4]


def test_messages_of_every_form_are_turns(server):
    response = ask(server.port, RESPONSES, body(REQUESTS["conversation of a response"], instructions="be kind")).body
    prompt = "system:be kind\ndeveloper:be short\nuser:one\nassistant:two\nuser:three\n"
    assert response["output"][0]["content"][0]["text"] == text_of(prompt)
    assert response["instructions"] == "be kind"
    assert not any("unknown" in name and value for name, value in metrics(server.port).items())


def test_a_stream_tells_every_event_in_order(server):
    with streaming(server.port, RESPONSES, body(stream=True)) as events:
        told = [*events]
    found = [EVENTS.validate_python(event) for event in told]
    assert [event.type for event in found] == REQUESTS["events of a response"]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == text_of(HI)
    last = found[-1].response
    assert (last.output_text, last.usage.output_tokens) == (text_of(HI), 16)
    assert found[0].response.id == last.id
    assert found[2].item.id == last.output[0].id == found[4].item_id


def test_the_client_s_own_stream_puts_the_response_together(server):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    wanted = text_of(HI)[:8]
    more = {"seed": 0, "stop": text_of(HI)[8:10]}
    with client, client.responses.stream(model="echo", input="hi", extra_body=more) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == wanted
        assert stream.get_final_response().output_text == wanted


def test_a_stream_that_fails_says_so_in_an_event():
    class Failing(ByteCodec):
        def encode_chat(self, messages: Any, *given: Any, **named: Any) -> tuple[int, ...]:
            return RAISE, 1

    with running_server(EchoModel(), Failing()) as server:
        with streaming(server.port, RESPONSES, body(stream=True)) as events:
            *_, error, failed = (EVENTS.validate_python(event) for event in events)
        assert (error.type, error.code) == ("error", "engine_failed")
        assert (failed.type, failed.response.status) == ("response.failed", "failed")
        assert failed.response.error.code == "server_error"


NOTHING = REQUESTS["unless a response asks for nothing"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_asks_for_nothing_passes(stream):
    more = {"stream": True, "stream_options": {"include_obfuscation": False}} if stream else {}
    with running_server(EchoModel(), ByteCodec(), ServerSettings(unknown_fields="refuse")) as server:
        if stream:
            with streaming(server.port, RESPONSES, body(**NOTHING, **more)) as events:
                assert [*events][-1]["response"]["output"][0]["content"][0]["text"] == text_of(HI)
        else:
            assert ask(server.port, RESPONSES, body(**NOTHING)).status == 200


@pytest.mark.parametrize(("field", "value"), REQUESTS["fields of a response"])
def test_what_would_change_the_answer_is_refused_by_its_name(server, field, value):
    given = {"text": value} if field == "response_format" else {field: value}
    said = ask(server.port, RESPONSES, {**body(), **given})
    assert (said.status, said.body["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("fields", "field", "named"),
    [
        ({"max_output_tokens": 513}, "max_output_tokens", "max_output_tokens=513"),
        ({"max_output_tokens": 4, "min_tokens": 5}, "min_tokens", "max_output_tokens=4"),
        ({"min_tokens": 17}, "min_tokens", "raise max_output_tokens"),
        ({"given": "a" * 2049}, "input", "2049 bytes"),
    ],
)
def test_a_refusal_has_the_names_of_this_route(server, fields, field, named):
    error = ask(server.port, RESPONSES, body(**fields)).body["error"]
    assert error["param"] == field
    assert named in error["message"]
    assert "max_tokens" not in error["message"]


def test_a_conversation_that_is_too_long_loses_its_beginning_where_it_may(server):
    prompt = f"user:{'a' * 600}\n"
    said = ask(server.port, RESPONSES, body("a" * 600, truncation="auto")).body
    assert said["output"][0]["content"][0]["text"] == text_of(prompt[-511:], 1)
    assert (said["truncation"], said["usage"]["input_tokens"]) == ("auto", 511)
    assert ask(server.port, RESPONSES, body("a" * 600)).status == 400


def test_log_probabilities_of_half_a_character_are_told_without_its_text():
    schema = Schema(ResponsesBody, "m", {})
    told = ResponseFormat("m", schema.read(b'{"input": "hi", "stream": true, "top_logprobs": 1}'))
    scores = {"content": [{"token": "", "logprob": -1.0, "bytes": [], "top_logprobs": []}]}
    event = told.part(AnswerPiece(0, Piece("", (7,)), scores), (), None)
    assert b'"delta":""' in event
    assert b'"logprob":-1.0' in event
    assert told.part(AnswerPiece(0, Piece("", (8,))), (), None) == b""


def test_nothing_is_kept(server):
    made = ask(server.port, RESPONSES, body(store=True)).body
    assert ask(server.port, f"{RESPONSES}/{made['id']}").status == 404


@pytest.mark.parametrize(
    ("fields", "name"), data_beside(__file__, "responses")["unknown_fields_of_objects_are_told_where_they_stand"]
)
def test_unknown_fields_of_objects_are_told_where_they_stand(server, fields, name):
    before = metrics(server.port).get(f'repro_unknown_fields_total{{field="{name}"}}', 0)
    assert ask(server.port, RESPONSES, body(**fields)).status == 200
    assert metrics(server.port)[f'repro_unknown_fields_total{{field="{name}"}}'] == before + 1
    with running_server(EchoModel(), ByteCodec(), ServerSettings(unknown_fields="refuse")) as strict:
        said = ask(strict.port, RESPONSES, body(**fields))
    assert (said.status, said.body["error"]["param"]) == (400, name)
