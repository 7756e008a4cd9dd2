"""Bodies of ``/v1/completions`` and ``/v1/chat/completions``: schemas, and one formatter that says what is wrong in a sentence.

Whatever has no effect is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import AfterValidator, BeforeValidator, FailFast, Field, model_validator

from engines.server.errors import ApiError, refused
from engines.server.protocol import Kind
from engines.strict_json import RepeatedKeyError, unique

MOST_CHOICES = 128
"""Answers to one request: ``n`` for each prompt."""
_MOST_FIELDS = 100
"""Fields of one object: an error is kept for each that is unknown."""

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
_ABOUT_THE_CALLER = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})

_SAID: Mapping[str, str] = {
    "bool_type": "must be true or false",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "int_type": "must be a whole number",
    "less_than_equal": "must be at most {le:,}",
    "string_type": "must be a text",
}
"""What is said of a value whose field does not describe itself, by pydantic's type of error."""


class _Object(pydantic.BaseModel):
    """A JSON object; a field that is null was not given."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        if len(fields) > _MOST_FIELDS:
            raise refused(
                f"an object has {len(fields)} fields, more than {_MOST_FIELDS}, the most that is taken: send fewer"
            )
        return {name: value for name, value in fields.items() if value is not None}


def _are_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(each) is int for each in given)


def _prompt(given: Any) -> str | tuple[int, ...]:
    if isinstance(given, str) and given:
        return given
    if _are_ids(given):
        return tuple(given)
    raise ValueError


def _as_list(given: Any) -> Any:
    """A text or token ids alone as a list of one."""
    return [given] if isinstance(given, str) or _are_ids(given) else given


class _Part(pydantic.BaseModel):
    type: Literal["text"]
    text: str


class _Message(_Object):
    role: str
    content: Annotated[
        list[_Part],
        FailFast(),
        BeforeValidator(lambda given: [{"type": "text", "text": given}] if isinstance(given, str) else given),
    ]


class _StreamOptions(_Object):
    include_usage: bool = False


Prompt = Annotated[str | tuple[int, ...], pydantic.PlainValidator(_prompt)]
Count = Annotated[int, Field(ge=1, le=2**31)]


class _Body(_Object):
    """What both routes take."""

    model: str
    n: Count = 1
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]],
        FailFast(),
        Field(max_length=4, description="a text or a list of up to 4 texts, each of 1 to 256 characters"),
        BeforeValidator(_as_list),
    ] = []
    stream: bool = False
    stream_options: Annotated[_StreamOptions, Field(description="an object like {'include_usage': true}")] = (
        _StreamOptions()
    )
    return_token_ids: bool = False
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds."""
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: float | None = None
    # vLLM's clients send 0 or -1 for all tokens.
    top_k: Annotated[int, AfterValidator(lambda k: None if k in (0, -1) else k)] | None = None
    seed: int | None = None
    ignore_eos: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        left = {name: value for name, value in fields.items() if name not in _ABOUT_THE_CALLER}
        for name in (left.keys() & _WITHOUT_EFFECT.keys()) - cls.model_fields.keys():
            value = left.pop(name)
            if value is not None and not _is_neutral(name, value):
                raise refused(f"{name}={_shown(value)} is not supported: leave it out", name)
        return left

    @model_validator(mode="after")
    def _has_options_of_a_stream_alone(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise refused("stream_options has no effect without stream: leave it out, or set stream", "stream_options")
        return self

    @property
    def num_choices(self) -> int:
        return self.n

    @property
    def generation(self) -> dict[str, Any]:
        """What was given of how the engine generates, its own options included."""
        return self.model_dump(exclude=_OF_THE_REQUEST, exclude_none=True, exclude_unset=True)


class CompletionBody(_Body):
    prompt: Annotated[
        list[Prompt],
        FailFast(),
        Field(
            min_length=1,
            max_length=MOST_CHOICES,
            description=f"a text, a list of token ids, or a list of up to {MOST_CHOICES} of either, none of them empty",
        ),
        BeforeValidator(_as_list),
    ]

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompt)


