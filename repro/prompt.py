"""Prompts of ``repro generate``, given as ids or text, raw or as a conversation, and its answers as text."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engines.data import RepeatedKeyError, unique
from engines.data import read_text as read_file
from engines.errors import UserError, require
from engines.models.chat import Message, cut_at_end, end_token_ids, load_chat_template
from engines.models.checkpoint import PUBLISHED_CONFIGS, checkpoint_dir, config_of, is_base
from engines.models.tokenizer import TextTokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class TextPrompt:
    """``chat`` None makes the prompt a conversation if the checkpoint has a chat template and its name is not that of a base model."""

    text: str
    chat: bool | None = None
    system_prompt: str | None = None

    def encode(self, model: str, tokenizer: TextTokenizer) -> tuple[int, ...]:
        require(self.text != "", "prompt is empty: give some text")
        template = load_chat_template(checkpoint_dir(model, weights=False), config_of(model).family)
        if not (template.source is not None and not is_base(model) if self.chat is None else self.chat):
            require(
                self.system_prompt is None,
                f"system_prompt={self.system_prompt!r} has no effect on a raw prompt: add --chat or leave it out",
            )
            return tuple(tokenizer.encode(self.text))
        messages = [Message(role="user", content=self.text)]
        if self.system_prompt is not None:
            messages.insert(0, Message(role="system", content=self.system_prompt))
        return tuple(template.encode(tokenizer, messages))


def read_text(argument: str) -> str:
    """Return ``argument`` itself; for '-' return standard input without its last line break."""
    if argument != "-":
        return argument
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError("prompt='-': standard input is not UTF-8 text: convert it") from error


def read_prompt_ids(path: Path) -> tuple[int, ...]:
    """Read a JSON list of ids, an object with ``prompt_ids``, or ids separated by blanks or commas."""
    require(path.exists() and not path.is_dir(), f"prompt_ids={str(path)!r} is not a file: give a file of token ids")
    text = read_file("prompt_ids", path)
    try:
        ids = _token_ids(text)
    except RepeatedKeyError as error:
        raise UserError(f"prompt_ids={str(path)!r}: {error}: keep one") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"prompt_ids={str(path)!r} is not a list of integers: write them as JSON, [1, 2, 3]") from error
    if not ids:
        raise UserError(f"prompt_ids={str(path)!r} is empty: give at least one token id")
    return ids


def _token_ids(text: str) -> tuple[int, ...]:
    words = text.replace(",", " ").split()
    if all(re.fullmatch(r"-?[0-9]+", word) for word in words):
        return tuple(int(word) for word in words)
    parsed = json.loads(text, object_pairs_hook=unique)
    if isinstance(parsed, dict):
        parsed = parsed.get("prompt_ids")
    if not isinstance(parsed, list) or any(type(value) is not int for value in parsed):
        raise ValueError(text)
    return tuple(parsed)


def check_prompt(
    prompt_ids: Sequence[int], length: int, max_len: int, vocabulary: int, *, option: str = "max_tokens", block: int = 1
) -> None:
    """Raise UserError for a prompt that does not fit a model of ``max_len`` tokens, in whole blocks of ``block``. ``option`` is the user's
    name for the length of the answer."""
    require(len(prompt_ids) > 0, "prompt has no token: give some text")
    total = -(-(len(prompt_ids) + length) // block) * block
    blocks = "" if block == 1 else f"{total} tokens in whole blocks of {block}, "
    require(
        total <= max_len,
        f"prompt of {len(prompt_ids)} tokens and {option}={length} make {blocks}more than max_model_len={max_len}: shorten "
        f"the prompt or ask for fewer tokens",
    )
    wrong = next((i for i in prompt_ids if not 0 <= i < vocabulary), None)
    require(wrong is None, f"prompt has the id {wrong} and the vocabulary {vocabulary}: use this model's tokenizer")


def tokenizer_of(model: str) -> TextTokenizer:
    if model in PUBLISHED_CONFIGS:
        raise UserError(f"model={model!r} is a shape without a tokenizer: give --prompt-ids, or a checkpoint")
    return load_tokenizer(checkpoint_dir(model, weights=False))


def find_tokenizer(model: str) -> TextTokenizer | None:
    if model in PUBLISHED_CONFIGS or not (checkpoint_dir(model, weights=False) / "tokenizer_config.json").is_file():
        return None
    return tokenizer_of(model)


class TextAnswer(NamedTuple):
    text: str
    finish_reason: str
    """'stop' if a stop token ended the answer, 'length' if it has all the tokens that were asked for."""


def answer_of(token_ids: Sequence[int], model: str, tokenizer: TextTokenizer) -> TextAnswer:
    """The answer's text up to its first end-of-text or end-of-turn token. Masks that a sampler left are dropped."""
    config = config_of(model)
    ids, reason = cut_at_end(token_ids, end_token_ids(config, tokenizer))
    return TextAnswer(tokenizer.decode([i for i in ids if i != config.mask_token_id]), reason)
