"""Bodies of ``/v1/completions`` and ``/v1/chat/completions``: schemas, and one formatter that says in a sentence what is wrong.

Each field of OpenAI's API and vLLM's is one of four kinds. It is heeded (a field of a class here), or has no influence on
the answer (``ignored_fields``). Or it is not supported (``refused_fields``, refused unless its value asks for nothing), or unknown
(counted and ignored, or refused by a strict server).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

import pydantic
import yaml
from pydantic import AfterValidator, BeforeValidator, FailFast, Field, model_validator

from engines.ar.sampling import MOST_LOGPROBS
from engines.data import RepeatedKeyError, unique
from engines.models.chat import PromptForm
from engines.server.errors import ApiError, refusal
from engines.server.protocol import Kind

MOST_STOPS, LONGEST_STOP = 1000, 1024
"""Most stop texts, or stop ids, of a request, and most characters of a stop text."""
MOST_BAD_WORDS = 128
LONGEST_ID = 256
"""Most characters of a request's own id."""
_MOST_FIELDS = 100
"""Most fields of one object, unknown ones included."""
SEEDS = 2**63
"""Seeds are whole numbers from -SEEDS to SEEDS - 1, as in vLLM."""

# ---- fields that are not heeded ---------------------------------------------------------------

_FIELDS = yaml.safe_load(Path(__file__).with_name("fields.yaml").read_text(encoding="utf-8"))
Unsupported = tuple[str, tuple[Any, ...]]
"""Why a field is refused, and its values that ask for nothing."""


def ignored_fields(kind: str) -> frozenset[str]:
    """Return the fields of such objects that have no influence on the answer."""
    return frozenset(_FIELDS["ignored"][kind])


def refused_fields(kind: str) -> Mapping[str, Unsupported]:
    """Return the fields of such objects that are refused."""
    reasons = _FIELDS["not_supported"][kind].items()
    return {name: (reason, tuple(neutral)) for reason, fields in reasons for name, neutral in fields.items()}


_DIFFUSION = frozenset(_FIELDS["diffusion"])
"""Settings of diffusion LLMs. Each engine heeds only some of them."""

# ---- values -----------------------------------------------------------------------------------

_SAID: Mapping[str, str] = _FIELDS["said"]
"""pydantic's type of error -> what we say of a value whose field has no description."""


def _as_whole_number(value: Any) -> Any:
    """Return 8 for 8.0, which are the same number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_id_list(value: Any) -> bool:
    """Whether a value is a list of whole numbers. Long lists need no loop in Python, unless they have numbers such as 8.0."""
    if not isinstance(value, list):
        return False
    kinds = {*map(type, value)}
    return kinds == {int} or (float in kinds and all(type(_as_whole_number(item)) is int for item in value))


def _as_prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if _is_id_list(value):
        return tuple(map(int, value))
    raise ValueError


def _as_list(value: Any) -> Any:
    """Return a single text as a list of one."""
    return [value] if isinstance(value, str) else value


def _as_prompts(value: Any) -> Any:
    """Return a single text, or single token ids, as a list of one. In a list, an empty text has only special ids, as in vLLM."""
    return [value] if _is_id_list(value) or (isinstance(value, str) and value) else value


Prompt = Annotated[str | tuple[int, ...], pydantic.PlainValidator(_as_prompt)]
Whole = Annotated[int, BeforeValidator(_as_whole_number)]
Ids = list[Annotated[Whole, Field(ge=0)]]
Count = Annotated[Whole, Field(ge=1, le=2**31)]


class Object(pydantic.BaseModel):
    """A JSON object; a null field counts as not given. Unknown fields are kept, to be counted."""

    model_config = pydantic.ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields without influence on the answer."""
    not_supported: ClassVar[Mapping[str, Unsupported]] = {}
    _of_the_engine: ClassVar[frozenset[str]] = frozenset()
    """Fields that say how the engine generates."""

    @model_validator(mode="before")
    @classmethod
    def _without_neutral_fields(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        if len(fields) > _MOST_FIELDS:
            raise refusal(
                f"an object has {len(fields)} fields, more than {_MOST_FIELDS}, the most that is taken: send fewer"
            )
        kept = {name: value for name, value in fields.items() if value is not None and name not in cls.ignored}
        for name in (kept.keys() & cls.not_supported.keys()) - cls.model_fields.keys():
            check_neutral(name, kept.pop(name), cls.not_supported[name])
        return kept

    @classmethod
    def name_of(cls, field: str) -> str:
        """Return a field's name in requests, which differs between routes."""
        return cls.model_fields[field].alias or field

    @property
    def unknown(self) -> Iterator[str]:
        """Names of unknown fields. Those of nested objects follow the object's name and a dot."""
        yield from self.model_extra or ()
        for name in type(self).model_fields:
            value = getattr(self, name)
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, Object):
                    yield from (f"{self.name_of(name)}.{inner}" for inner in item.unknown)


