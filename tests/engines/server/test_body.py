"""Bodies as they are read, and refused, without a server."""

import json
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="needs the extra server: pydantic is not installed")

from engines.server.body import Asked, ChatBody, CompletionBody, Schema
from engines.server.errors import ApiError

SCHEMAS = {
    kind: Schema(kind, "m", {"steps": int, "threshold": float, "remasking": str}) for kind in (CompletionBody, ChatBody)
}
MESSAGES = [{"role": "user", "content": "a"}]


def read(kind: type[Asked] = CompletionBody, **fields: Any) -> Asked:
    given = {"prompt": "a"} if kind is CompletionBody else {"messages": MESSAGES}
    return SCHEMAS[kind].read(json.dumps({"model": "m", **given, **fields}).encode())


def refusal(kind: type[Asked] = CompletionBody, **fields: Any) -> str:
    with pytest.raises(ApiError) as caught:
        read(kind, **fields)
    return caught.value.message


def body(prompt: Any = "a", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, **fields}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (b"\xff", "the body is not UTF-8"),
        (b"[1]", "the body is [1]: send one JSON object"),
        (b"[" * 4000, "nested too deeply"),
        (b'{"prompt": "a", "prompt": "b"}', "the body is not clear, the key 'prompt' is given twice: keep one"),
        (b'{"max_tokens": %s}' % (b"9" * 4400), "the body has a number of too many digits: send finite numbers"),
        (b'{"model": "m", "prompt": "a", "temperature": NaN}', "NaN is no JSON"),
        ({"prompt": "a"}, "model is missing"),
        (body(""), "prompt[0]='' is wrong, prompt must be a text, a list of token ids, or a list of up to 128"),
        (body([]), "prompt=[] is wrong, prompt must be a text"),
        (body({"a": 1}), "prompt={'a': 1} is wrong"),
        (body([[1], "a", 2]), "prompt[2]=2 is wrong"),
        (body([[1], []]), "prompt[1]=[] is wrong"),
        (body(["a"] * 129), "is wrong, prompt must be a text, a list of token ids, or a list of up to 128"),
        (body([True]), "prompt[0]=True is wrong"),
        (body(max_tokens=0), "max_tokens=0 must be at least 1"),
        (body(max_tokens=1.5), "max_tokens=1.5 must be a whole number"),
        (body(max_tokens=True), "max_tokens=True must be a whole number"),
        (body(temperature=-1), "temperature=-1 must be at least 0"),
        (body(temperature="1"), "temperature='1' must be a number"),
        (body(temperature=10**400), "must be a number"),
        (b'{"model": "m", "prompt": "a", "timeout": 1e999}', "timeout=inf must be a finite number"),
        (body(n=0), "n=0 must be at least 1"),
        (body(["a", "b"], n=int("9" * 4300)), "must be at most 2,147,483,648"),
        (body(stop=[""]), "stop[0]='' is wrong, stop must be a text or a list of up to 4 texts, each of 1 to 256"),
        (body(stop=["a" * 257]), "stop must be a text or a list of up to 4 texts"),
        (body(stop=3), "stop=3 is wrong"),
        (body(stop=["a"] * 5), "stop must be a text or a list of up to 4 texts"),
        (body(stream_options={"include_usage": True}), "stream_options has no effect without stream"),
        (body(stream=True, stream_options={"x": 1}), "stream_options.x=1 is unknown: leave it out"),
        (body(stream=True, stream_options=1), "stream_options=1 is wrong, stream_options must be an object like"),
        (body(logprobs=1), "logprobs=1 is not supported"),
        (body(echo=True), "echo=True is not supported"),
        (body(echo=0), "echo=0 is not supported"),
        (body(presence_penalty=0.5), "presence_penalty=0.5 is not supported"),
        (
            body(temprature=1),
            "temprature=1 is unknown: leave it out; besides OpenAI's fields there are steps, threshold, remasking",
        ),
        (body(**dict.fromkeys(map(str, range(100)), 1)), "an object has 102 fields, more than 100"),
        (body(steps="2"), "steps='2' must be a whole number"),
        (body(timeout=0), "timeout=0 must be above 0"),
    ],
)
def test_refusals(given, sentence):
    content = given if isinstance(given, bytes) else json.dumps(given).encode()
    with pytest.raises(ApiError) as caught:
        SCHEMAS[CompletionBody].read(content)
    assert caught.value.status == 400
    assert sentence in caught.value.message


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (None, "messages is missing"),
        ([], "messages=[] is wrong, messages must be a list of at least one message"),
        ("hi", "messages='hi' is wrong"),
        ([{"role": "user"}], "messages[0].content is missing: messages must be a list of at least one message"),
        ([{"content": "a", "role": 1}], "messages[0].role=1 is wrong"),
        ([{"role": "user", "content": "a"}, 1], "messages[1]=1 is wrong"),
        ([{"role": "user", "content": 3}], "messages[0].content=3 is wrong"),
        ([{"role": "user", "content": "a", "name": "b"}], "messages[0].name='b' is unknown: leave it out"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type='image_url' is wrong"),
    ],
)
def test_refusals_of_conversations(messages, sentence):
    assert sentence in refusal(ChatBody, messages=messages)


