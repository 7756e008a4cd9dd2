"""Bodies as they are read, without a server; refusals one by one are in test_app.py."""

from __future__ import annotations

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
def test_the_engine_is_told_what_was_given(fields: dict[str, Any], generation: dict[str, Any]) -> None:
    assert read(**fields).generation == read(ChatBody, **fields).generation == generation


def test_the_newer_name_of_an_answer_s_length() -> None:
    assert read(ChatBody, max_completion_tokens=4).generation == {"max_tokens": 4}
    assert read(ChatBody, max_completion_tokens=None, max_tokens=3).generation == {"max_tokens": 3}
    assert "max_completion_tokens=4 is unknown" in refusal(max_completion_tokens=4)


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


def test_what_asks_for_nothing_is_taken_and_anything_else_of_the_kind_is_not() -> None:
    assert read(**NEUTRAL, metadata={"a": "b"}, prompt_cache_key="k", safety_identifier=1).generation == {}
    assert read(**dict.fromkeys(NEUTRAL)).generation == {}
    for name in NEUTRAL:
        assert refusal(**{name: [7]}) == f"{name}=[7] is not supported: leave it out"


def test_a_sentence_shows_no_more_of_a_value_than_tells_it() -> None:
    assert refusal(zzz="a" * 58).startswith(f"zzz='{'a' * 58}' is unknown")
    assert refusal(zzz="a" * 59).startswith(f"zzz='{'a' * 56}... is unknown")
    own = "; besides OpenAI's fields there are steps, threshold, remasking"
    assert refusal(zzz=1) == f"zzz=1 is unknown: leave it out{own}"
    assert refusal(stream=True, stream_options={"zzz": 1}) == "stream_options.zzz=1 is unknown: leave it out"


def test_content_in_parts_is_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    asked = read(ChatBody, messages=[{"role": "system", "content": parts, "name": None}, *MESSAGES])
    assert isinstance(asked, ChatBody)
    assert asked.turns == [{"role": "system", "content": "ab"}, {"role": "user", "content": "a"}]
