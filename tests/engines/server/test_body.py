"""Bodies as they are read, and refused, without a server."""

import json
from typing import Any

import pytest
from support.tables import data_beside

from engines.errors import UserError
from engines.server.body import AnswerBody, ChatBody, CompletionBody, Schema
from engines.server.errors import ApiError
from engines.server.protocol import diffusion_fields

SCHEMAS = {
    kind: Schema(kind, "m", {"steps": int, "threshold": float, "remasking": str}) for kind in (CompletionBody, ChatBody)
}
REQUESTS = data_beside(__file__, "requests")
MESSAGES = [{"role": "user", "content": "a"}]


def read(kind: type[AnswerBody] = CompletionBody, **fields: Any) -> AnswerBody:
    given = {"prompt": "a"} if kind is CompletionBody else {"messages": MESSAGES}
    return SCHEMAS[kind].read(json.dumps({"model": "m", **given, **fields}).encode())


def refusal(kind: type[AnswerBody] = CompletionBody, **fields: Any) -> str:
    with pytest.raises(ApiError) as caught:
        read(kind, **fields)
    return caught.value.message


def body(prompt: Any = "a", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, **fields}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        *((body(**fields), sentence) for fields, sentence in REQUESTS["completions"]),
        (b"\xff", "the body is not UTF-8"),
        (b"[1]", "the body is [1]: send one JSON object"),
        (b"[" * 4000, "nested too deeply"),
        (b'{"prompt": "a", "prompt": "b"}', "the body is not clear, the key 'prompt' is given twice: keep one"),
        (b'{"max_tokens": %s}' % (b"9" * 4400), "the body has a number of too many digits: send finite numbers"),
        (b'{"model": "m", "prompt": "a", "temperature": NaN}', "NaN is no JSON"),
        ({"model": "m"}, "prompt is missing"),
        (body(temperature=10**400), "must be a number"),
        (b'{"model": "m", "prompt": "a", "timeout": 1e999}', "timeout=inf must be a finite number"),
        (body(["a", "b"], n=int("9" * 4300)), "must be at most 2,147,483,648"),
        (body(stop=["a" * 1025]), "stop must be a text or a list of up to 1,000 texts"),
        (body(stop=["a"] * 1001), "stop must be a text or a list of up to 1,000 texts"),
        (body(**dict.fromkeys(map(str, range(100)), 1)), "an object has 102 fields, more than 100"),
    ],
)
def test_refusals(given, sentence):
    content = given if isinstance(given, bytes) else json.dumps(given).encode()
    with pytest.raises(ApiError) as caught:
        SCHEMAS[CompletionBody].read(content)
    assert caught.value.status == 400
    assert sentence in caught.value.message


@pytest.mark.parametrize(("messages", "sentence"), REQUESTS["messages of a chat"])
def test_refusals_of_conversations(messages, sentence):
    assert sentence in refusal(ChatBody, messages=messages)


@pytest.mark.parametrize(("fields", "generation"), REQUESTS["what the engine is told"])
def test_the_engine_is_told_what_was_given(fields, generation):
    assert read(**fields).generation == read(ChatBody, **fields).generation == generation


def test_the_newer_name_of_an_answer_s_length():
    assert read(ChatBody, max_completion_tokens=4).generation == {"max_tokens": 4}
    assert read(ChatBody, max_completion_tokens=None, max_tokens=3).generation == {"max_tokens": 3}
    assert read(max_completion_tokens=4).generation == {"max_tokens": 4}
    assert "are two lengths of one answer" in refusal(max_completion_tokens=4, max_tokens=5)
    assert read(ChatBody, max_completion_tokens=4, max_tokens=4).generation == {"max_tokens": 4}
    assert refusal(ChatBody, max_completion_tokens=0) == "max_completion_tokens=0 must be at least 1"
    assert refusal(ChatBody, max_completion_tokens=1, max_tokens=True) == "max_tokens=True must be a whole number"


def test_half_a_character_is_refused_wherever_it_stands():
    sentence = r"'a\ud800' holds half a character (a lone surrogate): take it out"
    assert refusal(**{"a\ud800": 1}) == refusal(stop="a\ud800") == sentence
    assert refusal(stream=True, stream_options={"a\ud800": 1}) == sentence
    assert refusal(ChatBody, messages=[{**MESSAGES[0], "a\ud800": 1}]) == sentence


NEUTRAL = REQUESTS["unless they ask for nothing"]


def test_what_asks_for_nothing_is_taken_and_anything_else_of_the_kind_is_not():
    for kind in SCHEMAS:
        asked = read(
            kind, **NEUTRAL, metadata={"a": "b"}, prompt_cache_key="k", safety_identifier=1, store=True, priority=1
        )
        assert (asked.generation, [*asked.unknown]) == ({}, [])
        assert read(kind, **dict.fromkeys(NEUTRAL)).generation == {}
        for name in NEUTRAL:
            wrong = {"logprobs": "x"}.get(name, [[7]])
            assert refusal(kind, **{name: wrong}).startswith(name)


def test_the_best_of_as_many_answers_as_are_told_asks_for_nothing():
    asked = read(CompletionBody, best_of=2, n=2)
    assert (asked.n, [*asked.unknown]) == (2, [])
    for own in ({"n": 2}, {}, {"n": True, "best_of": True}):
        assert refusal(CompletionBody, **{"best_of": 3, **own}).startswith("best_of")


