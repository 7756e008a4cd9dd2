"""Texts and conversations to ids and back, by a checkpoint's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from tokenizers import Tokenizer

from engines.errors import UserError
from engines.models.chat import (
    EMBEDDED_CHAT,
    USUAL_FORM,
    CausalText,
    ChatTemplate,
    PromptForm,
    end_token_ids,
    load_chat_template,
    parse_messages,
)
from engines.models.checkpoint import EMBEDDED
from engines.models.config import ModelConfig
from engines.models.tokenizer import TextTokenizer, load_tokenizer, longest_token


@dataclass(frozen=True, kw_only=True)
class TextCodec:
    tokenizer: TextTokenizer
    template: ChatTemplate
    end_ids: frozenset[int]
    """Ids that end an answer: of a text or of a turn."""
    speller: ClassVar[None] = None
    shows_half_characters: ClassVar[bool] = True

    @classmethod
    def of(cls, directory: Path, config: ModelConfig) -> TextCodec:
        tokenizer = load_tokenizer(directory)
        return cls(
            tokenizer=tokenizer,
            template=EMBEDDED_CHAT if directory in EMBEDDED.values() else load_chat_template(directory, config.family),
            end_ids=end_token_ids(config, tokenizer),
        )

    @cached_property
    def longest_token(self) -> int:
        """Most bytes of a text that one token stands for."""
        return longest_token(self.tokenizer.backend)

    @property
    def backend(self) -> Tokenizer:
        return self.tokenizer.backend

    @property
    def eos_id(self) -> int:
        """The tokenizer's own end of text, one of ``end_ids``."""
        return self.tokenizer.eos_token_id

    def encode(self, text: str, *, add_special: bool | None = None, keep: int | None = None) -> tuple[int, ...]:
        """``add_special`` None adds no special token; ``keep`` tokens are left of a text's end."""
        return tuple(self.tokenizer.encode(text, add_special=add_special is True, keep=keep))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        form: PromptForm = USUAL_FORM,
        *,
        add_special: bool | None = None,
        keep: int | None = None,
    ) -> tuple[int, ...]:
        """The prompt of a conversation, by the template."""
        self.template.check(self.tokenizer)
        return self.encode(self.template.render(parse_messages(messages), form), add_special=add_special, keep=keep)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Masks that a sampler left are no text, nor are special tokens unless they are asked for."""
        mask = self.tokenizer.mask_token_id
        return self.tokenizer.backend.decode([i for i in ids if i != mask], skip_special_tokens=skip_special)


class IdsAlone:
    """A model without a tokenizer: prompts are ids, answers have no text."""

    end_ids: frozenset[int] = frozenset()
    eos_id = None
    longest_token = 1 << 30
    backend = None
    speller = None
    shows_half_characters = True

    def encode(self, text: str, **_: object) -> tuple[int, ...]:
        raise UserError("prompt is a text and the model has no tokenizer: give a list of token ids")

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], form: PromptForm = USUAL_FORM, **_: object
    ) -> tuple[int, ...]:
        raise UserError("messages: the model has no tokenizer: give a list of token ids to /v1/completions")

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return ""


Codec = TextCodec | CausalText | IdsAlone
"""What makes ids of prompts, and text of answers."""