@pytest.mark.parametrize(
    ("fields", "generation"),
    [
        ({}, {}),
        ({"stream": True, "stop": "x", "n": 2, "timeout": 1, "return_token_ids": True, "user": "u"}, {}),
        ({"top_k": 0, "temperature": None}, {}),
        ({"top_k": -1}, {}),
        ({"top_k": 1, "seed": 0, "temperature": 0}, {"top_k": 1, "seed": 0, "temperature": 0.0}),
        ({"steps": 3, "threshold": 1, "remasking": "x"}, {"steps": 3, "threshold": 1.0, "remasking": "x"}),
        ({"max_tokens": 1, "ignore_eos": False, "top_p": 1}, {"max_tokens": 1, "ignore_eos": False, "top_p": 1.0}),
    ],
)
def test_the_engine_is_told_what_was_given(fields, generation):
    assert read(**fields).generation == read(ChatBody, **fields).generation == generation


def test_what_is_not_asked_for():
    asked = read()
    assert (asked.n, asked.stop, asked.stream, asked.stream_options.include_usage) == (1, [], False, False)
    assert (asked.return_token_ids, asked.timeout, asked.ignore_eos) == (False, None, False)


def test_the_newer_name_of_an_answer_s_length():
    assert read(ChatBody, max_completion_tokens=4).generation == {"max_tokens": 4}
    assert read(ChatBody, max_completion_tokens=None, max_tokens=3).generation == {"max_tokens": 3}
    assert "max_completion_tokens=4 is unknown" in refusal(max_completion_tokens=4)
    assert read(ChatBody, max_completion_tokens=4, max_tokens=4).generation == {"max_tokens": 4}
    assert refusal(ChatBody, max_completion_tokens=0) == "max_completion_tokens=0 must be at least 1"
    assert refusal(ChatBody, max_completion_tokens=1, max_tokens=True) == "max_tokens=True must be a whole number"


def test_half_a_character_is_refused_wherever_it_stands():
    sentence = r"'a\ud800' holds half a character (a lone surrogate): take it out"
    assert refusal(**{"a\ud800": 1}) == refusal(stop="a\ud800") == sentence
    assert refusal(stream=True, stream_options={"a\ud800": 1}) == sentence
    assert refusal(ChatBody, messages=[{**MESSAGES[0], "a\ud800": 1}]) == sentence


NEUTRAL = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "min_p": 0.0,
    "min_tokens": 0,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "store": False,
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
}


def test_what_asks_for_nothing_is_taken_and_anything_else_of_the_kind_is_not():
    assert read(**NEUTRAL, metadata={"a": "b"}, prompt_cache_key="k", safety_identifier=1).generation == {}
    assert read(**dict.fromkeys(NEUTRAL)).generation == {}
    assert read(parallel_tool_calls=False, service_tier="default").generation == {}
    for name in NEUTRAL:
        assert refusal(**{name: [7]}) == f"{name}=[7] is not supported: leave it out"


def test_a_sentence_shows_no_more_of_a_value_than_tells_it():
    assert refusal(zzz="a" * 58).startswith(f"zzz='{'a' * 58}' is unknown")
    assert refusal(zzz="a" * 59).startswith(f"zzz='{'a' * 56}... is unknown")
    own = "; besides OpenAI's fields there are steps, threshold, remasking"
    assert refusal(zzz=1) == f"zzz=1 is unknown: leave it out{own}"
    assert refusal(stream=True, stream_options={"zzz": 1}) == "stream_options.zzz=1 is unknown: leave it out"


def test_content_in_parts_is_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    asked = read(ChatBody, messages=[{"role": "system", "content": parts, "name": None}, *MESSAGES])
    assert isinstance(asked, ChatBody)
    assert asked.turns == [{"role": "system", "content": "ab"}, {"role": "user", "content": "a"}]