# ---- messages ---------------------------------------------------------------------------------


class _TextPart(Object):
    ignored = ignored_fields("parts")
    type: Literal["text", "input_text", "output_text"] = "text"
    text: str


def _as_parts(value: Any) -> Any:
    """Turn each text, alone or among parts, into a part."""
    parts = [value] if isinstance(value, str) else value
    return [{"text": part} if isinstance(part, str) else part for part in parts] if isinstance(parts, list) else value


def _as_tool_calls(value: Any) -> list[dict[str, Any]]:
    """Return calls as chat templates read them, with an object of arguments for each JSON text, as in vLLM."""
    try:
        calls = [{**call, "function": dict(call["function"])} for call in value]
        for function in (call["function"] for call in calls):
            arguments = function.get("arguments") or {}
            function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(function["name"], str) or not isinstance(function["arguments"], dict):
                raise TypeError
    except (KeyError, TypeError, ValueError, RecursionError):
        raise refusal(
            f"tool_calls={short_text(value)} is wrong: give a list of objects, each with a function of a name and of arguments, "
            "which are the JSON text of an object",
            "messages",
        ) from None
    return calls


class _Message(Object):
    ignored = ignored_fields("messages")
    not_supported: ClassVar = refused_fields("messages")
    role: str
    content: Annotated[list[_TextPart], FailFast(), BeforeValidator(_as_parts)]
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The older name of ``reasoning``."""
    tool_calls: Annotated[list[dict[str, Any]], pydantic.PlainValidator(_as_tool_calls)] = []
    tool_call_id: str = ""

    @model_validator(mode="before")
    @classmethod
    def _has_content(cls, fields: Any) -> Any:
        """An assistant's message may have none, as one that called a tool; a role is told before what it says."""
        if isinstance(fields, dict) and fields.get("role") == "assistant" and fields.get("content") is None:
            return {**fields, "content": ""}
        return fields

    @property
    def turn(self) -> Mapping[str, Any]:
        """The message as a chat template reads it."""
        turn: dict[str, Any] = {"role": self.role, "content": "\n".join(part.text for part in self.content)}
        reasoning = self.reasoning or self.reasoning_content
        if self.name is not None:
            turn["name"] = self.name
        if reasoning is not None and self.role == "assistant":
            turn |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if self.tool_calls:
            turn["tool_calls"] = self.tool_calls
        if self.tool_call_id:
            turn["tool_call_id"] = self.tool_call_id
        return turn


Messages = Annotated[
    list[_Message],
    FailFast(),
    Field(
        min_length=1,
        description="a list of at least one message, each a role and a content: a text, or parts of type 'text'",
    ),
]


