"""Turns conversations into prompts by a checkpoint's chat template, and cuts answers where the model ended them.

A rendered conversation holds its special tokens as text, the leading BOS included. So we encode it
without adding any, and it has exactly one BOS. A raw prompt is encoded as it is and gets none. Content
that spells a special token becomes that token, as upstream, except for a mask, which stays text.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer

from engines.errors import UserError, require
from engines.models.checkpoint import read_json, read_text
from engines.models.config import ModelConfig
from engines.models.tokenizer import (
    NO_ID,
    Speller,
    TextTokenizer,
    find_backend,
    load_tokenizer,
    longest_token,
    token_content,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
_FURTHER_FIELDS = frozenset({"name", "reasoning", "reasoning_content", "tool_calls", "tool_call_id"})
"""Fields of a message, beside its role and content, that a template may read."""
_CUT = "<|the answer goes on here|> "
"""We append this to the last message of a conversation to be continued, and cut the rendered text there."""


class PromptForm(NamedTuple):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool = True
    """Whether the prompt ends with the header of the assistant's answer."""
    continue_final_message: bool = False
    """Whether the prompt ends within the last message, which the answer continues."""
    variables: Mapping[str, Any] = MappingProxyType({})
    """Further variables for the template."""


USUAL_FORM = PromptForm()


@dataclass(frozen=True, kw_only=True)
class Message:
    role: str
    content: str
    further: Mapping[str, Any] = field(default_factory=dict)
    """Fields that only a checkpoint's own template reads."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise UserError(f"message role={self.role!r} is unknown: use one of {', '.join(ROLES)}")
        if not isinstance(self.content, str):
            raise UserError(f"message content of type {type(self.content).__name__} is not text: give a string")


def parse_messages(raw: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Messages from parsed JSON; a field other than role, content and ``_FURTHER_FIELDS`` is an error."""
    messages = []
    for entry in raw:
        if not isinstance(entry, Mapping) or set(entry) - _FURTHER_FIELDS != {"role", "content"}:
            keys = sorted(entry) if isinstance(entry, Mapping) else type(entry).__name__
            raise UserError(f"message has {keys}: give an object with exactly role and content")
        further = {name: value for name, value in entry.items() if name in _FURTHER_FIELDS}
        messages.append(Message(role=entry["role"], content=entry["content"], further=further))
    return tuple(messages)


