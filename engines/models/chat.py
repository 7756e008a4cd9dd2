"""Conversations to prompts, and answers cut where the model ended them.

A rendered conversation holds its special tokens as text, the leading BOS included, so it is encoded
without adding any: exactly one BOS. A raw prompt is encoded as it is and gets none. Content that
spells a special token becomes that token, as upstream, but for a mask, which stays text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from engines.errors import UserError, require
from engines.models.checkpoint import read_json, read_text
from engines.models.config import ModelConfig
from engines.models.templates import render_template
from engines.models.tokenizer import TextTokenizer, load_tokenizer, token_content

ROLES = ("system", "developer", "user", "assistant")
_FURTHER_FIELDS = frozenset({"name", "reasoning", "reasoning_content"})
"""Fields of a message beside its role and content: a template may read them."""
_CUT = "<|the answer goes on here|> "
"""Behind the last message of a rendered conversation that is to be continued."""


class PromptForm(NamedTuple):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool = True
    """Whether it ends with the header of the assistant's answer."""
    continue_final_message: bool = False
    """Whether it ends within the last message."""
    variables: Mapping[str, Any] = MappingProxyType({})
    """What the template may read besides."""


USUAL_FORM = PromptForm()


@dataclass(frozen=True, kw_only=True)
class Message:
    role: str
    content: str
    further: Mapping[str, str] = field(default_factory=dict)
    """Fields that only a checkpoint's own template reads."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise UserError(f"message role={self.role!r} is unknown: use one of {', '.join(ROLES)}")
        if not isinstance(self.content, str):
            raise UserError(f"message content of type {type(self.content).__name__} is not text: give a string")


def parse_messages(raw: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Messages from parsed JSON; a field other than role, content, name and reasoning is an error."""
    messages = []
    for entry in raw:
        if not isinstance(entry, Mapping) or set(entry) - _FURTHER_FIELDS != {"role", "content"}:
            has = sorted(entry) if isinstance(entry, Mapping) else type(entry).__name__
            raise UserError(f"message has {has}: give an object with exactly role and content")
        further = {name: value for name, value in entry.items() if name in _FURTHER_FIELDS}
        messages.append(Message(role=entry["role"], content=entry["content"], further=further))
    return tuple(messages)


def _with_one_system(messages: Sequence[Message]) -> list[Message]:
    """A developer's messages and the system's as one in front, as vLLM has them for a template that knows no developer."""
    system = [each.content for each in messages if each.role in ("system", "developer") and each.content]
    others = [each for each in messages if each.role not in ("system", "developer")]
    return [Message(role="system", content="\n\n".join(system)), *others]


# ---- formats of checkpoints that ship no template ---------------------------------------------


def _llada(messages: Sequence[Message], special_tokens: Mapping[str, str], *, is_asked: bool) -> str:
    turns = [(m.role, m.content.strip() + "<|eot_id|>") for m in messages] + [("assistant", "")] * is_asked
    text = "".join(f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}" for role, content in turns)
    return special_tokens.get("bos_token", "<|startoftext|>") + text


def _chatml(messages: Sequence[Message], special_tokens: Mapping[str, str], *, is_asked: bool) -> str:
    turns = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages)
    return turns + "<|im_start|>assistant\n" * is_asked


