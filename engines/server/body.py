"""Bodies of ``/v1/completions`` and ``/v1/chat/completions``, read field by field; whatever has no effect is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from engines.server.errors import ApiError, refused
from engines.server.protocol import Kind
from engines.strict_json import RepeatedKeyError, unique

MOST_CHOICES = 128
"""Answers to one request: ``n`` for each prompt."""
MOST_STOPS, LONGEST_STOP = 4, 256

Prompt = str | tuple[int, ...]

_SAID: Mapping[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}

_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""Fields of OpenAI's API and vLLM's that are not implemented, each with the values that ask for nothing."""
_ABOUT_THE_CALLER = ("user", "metadata", "safety_identifier", "prompt_cache_key")

T = TypeVar("T", int, float, bool, str)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """``prompts`` has one entry, a conversation is in ``messages`` instead. ``generation`` holds what was given of
    ``max_tokens``, ``temperature``, ``top_p``, ``top_k``, ``seed``, ``ignore_eos`` and the engine's options."""

    prompts: tuple[Prompt, ...] = ()
    messages: tuple[Mapping[str, str], ...] = ()
    generation: Mapping[str, Any]
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    timeout_s: float | None = None

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    @property
    def num_choices(self) -> int:
        return self.n * max(1, len(self.prompts))

    @property
    def ignores_eos(self) -> bool:
        return bool(self.generation.get("ignore_eos"))