def _with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Merge developer and system messages into one in front, as vLLM does for a template that knows no developer role."""
    system = [message.content for message in messages if message.role in ("system", "developer") and message.content]
    others = [message for message in messages if message.role not in ("system", "developer")]
    return [Message(role="system", content="\n\n".join(system)), *others]


# ---- formats of checkpoints that ship no template ---------------------------------------------


def _llada(messages: Sequence[Message], special_tokens: Mapping[str, str], *, add_generation_prompt: bool) -> str:
    turns = [(m.role, m.content.strip() + "<|eot_id|>") for m in messages] + [("assistant", "")] * add_generation_prompt
    text = "".join(f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}" for role, content in turns)
    return special_tokens.get("bos_token", "<|startoftext|>") + text


def _chatml(messages: Sequence[Message], special_tokens: Mapping[str, str], *, add_generation_prompt: bool) -> str:
    turns = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages)
    return turns + "<|im_start|>assistant\n" * add_generation_prompt


def _story(messages: Sequence[Message], special_tokens: Mapping[str, str], *, add_generation_prompt: bool) -> str:
    """The format that the embedded model was trained with: it knows no turns, and answers one story."""
    text = "\n".join(m.content.strip() for m in messages).removeprefix("Story:").removesuffix("Answer:").strip()
    return f"Story: {text}" + "\nAnswer:" * add_generation_prompt


_EMBEDDED = "the embedded model"
_BUILT_IN: dict[str, Callable[..., str]] = {"llada": _llada, "dream": _chatml, _EMBEDDED: _story}
_TURN_END = {"llada": "<|eot_id|>", "dream": "<|im_end|>"}
_TURN_TOKENS = {
    "llada": ("<|start_header_id|>", "<|end_header_id|>", _TURN_END["llada"]),
    "dream": ("<|im_start|>", _TURN_END["dream"]),
    _EMBEDDED: (),
}


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    family: str
    source: str | None
    """The checkpoint's Jinja template; None selects the family's built-in format."""
    special_tokens: Mapping[str, str]
    """'bos_token' and other roles -> the token's text; a template may name them."""

    def render(self, messages: Sequence[Message], form: PromptForm = USUAL_FORM) -> str:
        """Return the prompt, up to and including the header of the assistant's answer, unless ``form`` says otherwise."""
        require(bool(messages), "messages is empty: give at least one message")
        knows_developers = self.source is not None and ("'developer'" in self.source or '"developer"' in self.source)
        if any(message.role == "developer" for message in messages) and not knows_developers:
            messages = _with_one_system(messages)
        last = messages[-1]
        if form.continue_final_message:
            messages = [*messages[:-1], replace(last, content=last.content + _CUT)]
        text = self._render(messages, form)
        for message in messages:
            word = "tool_calls" if "tool_calls" in message.further else message.role
            is_shown = word in (self.source or "") or (word == "tool" and message.content.strip() in text)
            require(
                word not in ("tool_calls", "tool") or is_shown,
                f"messages have {word!r}, which the chat template does not show: take them out, or ask another model",
            )
        return _cut_within(text, last.content) if form.continue_final_message else text

    def _render(self, messages: Sequence[Message], form: PromptForm) -> str:
        add_generation_prompt = form.add_generation_prompt and not form.continue_final_message
        if self.source is None:
            return _BUILT_IN[self.family](messages, self.special_tokens, add_generation_prompt=add_generation_prompt)
        turns = [{"role": m.role, "content": m.content, **m.further} for m in messages]
        variables = {**form.variables, "messages": turns, "add_generation_prompt": add_generation_prompt}
        return render_template(self.source, {**self.special_tokens, "documents": None, "tools": None, **variables})

    def encode(self, tokenizer: TextTokenizer, messages: Sequence[Message]) -> list[int]:
        self.check(tokenizer)
        return tokenizer.encode(self.render(messages))

    def check(self, tokenizer: TextTokenizer) -> None:
        """Raise UserError if the tokenizer lacks a token of a built-in format."""
        if self.source is None:
            for token in _TURN_TOKENS[self.family]:
                if tokenizer.backend.token_to_id(token) is None:
                    raise UserError(
                        f"the checkpoint has no chat template, and its tokenizer has no {token} for the {self.family} "
                        f"format: leave the prompt raw"
                    )


def _cut_within(text: str, content: str) -> str:
    """Return a rendered conversation up to the ``_CUT`` that follows the last message's ``content``. If the template trims
    messages, we trim blanks at the end too."""
    end = text.rfind(_CUT.strip())
    if end < 0 or content.strip() not in text[:end]:
        raise UserError(
            "continue_final_message: the chat template does not show the last message as it is: give one that it does"
        )
    return text[:end] if text.startswith(_CUT, end) else text[:end].rstrip()


EMBEDDED_CHAT = ChatTemplate(family=_EMBEDDED, source=None, special_tokens={})
"""The template by which a server of the embedded model renders conversations; elsewhere that model's prompts are raw."""