class Conversation(Object):
    """Messages, and how they become a prompt."""

    messages: Messages
    add_generation_prompt: bool = True
    """Whether the prompt ends with the header of an assistant's message."""
    continue_final_message: bool = False
    """Whether the answer continues the last message."""
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(description="an object of the chat template's own variables")
    ] = {}
    tools: Annotated[list[dict[str, Any]], FailFast(), Field(description="a list of objects")] = []
    """Tools that the chat template tells the model of; no answer is read for calls of them."""

    @model_validator(mode="after")
    def _has_one_template(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise refusal(
                "continue_final_message and add_generation_prompt are both true, the latter unless it is given: an answer goes on "
                "within the last message or begins one, set add_generation_prompt=false",
                "continue_final_message",
            )
        reserved = sorted(self.chat_template_kwargs.keys() & {"chat_template", "messages", "tokenize", "tools"})
        if reserved:
            raise refusal(
                f"chat_template_kwargs has {reserved[0]!r}, which is no variable of a request's: leave it out",
                "chat_template_kwargs",
            )
        return self

    @property
    def role(self) -> str:
        """The role that the answer has."""
        return "assistant" if self.add_generation_prompt else self.messages[-1].role

    @property
    def turns(self) -> Sequence[Mapping[str, Any]]:
        return [message.turn for message in self.messages]

    @property
    def variables(self) -> Mapping[str, Any]:
        """Variables of the chat template beside the conversation."""
        return self.chat_template_kwargs

    @property
    def form(self) -> PromptForm:
        variables = {**self.variables, "tools": self.tools} if self.tools else self.variables
        return PromptForm(self.add_generation_prompt, self.continue_final_message, variables)


# ---- bodies -----------------------------------------------------------------------------------


class _StreamOptions(Object):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Whether every chunk has the usage so far, if usage is asked for at all."""

    @model_validator(mode="before")
    @classmethod
    def _without_obfuscation(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("include_obfuscation") is False:
            return {name: value for name, value in fields.items() if name != "include_obfuscation"}
        return fields


def _none_if(neutral: Any) -> AfterValidator:
    """Return a validator that treats the ``neutral`` value, which asks for nothing, as not given."""
    return AfterValidator(lambda value: None if value == neutral else value)


def _as_biases(value: Any) -> Any:
    """Return id -> bias, cut to at most 100 and at least -100, as in vLLM."""
    if not isinstance(value, dict):
        raise ValueError
    biases = {}
    for token, bias in value.items():
        if not token.isdecimal() or isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError
        biases[int(token)] = float(min(100.0, max(-100.0, bias)))
    return biases


NumLogprobs = Annotated[
    Annotated[Whole, Field(ge=0, le=MOST_LOGPROBS)] | None,
    BeforeValidator(lambda value: {True: 1, False: None}[value] if isinstance(value, bool) else value),
]
"""How many of the likeliest tokens to tell for each place; true means 1, false none."""


class _Sampling(Object):
    """How the tokens of an answer are chosen. Given fields reach ``ServedModel.generation`` by their names, and an engine
    refuses those that it does not heed."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # vLLM's clients send 0 or -1 for all tokens.
    top_k: Annotated[Whole, AfterValidator(lambda k: None if k in (0, -1) else k)] | None = None
    seed: Annotated[Whole, Field(ge=-SEEDS, le=SEEDS - 1)] | None = None
    """-1 means no seed."""
    min_p: Annotated[float, Field(ge=0, le=1), _none_if(0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0), _none_if(1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), _none_if(0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2), _none_if(0)] | None = None
    logit_bias: Annotated[
        dict[int, float] | None,
        pydantic.PlainValidator(_as_biases),
        _none_if({}),
        Field(description="an object of token ids, as texts, each with a number"),
    ] = None
    allowed_token_ids: Annotated[
        Ids, FailFast(), Field(min_length=1, description="a list of at least one token id")
    ] = []
    bad_words: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]],
        FailFast(),
        Field(max_length=MOST_BAD_WORDS, description=f"a list of up to {MOST_BAD_WORDS} texts, none of them empty"),
    ] = []
    prompt_logprobs: NumLogprobs = None
    """How many of the likeliest tokens to tell for each place of the prompt."""