def parse_json(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content, parse_constant=_no_number, object_pairs_hook=unique)
    except RepeatedKeyError as error:
        raise refused(f"the body is not clear, {error}: keep one") from None
    except UnicodeDecodeError:
        raise refused("the body is not UTF-8 text: encode it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise refused(f"the body is not JSON ({error.msg} at character {error.pos}): send one JSON object") from None
    except RecursionError:
        raise refused("the body is JSON nested too deeply to be read: flatten it") from None
    except _NoNumber as error:
        raise refused(f"the body has a number that cannot be read ({error} is no JSON): send finite numbers") from None
    except ValueError:  # Python reads no number of thousands of digits
        raise refused("the body has a number of too many digits: send finite numbers") from None
    if not isinstance(found, dict):
        raise refused(f"the body is {_named(found)}: send one JSON object")
    return found


class _NoNumber(ValueError):
    pass


def _no_number(name: str) -> Any:
    raise _NoNumber(name)


def read_completion(body: Mapping[str, Any], served: str, options: Mapping[str, Kind]) -> Asked:
    fields = _Fields(body)
    _check_model(fields, served)
    prompts = _prompts(fields.left.pop("prompt", None))
    lengths = {"max_tokens": fields.take("max_tokens", int, least=1)}
    return _asked(fields, options, lengths, prompts=prompts)


def read_chat(body: Mapping[str, Any], served: str, options: Mapping[str, Kind]) -> Asked:
    fields = _Fields(body)
    _check_model(fields, served)
    messages = _messages(fields.left.pop("messages", None))
    old, new = (fields.take(name, int, least=1) for name in ("max_tokens", "max_completion_tokens"))
    if old is not None and new is not None and old != new:
        raise refused(
            f"max_tokens={old} and max_completion_tokens={new} are two lengths of one answer: give one of them",
            "max_tokens",
        )
    return _asked(fields, options, {"max_tokens": new if old is None else old}, messages=messages)


def _asked(fields: _Fields, options: Mapping[str, Kind], lengths: Mapping[str, Any], **what: Any) -> Asked:
    generation = {
        **lengths,
        "temperature": fields.take("temperature", float, least=0),
        "top_p": fields.take("top_p", float),
        "top_k": fields.take("top_k", int),
        "seed": fields.take("seed", int),
        "ignore_eos": fields.take("ignore_eos", bool),
        **{name: fields.take(name, kind) for name, kind in options.items()},
    }
    if generation["top_k"] in (0, -1):  # what vLLM's clients send for all tokens
        generation["top_k"] = None
    stream = fields.take("stream", bool) or False
    asked = Asked(
        generation={name: value for name, value in generation.items() if value is not None},
        n=fields.take("n", int, least=1) or 1,
        stop=_stops(fields.left.pop("stop", None)),
        stream=stream,
        include_usage=_include_usage(fields.left.pop("stream_options", None), stream=stream),
        return_token_ids=fields.take("return_token_ids", bool) or False,
        timeout_s=_timeout(fields),
        **what,
    )
    if asked.num_choices > MOST_CHOICES:
        raise refused(
            f"n={asked.n} for {max(1, len(asked.prompts))} prompts makes {asked.num_choices} answers, more than "
            f"{MOST_CHOICES}, the most that is taken: send several requests",
            "n",
        )
    fields.refuse_rest(options)
    return asked


class _Fields:
    """What is left of a body; a field that is null was not given."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, kind: type[T], *, least: float | None = None) -> T | None:
        if name not in self.left:
            return None
        value = self.left.pop(name)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = _as_float(name, value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise refused(f"{name}={_shown(value)} must be {_SAID[kind]}", name)
        if least is not None and isinstance(value, int | float) and value < least:
            raise refused(f"{name}={_shown(value)} must be at least {least}", name)
        return value

    def refuse_rest(self, options: Mapping[str, Kind]) -> None:
        for name, value in self.left.items():
            if name in _ABOUT_THE_CALLER:
                continue
            if name not in _WITHOUT_EFFECT:
                own = f"; besides OpenAI's fields there are {', '.join(options)}" if options else ""
                raise refused(f"{name}={_shown(value)} is unknown: leave it out{own}", name)
            if not _is_neutral(name, value):
                raise refused(f"{name}={_shown(value)} is not supported: leave it out", name)


def _is_neutral(name: str, value: Any) -> bool:
    """In JSON 0 and false are two things."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in _WITHOUT_EFFECT[name])


def _as_float(name: str, value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise refused(f"{name}={_shown(value)} is too large: give a smaller number", name) from None


def _check_model(fields: _Fields, served: str) -> None:
    model = fields.take("model", str)
    if model is None:
        raise refused(f"model is missing: give model={served!r}", "model")
    if model != served:
        raise ApiError(
            404, f"model={_shown(model)} is not served here: use {served!r}", param="model", code="model_not_found"
        )


def _prompts(given: Any) -> tuple[Prompt, ...]:
    """A text, token ids, or a list of either."""
    if given is None:
        raise refused("prompt is missing: give a text, or a list of token ids", "prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(each) is int for each in given)):
        return (_prompt(given),)
    if not isinstance(given, list):
        raise refused(f"prompt is {_named(given)}: give a text, a list of token ids, or a list of these", "prompt")
    if not given:
        raise refused("prompt is an empty list: give at least one text or token id", "prompt")
    if len(given) > MOST_CHOICES:
        raise refused(
            f"prompt has {len(given)} entries, more than {MOST_CHOICES}, the most that is taken: send several requests",
            "prompt",
        )
    return tuple(_prompt(each) for each in given)


def _prompt(given: Any) -> Prompt:
    if isinstance(given, str):
        if not given:
            raise refused("prompt is empty: give some text", "prompt")
        return given
    if isinstance(given, list) and all(type(each) is int for each in given):
        if not given:
            raise refused("prompt is empty: give at least one token id", "prompt")
        return tuple(given)
    raise refused(f"prompt holds {_named(given)}: give a text, a list of token ids, or a list of these", "prompt")


def _messages(given: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(given, list) or not given:
        what = "missing" if given is None else "empty" if given == [] else _named(given)
        raise refused(f"messages is {what}: give a list of at least one message", "messages")
    return tuple(_message(place, each) for place, each in enumerate(given))


def _message(place: int, given: Any) -> Mapping[str, str]:
    where = f"messages[{place}]"
    if not isinstance(given, dict):
        raise refused(f"{where} is {_named(given)}: give an object with role and content", "messages")
    fields = {name: value for name, value in given.items() if value is not None}
    if "role" not in fields or "content" not in fields:
        missing = "role" if "role" not in fields else "content"
        raise refused(f"{where} has no {missing}: give an object with role and content", "messages")
    role, content = fields.pop("role"), fields.pop("content")
    for name, value in fields.items():
        raise refused(f"{where}: {name}={_shown(value)} has no effect here: leave it out", "messages")
    if isinstance(content, list):
        content = "".join(_part(where, part) for part in content)
    if not isinstance(content, str) or not isinstance(role, str):
        wrong = "role" if not isinstance(role, str) else "content"
        raise refused(f"{where} has a {wrong} that is no text: give a text", "messages")
    return {"role": role, "content": content}


def _part(where: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else None
    raise refused(f"{where} has a part of type {_shown(kind)}: only text is taken", "messages")


def _stops(given: Any) -> tuple[str, ...]:
    stops: Sequence[Any] = () if given is None else [given] if isinstance(given, str) else given
    if not isinstance(stops, list | tuple) or not all(isinstance(each, str) for each in stops):
        raise refused(f"stop is {_named(given)}: give a text or a list of texts", "stop")
    if len(stops) > MOST_STOPS:
        raise refused(f"stop has {len(stops)} texts, more than {MOST_STOPS}, the most that is taken", "stop")
    for each in stops:
        if not 1 <= len(each) <= LONGEST_STOP:
            raise refused(f"stop has a text of {len(each)} characters: give 1 to {LONGEST_STOP} of them", "stop")
    return tuple(stops)


def _include_usage(given: Any, *, stream: bool) -> bool:
    if given is None:
        return False
    if not stream:
        raise refused("stream_options has no effect without stream: leave it out, or set stream", "stream_options")
    if not isinstance(given, dict):
        raise refused(f"stream_options is {_named(given)}: give an object", "stream_options")
    fields = _Fields(given)
    include = fields.take("include_usage", bool) or False
    for name, value in fields.left.items():
        raise refused(f"stream_options: {name}={_shown(value)} is unknown: leave it out", "stream_options")
    return include


def _timeout(fields: _Fields) -> float | None:
    timeout_s = fields.take("timeout", float)
    if timeout_s is not None and not (0 < timeout_s < math.inf):
        raise refused(f"timeout={timeout_s:g} must be above 0 seconds", "timeout")
    return timeout_s


def _named(value: Any) -> str:
    if value is None:
        return "null"
    names: Mapping[type, str] = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