def load_chat_template(directory: Path, family: str) -> ChatTemplate:
    """Load ``chat_template.jinja``, or else ``chat_template`` of ``tokenizer_config.json``, or else the family's format."""
    require(family in _TURN_END, f"family={family!r} has no chat format: use one of {', '.join(_TURN_END)}")
    config_path, template_path = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    require(not template_path.is_dir(), f"{template_path} is a folder: put the template's text in a file of that name")
    config = read_json(config_path) if config_path.is_file() else {}
    source = read_text(template_path) if template_path.is_file() else config.get("chat_template")
    if isinstance(source, list):
        by_name = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
        if "default" not in by_name:
            raise UserError(f"{config_path} has chat templates {sorted(map(str, by_name))}: name one of them 'default'")
        source = by_name["default"]
    if source is not None and not isinstance(source, str):
        raise UserError(f"{config_path} has a chat_template of type {type(source).__name__}: give Jinja text")
    tokens = {role: token_content(token) for role, token in config.items() if role.endswith("_token")}
    return ChatTemplate(
        family=family, source=source, special_tokens={role: text for role, text in tokens.items() if text is not None}
    )


# ---- answers -----------------------------------------------------------------------------------


class ChatAnswer(NamedTuple):
    ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    """'stop': an end token was generated, and we cut it and all tokens behind it; 'length': none was."""


def end_token_ids(config: ModelConfig, tokenizer: TextTokenizer) -> frozenset[int]:
    """Return the ids that end an answer: the model's end of text, and the end of a turn if the tokenizer has one."""
    turn_end = tokenizer.backend.token_to_id(_TURN_END[config.family])
    return frozenset({config.eos_token_id} | ({turn_end} if turn_end is not None else set()))


def stop_token_ids(directory: Path, config: ModelConfig) -> frozenset[int]:
    """Return the ``end_token_ids`` of a checkpoint folder; without a tokenizer, only its config's end of text."""
    if not (directory / "tokenizer_config.json").is_file():
        return frozenset({config.eos_token_id})
    return end_token_ids(config, load_tokenizer(directory))


def cut_at_end(ids: Sequence[int], end_ids: Collection[int]) -> ChatAnswer:
    """Cut an answer at its first end token. ``ids`` are only the generated ones: a prompt's end tokens do not count."""
    for index, token in enumerate(ids):
        if token in end_ids:
            return ChatAnswer(tuple(ids[:index]), "stop")
    return ChatAnswer(tuple(ids), "length")


_ANY_FAMILY = "dream"
"""Any family that ``load_chat_template`` takes: we do not use its format for checkpoints without a template."""


@dataclass(frozen=True, kw_only=True)
class CausalText:
    """A causal checkpoint's tokenizer, its chat template, and the ids that end an answer.

    We encode prompts as transformers and vLLM do. A raw text gets the special tokens that its tokenizer adds. A rendered
    conversation gets none, because it spells its own.
    """

    backend: Tokenizer
    template: ChatTemplate | None
    end_ids: frozenset[int]
    eos_id: int | None = None
    """The tokenizer's own end of text, one of ``end_ids``."""
    mask_id: int = NO_ID
    """The mask token of a diffusion LLM, which no text spells."""

    @property
    def shows_half_characters(self) -> bool:
        """Whether the bytes of half a character at an answer's end are part of its text. For a causal model they are not, as in
        vLLM."""
        return self.mask_id != NO_ID

    @cached_property
    def speller(self) -> Speller:
        return Speller(self.backend)

    @cached_property
    def longest_token(self) -> int:
        return longest_token(self.backend)

    def encode(self, text: str, *, add_special: bool | None = None, keep: int | None = None) -> tuple[int, ...]:
        """Return the ids of a text. ``add_special`` None adds the special tokens; ``keep`` is as in ``encoded``."""
        return tuple(self._tokenizer.encode(text, add_special=add_special is not False, keep=keep))

    def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the ids of each bad word at the beginning of a text and, as in vLLM, also behind a blank. The second are left
        out unless they are as many and begin with another id."""
        spellings: list[tuple[int, ...]] = []
        for word in words:
            encodings = [self.backend.encode(blank + word.lstrip(), add_special_tokens=False) for blank in ("", " ")]
            first, *others = (tuple(encoding.ids) for encoding in encodings)
            require(len(first) > 0, f"bad_words has {word!r}, which has no token: leave it out")
            spellings.append(first)
            spellings += [ids for ids in others if len(ids) == len(first) and ids[0] != first[0]]
        return tuple(spellings)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        form: PromptForm = USUAL_FORM,
        *,
        add_special: bool | None = None,
        keep: int | None = None,
    ) -> tuple[int, ...]:
        """Return the ids of a conversation's prompt, by the template. Raises UserError if the checkpoint has none."""
        if self.template is None:
            raise UserError("messages: the checkpoint has no chat template: give a prompt to /v1/completions")
        self.template.check(self._tokenizer)
        return self.encode(
            self.template.render(parse_messages(messages), form), add_special=add_special is True, keep=keep
        )

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        """The tokenizer that encodes the mask's spelling as ordinary text."""
        eos_id = NO_ID if self.eos_id is None else self.eos_id
        return TextTokenizer(backend=self.backend, mask_token_id=self.mask_id, eos_token_id=eos_id)