class _Body(_Sampling):
    """The fields that both routes take."""

    ignored = ignored_fields("requests")
    not_supported = refused_fields("requests")

    model: str = ""
    """Empty for the served model."""
    n: Count = 1
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    """The newer name of ``max_tokens``."""
    min_tokens: Annotated[Whole, Field(ge=0, le=2**31)] = 0
    """Number of tokens before which neither an end of text nor a stop ends the answer."""
    ignore_eos: bool = False
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]],
        FailFast(),
        Field(
            max_length=MOST_STOPS,
            description=f"a text or a list of up to {MOST_STOPS:,} texts, each of 1 to {LONGEST_STOP:,} characters",
        ),
        BeforeValidator(_as_list),
    ] = []
    stop_token_ids: Annotated[
        Ids, FailFast(), Field(max_length=MOST_STOPS, description=f"a list of up to {MOST_STOPS:,} token ids")
    ] = []
    include_stop_str_in_output: bool = False
    """Whether the stop, a text or a token, is part of the answer's text."""
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    """Whether a prompt gets the special tokens that its tokenizer adds; for None the route decides."""
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1, le=SEEDS - 1)] | None = None
    truncation_side: Annotated[Literal["left", "right"], Field(description="'left' or 'right', which is cut off")] = (
        "left"
    )
    stream: bool = False
    stream_options: Annotated[_StreamOptions, Field(description="an object like {'include_usage': true}")] = (
        _StreamOptions()
    )
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Whether log probabilities name tokens by their ids."""
    echo: bool = False
    """Whether the answer's text begins with the prompt's, or the last message's."""
    request_id: Annotated[str, Field(max_length=LONGEST_ID)] | None = None
    """The answer's id, which we prefix with the kind of answer."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds until the answer must be complete."""

    @model_validator(mode="before")
    @classmethod
    def _without_best_of_as_many(cls, fields: Any) -> Any:
        """Leave out a ``best_of`` that equals ``n``: the best n of n answers are all of them."""
        if isinstance(fields, dict) and type(fields.get("best_of")) is int and fields["best_of"] == fields.get("n"):
            return {name: value for name, value in fields.items() if name != "best_of"}
        return fields

    @model_validator(mode="after")
    def _asks_for_one_thing(self) -> Self:
        if "stream_options" in self.model_fields_set and self.stream_options.model_fields_set and not self.stream:
            raise refusal("stream_options has no effect without stream: leave it out, or set stream", "stream_options")
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            sentence = f"max_tokens={old} and max_completion_tokens={new} are two lengths of one answer"
            raise refusal(f"{sentence}: give one of them", "max_tokens")
        if self.length is not None and self.min_tokens > self.length:
            limit = f"{self.name_of('max_tokens')}={self.length}"
            raise refusal(f"min_tokens={self.min_tokens} is more than {limit}: lower it", "min_tokens")
        if self.prompt_logprobs is not None and self.stream:
            raise refusal(
                f"prompt_logprobs={self.prompt_logprobs} are not told in a stream: leave out one of the two",
                "prompt_logprobs",
            )
        return self

    @property
    def num_choices(self) -> int:
        return self.n

    @property
    def length(self) -> int | None:
        """Most tokens of an answer; None if the request does not say."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def generation(self) -> dict[str, Any]:
        """The given fields about how the engine generates, its own options included."""
        fields = self.model_dump(include=set(self._of_the_engine), exclude_none=True, exclude_unset=True)
        if self.length is not None:
            fields["max_tokens"] = self.length
        if not self.min_tokens or self.ignore_eos:  # without ends, a least length has no effect
            fields.pop("min_tokens", None)
        if not self.stop_token_ids:
            fields.pop("stop_token_ids", None)
        if not self.bad_words:
            fields.pop("bad_words", None)
        if self.num_logprobs is not None:
            fields["logprobs"] = self.num_logprobs
        if self.echo:
            fields["echo"] = True
        if self.num_prompt_logprobs is not None:
            fields["prompt_logprobs"] = self.num_prompt_logprobs
        return fields

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell beside each token of an answer; None without log probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell for each place of the prompt; an echo tells them too, as in vLLM."""
        return self.prompt_logprobs

    _of_the_engine: ClassVar[frozenset[str]] = frozenset(
        {*_Sampling.model_fields, "ignore_eos", "min_tokens", "stop_token_ids"}
    )