def _story(messages: Sequence[Message], special_tokens: Mapping[str, str], *, is_asked: bool) -> str:
    """As the embedded model was trained: it knows no turns, and answers one story."""
    text = "\n".join(m.content.strip() for m in messages).removeprefix("Story:").removesuffix("Answer:").strip()
    return f"Story: {text}" + "\nAnswer:" * is_asked


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
    """'bos_token' and the like -> text; a template may name them."""

    def render(self, messages: Sequence[Message], form: PromptForm = USUAL_FORM) -> str:
        """The prompt, up to and including the header of the assistant's answer unless ``form`` has it otherwise."""
        if not messages:
            raise UserError("messages is empty: give at least one message")
        if any(each.role == "developer" for each in messages) and not self._knows_developers:
            messages = _with_one_system(messages)
        last = messages[-1]
        if form.continue_final_message:
            messages = [*messages[:-1], replace(last, content=last.content + _CUT)]
        text = self._rendered(messages, form)
        return _cut_within(text, last.content) if form.continue_final_message else text

    @property
    def _knows_developers(self) -> bool:
        return self.source is not None and ("'developer'" in self.source or '"developer"' in self.source)

    def _rendered(self, messages: Sequence[Message], form: PromptForm) -> str:
        is_asked = form.add_generation_prompt and not form.continue_final_message
        if self.source is None:
            return _BUILT_IN[self.family](messages, self.special_tokens, is_asked=is_asked)
        turns = [{"role": m.role, "content": m.content, **m.further} for m in messages]
        about = {"messages": turns, "tools": None, "add_generation_prompt": is_asked}
        return render_template(self.source, {**self.special_tokens, "documents": None, **form.variables, **about})

    def encode(self, tokenizer: TextTokenizer, messages: Sequence[Message]) -> list[int]:
        self.check(tokenizer)
        return tokenizer.encode(self.render(messages))

    def check(self, tokenizer: TextTokenizer) -> None:
        """Refuse a tokenizer that lacks the tokens of a built-in format."""
        if self.source is None:
            for token in _TURN_TOKENS[self.family]:
                if tokenizer.backend.token_to_id(token) is None:
                    raise UserError(
                        f"the checkpoint has no chat template, and its tokenizer has no {token} for the {self.family} "
                        f"format: leave the prompt raw"
                    )


def _cut_within(text: str, content: str) -> str:
    """A rendered conversation up to where its last message, ``content`` and ``_CUT``, ends; a template that trims messages trims
    the blanks at its end too."""
    at = text.rfind(_CUT.strip())
    if at < 0 or content.strip() not in text[:at]:
        raise UserError(
            "continue_final_message: the chat template does not show the last message as it is: give one that it does"
        )
    return text[:at] if text.startswith(_CUT, at) else text[:at].rstrip()


EMBEDDED_CHAT = ChatTemplate(family=_EMBEDDED, source=None, special_tokens={})
"""What a server of the embedded model makes of a conversation; elsewhere its prompts are raw."""


def load_chat_template(directory: Path, family: str) -> ChatTemplate:
    """``chat_template.jinja``, else ``chat_template`` of ``tokenizer_config.json``, else the family's format."""
    if family not in _TURN_END:
        raise UserError(f"family={family!r} has no chat format: use one of {', '.join(_TURN_END)}")
    config_path, template_path = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    require(not template_path.is_dir(), f"{template_path} is a folder: put the template's text in a file of that name")
    config = read_json(config_path) if config_path.is_file() else {}
    source = read_text(template_path) if template_path.is_file() else config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
        if "default" not in named:
            raise UserError(f"{config_path} has chat templates {sorted(map(str, named))}: name one of them 'default'")
        source = named["default"]
    if source is not None and not isinstance(source, str):
        raise UserError(f"{config_path} has a chat_template of type {type(source).__name__}: give Jinja text")
    tokens = {role: token_content(token) for role, token in config.items() if role.endswith("_token")}
    return ChatTemplate(
        family=family, source=source, special_tokens={role: text for role, text in tokens.items() if text is not None}
    )


# ---- answers -----------------------------------------------------------------------------------


class Answer(NamedTuple):
    ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    """'stop': an end token was generated (it and all behind it are cut); 'length': none was."""


def end_token_ids(config: ModelConfig, tokenizer: TextTokenizer) -> frozenset[int]:
    """Ids that end an answer: the model's end of text, and the end of a turn if the tokenizer has one."""
    turn_end = tokenizer.backend.token_to_id(_TURN_END[config.family])
    return frozenset({config.eos_token_id} | ({turn_end} if turn_end is not None else set()))


def stop_token_ids(directory: Path, config: ModelConfig) -> frozenset[int]:
    """``end_token_ids`` of a checkpoint folder; without a tokenizer in it, its config's end of text alone."""
    if not (directory / "tokenizer_config.json").is_file():
        return frozenset({config.eos_token_id})
    return end_token_ids(config, load_tokenizer(directory))


def cut_at_end(ids: Sequence[int], end_ids: Collection[int]) -> Answer:
    """``ids`` are the generated ones alone: a prompt's own end tokens do not count."""
    for place, token in enumerate(ids):
        if token in end_ids:
            return Answer(tuple(ids[:place]), "stop")
    return Answer(tuple(ids), "length")