def load_causal_text(directory: Path) -> CausalText | None:
    """Load the tokenizer and chat template of a causal checkpoint; None if the folder has no tokenizer."""
    backend = find_backend(directory)
    if backend is None:
        return None
    template = load_chat_template(directory, _ANY_FAMILY)
    config_path = directory / "tokenizer_config.json"
    eos_token = token_content(read_json(config_path).get("eos_token")) if config_path.is_file() else None
    eos_id = None if eos_token is None else backend.token_to_id(eos_token)
    return CausalText(
        backend=backend,
        template=None if template.source is None else template,
        end_ids=stored_ends(directory) | (frozenset() if eos_id is None else {eos_id}),
        eos_id=eos_id,
    )


def stored_ends(directory: Path) -> frozenset[int]:
    """Return the ids that end the checkpoint's generation, as in vLLM. A text also ends at its tokenizer's end of text."""
    for name in ("generation_config.json", "config.json"):
        stored: Any = read_json(directory / name).get("eos_token_id") if (directory / name).is_file() else None
        ids = stored if isinstance(stored, list) else [] if stored is None else [stored]
        require(
            all(type(token_id) is int and token_id >= 0 for token_id in ids),
            f"{directory / name} has eos_token_id={stored!r}: give an id, or a list of ids",
        )
        if ids:
            return frozenset(ids)
    return frozenset()


_MOST_CHARS = 1 << 22
"""Most characters of a rendered conversation."""


def render_template(source: str, variables: Mapping[str, Any]) -> str:
    """Fill a checkpoint's chat template in Jinja's sandbox. Raises UserError if it fails, or if jinja2 is missing."""
    try:
        _environment()
    except ImportError:
        raise UserError(
            "the checkpoint's chat template needs jinja2, which is missing: pip install 'dllm-serve-repro[hub]'"
        ) from None
    try:
        # Messages go through JSON, so that a template gets copies.
        text = str(_compile(source).render(**json.loads(json.dumps(variables))))
        text.encode("utf-8")
        require(len(text) <= _MOST_CHARS, f"it renders {len(text)} characters")
    except Exception as error:
        is_clear = isinstance(error, UserError) or "jinja2" in type(error).__module__  # which names what is wrong
        reason = str(error if is_clear else f"{type(error).__name__}: {error}")[:500]
        raise UserError(
            f"the checkpoint's chat template failed ({reason}): change the messages or fix the template"
        ) from error
    return text


@lru_cache(maxsize=8)
def _compile(source: str) -> Any:
    """Compile a checkpoint's template once for all conversations: compiling takes longer than rendering."""
    return _environment().from_string(source)


@cache
def _environment() -> Any:
    """The environment published templates are written for."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: object, indent: int | None = None, **options: Any) -> str:
        # Jinja's own filter escapes HTML, which would put "\u003c" for "<" into a prompt.
        return json.dumps(value, indent=indent, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = time.strftime
    return environment