def test_a_model_that_cannot_echo_names_the_field_that_was_given():
    with pytest.raises(UserError, match=r"^echo is not supported"):
        diffusion_fields(read(ChatBody, echo=True).generation, 10)


def test_known_fields_of_a_common_server_are_heeded_refused_or_without_influence():
    """Fields of vLLM's requests and OpenAI's, as their packages list them, are none of them unknown here."""
    names = {*REQUESTS["names"].split()}
    known = {*ChatBody.model_fields, *ChatBody.ignored, *ChatBody.not_supported}
    assert not names - known


def test_unknown_fields_pass_and_are_told_by_name_unless_the_server_is_strict():
    part = {"type": "text", "text": "a", "x": 1}
    given = {"messages": [{"role": "user", "content": [part], "y": None, "z": 2}], "chat_id": "c", "temprature": 1}
    asked = read(ChatBody, **given, stream=True, stream_options={"include_obfuscation": True, "other": None})
    assert {*asked.unknown} == {
        *("chat_id", "temprature", "messages.z", "messages.content.x", "stream_options.include_obfuscation")
    }
    strict = Schema(ChatBody, "m", {"steps": int}, is_strict=True)
    with pytest.raises(ApiError) as caught:
        strict.read(json.dumps(given).encode())
    assert (caught.value.status, caught.value.param) == (400, "chat_id")
    assert "besides OpenAI's fields there are steps" in caught.value.message
    assert strict.read(json.dumps({"messages": MESSAGES, "stream_options": {}}).encode())


def test_streams_that_ask_for_nothing_say_no_usage():
    obfuscated = read(stream=True, stream_options={"include_obfuscation": False, "continuous_usage_stats": False})
    assert [*obfuscated.unknown] == []
    assert not read(stream_options=None).stream_options.include_usage


def test_numbers_may_be_written_with_a_point():
    asked = read(
        prompt=[1.0, 2], max_tokens=8.0, n=2.0, seed=3.0, top_k=4.0, steps=5.0, stop_token_ids=[6.0], min_tokens=1.0
    )
    assert asked.prompt == [(1, 2)]
    assert asked.n == 2
    assert asked.generation == {
        "max_tokens": 8, "seed": 3, "top_k": 4, "steps": 5, "stop_token_ids": [6], "min_tokens": 1
    }  # fmt: skip
    assert "must be a whole number" in refusal(max_tokens=8.5)


def test_a_least_length_is_told_where_something_could_end_the_answer_before():
    assert read(min_tokens=4).generation == {"min_tokens": 4}
    assert read(min_tokens=4, ignore_eos=True, max_tokens=8).generation == {"ignore_eos": True, "max_tokens": 8}
    assert read(min_tokens=0, stop_token_ids=[]).generation == {}


def test_a_request_may_leave_out_its_model():
    assert SCHEMAS[CompletionBody].read(b'{"prompt": "a", "model": ""}').num_choices == 1
    assert SCHEMAS[CompletionBody].read(b'{"prompt": "a"}').num_choices == 1


def test_a_sentence_shows_no_more_of_a_value_than_tells_it():
    assert refusal(stop=[""], max_tokens="a" * 58).startswith(f"max_tokens='{'a' * 58}' must be")
    assert refusal(max_tokens="a" * 59).startswith(f"max_tokens='{'a' * 56}... must be")


def test_messages_as_clients_send_them():
    asked = read(ChatBody, messages=REQUESTS["messages as clients send them"])
    assert [*asked.unknown] == []
    assert asked.turns == REQUESTS["turns of them"]


def test_tools_that_are_not_called_go_to_the_template():
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert read(ChatBody, tools=tools, tool_choice="none").form.variables == {"tools": tools}
    assert read(ChatBody, tools=None, tool_choice="none").form.variables == {}
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}):
        sentence = refusal(ChatBody, tools=tools, **choice)
        assert sentence.startswith("tools=[{")
        assert sentence.endswith("leave it out, or set tool_choice='none'")
    assert (
        refusal(ChatBody, tools=["add"], tool_choice="none")
        == "tools[0]='add' is wrong, tools must be a list of objects"
    )


def test_variables_of_a_template():
    asked = read(
        ChatBody, chat_template_kwargs={"a": 1, "enable_thinking": True}, reasoning_effort="none", documents=[{}]
    )
    assert asked.variables == {"a": 1, "enable_thinking": True, "reasoning_effort": "none", "documents": [{}]}
    assert read(ChatBody, reasoning_effort="low").variables == {"enable_thinking": True, "reasoning_effort": "low"}
    assert refusal(ChatBody, reasoning_effort="weird").startswith("reasoning_effort='weird' is wrong")
    assert "'messages'" in refusal(ChatBody, chat_template_kwargs={"messages": []})
    assert "both true" in refusal(ChatBody, continue_final_message=True, add_generation_prompt=True)


def test_a_text_among_others_may_be_empty():
    assert read(prompt=["", "a", [1]]).prompt == ["", "a", (1,)]
    assert refusal(prompt=["a", []]).startswith("prompt[1]=[] is wrong")
    assert refusal(stop=[5]).startswith("stop[0]=5 is wrong")