class CompletionBody(_Body):
    max_tokens: Annotated[Whole, Field(ge=0, le=2**31)] | None = None
    """0 with ``echo`` asks for the prompt alone."""
    logprobs: NumLogprobs = None
    prompt: Annotated[
        list[Prompt],
        FailFast(),
        Field(
            min_length=1,
            description="a text, a list of token ids, or a list of either; ids, and a text alone, must not be empty",
        ),
        BeforeValidator(_as_prompts),
    ]

    @model_validator(mode="after")
    def _has_an_answer(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise refusal("max_tokens=0 must be at least 1, or echo true", "max_tokens")
        return self

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs

    @property
    def generation(self) -> dict[str, Any]:
        return super().generation | ({"max_tokens": 1} if self.length == 0 else {})


class ChatBody(Conversation, _Body):
    logprobs: bool = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=MOST_LOGPROBS)] = 0
    documents: Annotated[list[dict[str, Any]] | None, Field(description="a list of objects")] = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        Field(description="none, minimal, low, medium, high, xhigh or max"),
    ] = None
    """A variable of the chat template, as ``documents`` is."""

    @model_validator(mode="before")
    @classmethod
    def _calls_no_tool(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("tools") and fields.get("tool_choice") != "none":
            sentence = f"tools={short_text(fields['tools'])} is not supported, no tool is called here"
            raise refusal(f"{sentence}: leave it out, or set tool_choice='none'", "tools")
        return fields

    @model_validator(mode="after")
    def _has_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise refusal(
                f"top_logprobs={self.top_logprobs} has no effect without logprobs: set it true", "top_logprobs"
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        is_echoed = self.echo and not self.stream
        return self.top_logprobs if self.prompt_logprobs is None and is_echoed else self.prompt_logprobs

    @property
    def variables(self) -> Mapping[str, Any]:
        variables = dict(self.chat_template_kwargs)
        if self.documents is not None:
            variables["documents"] = self.documents
        if self.reasoning_effort is not None:
            variables.setdefault("enable_thinking", self.reasoning_effort != "none")
            variables["reasoning_effort"] = self.reasoning_effort
        return variables


AnswerBody = CompletionBody | ChatBody


Body = TypeVar("Body", bound=Object)


class Schema(Generic[Body]):
    """Reads bodies for ``model``, which also heeds ``options``. A strict schema refuses unknown fields."""

    def __init__(self, kind: type[Body], model: str, options: Mapping[str, Kind], *, is_strict: bool = False) -> None:
        own: dict[str, Any] = {name: ((Whole if each is int else each) | None, None) for name, each in options.items()}
        self._kind: Any = pydantic.create_model(kind.__name__, __base__=kind, **own)
        self._kind.not_supported = {
            **kind.not_supported,
            **dict.fromkeys(_DIFFUSION - options.keys(), ("this model is not decoded by it", ())),
        }
        self._kind._of_the_engine = kind._of_the_engine | options.keys()
        self._served, self._options, self._is_strict = model, options, is_strict

    def read(self, content: bytes) -> Body:
        fields = _parse_json(content)
        model = fields.get("model")
        if isinstance(model, str) and model not in ("", self._served):
            sentence = f"model={short_text(model)} is not served here: use {self._served!r}"
            raise ApiError(404, sentence, param="model", code="model_not_found")
        try:
            body: Body = self._kind.model_validate(fields)
        except pydantic.ValidationError as error:
            raise self._refusal(error) from None
        if self._is_strict and (name := next(body.unknown, None)) is not None:
            hint = f"; besides OpenAI's fields there are {', '.join(self._options)}" if self._options else ""
            raise refusal(f"{name} is unknown: leave it out{hint}", name)
        return body

    def _refusal(self, validation: pydantic.ValidationError) -> ApiError:
        """Return the first error as a sentence: its place, the value there, and the value that should be there."""
        error = validation.errors(include_url=False)[0]
        if error["type"] == "string_unicode":  # also for a field's name, which has no place of its own
            return refusal(f"{short_text(error['input'])} holds half a character (a lone surrogate): take it out")
        field = str(error["loc"][0])
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in error["loc"])[1:]
        value = short_text(error["input"])
        info = next((info for name, info in self._kind.model_fields.items() if field in (name, info.alias)), None)
        described = info.description if info is not None else None
        if error["type"] == "missing":
            sentence = f"{path} is missing: {field} must be {described}"
        elif described is not None:
            sentence = f"{path}={value} is wrong, {field} must be {described}"
        else:
            sentence = f"{path}={value} {_SAID[error['type']].format(**error.get('ctx', {}))}"
        return refusal(sentence, field)


def _parse_json(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content, parse_constant=_refuse_constant, object_pairs_hook=unique)
    except RepeatedKeyError as error:
        raise refusal(f"the body is not clear, {error}: keep one") from None
    except UnicodeDecodeError:
        raise refusal("the body is not UTF-8 text: encode it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise refusal(f"the body is not JSON ({error.msg} at character {error.pos}): send one JSON object") from None
    except RecursionError:
        raise refusal("the body is JSON nested too deeply to be read: flatten it") from None
    except ValueError:  # Python reads no number of thousands of digits
        raise refusal("the body has a number of too many digits: send finite numbers") from None
    if not isinstance(body, dict):
        raise refusal(f"the body is {short_text(body)}: send one JSON object")
    return body


def _refuse_constant(name: str) -> Any:
    raise refusal(f"the body has a number that cannot be read ({name} is no JSON): send finite numbers")


def check_neutral(name: str, value: Any, kind: Unsupported) -> None:
    """Raise ApiError if the value asks for something."""
    reason, neutral = kind
    # In JSON 0 and false are two things.
    if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
        raise refusal(f"{name}={short_text(value)} is not supported, {reason}: leave it out", name)


def short_text(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or lists in lists in lists
        return "..."
    return text if len(text) <= 60 else text[:57] + "..."