class ChatBody(_Body):
    messages: Annotated[
        list[_Message],
        FailFast(),
        Field(
            min_length=1,
            description="a list of at least one message, each a role and a content: a text, or parts of type 'text'",
        ),
    ]
    max_completion_tokens: Count | None = None
    """The newer name of ``max_tokens``."""

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            sentence = f"max_tokens={old} and max_completion_tokens={new} are two lengths of one answer"
            raise refused(f"{sentence}: give one of them", "max_tokens")
        return self

    @property
    def generation(self) -> dict[str, Any]:
        given = super().generation
        newer = given.pop("max_completion_tokens", None)
        return given if newer is None else given | {"max_tokens": newer}

    @property
    def turns(self) -> Sequence[Mapping[str, str]]:
        return [{"role": each.role, "content": "".join(part.text for part in each.content)} for each in self.messages]


Asked = CompletionBody | ChatBody
_OF_THE_REQUEST = {
    "model",
    "prompt",
    "messages",
    "n",
    "stop",
    "stream",
    "stream_options",
    "return_token_ids",
    "timeout",
}


class Schema:
    """Reads bodies for a model called ``served``, which heeds ``options`` besides."""

    def __init__(self, kind: type[Asked], served: str, options: Mapping[str, Kind]) -> None:
        own: dict[str, Any] = {name: (each | None, None) for name, each in options.items()}
        self._kind: Any = pydantic.create_model(kind.__name__, __base__=kind, **own)
        self._served, self._options = served, options

    def read(self, content: bytes) -> Asked:
        body = _parse_json(content)
        model = body.get("model")
        if model is None:
            raise refused(f"model is missing: give model={self._served!r}", "model")
        if isinstance(model, str) and model != self._served:
            sentence = f"model={_shown(model)} is not served here: use {self._served!r}"
            raise ApiError(404, sentence, param="model", code="model_not_found")
        try:
            asked: Asked = self._kind.model_validate(body)
        except pydantic.ValidationError as error:
            raise self._refusal(error) from None
        return asked

    def _refusal(self, found: pydantic.ValidationError) -> ApiError:
        """The first error in a sentence: where it is, what is there, and what should be."""
        error = found.errors(include_url=False)[0]
        if error["type"] == "string_unicode":  # of a name too, which has no place of its own
            return refused(f"{_shown(error['input'])} holds half a character (a lone surrogate): take it out")
        field = str(error["loc"][0])
        place = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in error["loc"])[1:]
        value = _shown(error["input"])
        known = self._kind.model_fields.get(field)
        described = known.description if known is not None else None
        if error["type"] == "missing":
            said = f"{place} is missing: {field} must be {described}"
        elif error["type"] == "extra_forbidden":
            has_own = bool(self._options) and place == field
            own = f"; besides OpenAI's fields there are {', '.join(self._options)}" if has_own else ""
            said = f"{place}={value} is unknown: leave it out{own}"
        elif described is not None:
            said = f"{place}={value} is wrong, {field} must be {described}"
        else:
            said = f"{place}={value} {_SAID[error['type']].format(**error.get('ctx', {}))}"
        return refused(said, field)


def _parse_json(content: bytes) -> dict[str, Any]:
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
    except ValueError:  # Python reads no number of thousands of digits
        raise refused("the body has a number of too many digits: send finite numbers") from None
    if not isinstance(found, dict):
        raise refused(f"the body is {_shown(found)}: send one JSON object")
    return found


def _no_number(name: str) -> Any:
    raise refused(f"the body has a number that cannot be read ({name} is no JSON): send finite numbers")


def _is_neutral(name: str, value: Any) -> bool:
    """In JSON 0 and false are two things."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in _WITHOUT_EFFECT[name])


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or lists in lists in lists
        return "..."
    return text if len(text) <= 60 else text[:57] + "..."
