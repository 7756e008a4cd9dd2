"""Turns texts and conversations into ids and back, by a checkpoint's own tokenizer and chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from engines.errors import UserError
from engines.models.chat import EMBEDDED_CHAT, USUAL_FORM, CausalText, PromptForm, end_token_ids, load_chat_template
from engines.models.checkpoint import EMBEDDED
from engines.models.config import ModelConfig
from engines.models.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class TextCodec(CausalText):
    """The tokenizer and chat template of a diffusion LLM."""

    @classmethod
    def of(cls, directory: Path, config: ModelConfig) -> Self:
        tokenizer = load_tokenizer(directory)
        return cls(
            backend=tokenizer.backend,
            template=EMBEDDED_CHAT if directory in EMBEDDED.values() else load_chat_template(directory, config.family),
            end_ids=end_token_ids(config, tokenizer),
            eos_id=tokenizer.eos_token_id,
            mask_id=tokenizer.mask_token_id,
        )

    def encode(self, text: str, *, add_special: bool | None = None, keep: int | None = None) -> tuple[int, ...]:
        """Return the ids of a text. ``add_special`` None adds no special token; ``keep`` keeps so many ids at the text's end."""
        return super().encode(text, add_special=add_special is True, keep=keep)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ids, without masks that a sampler left, and without special tokens if ``skip_special``."""
        return super().decode([i for i in ids if i != self.mask_id], skip_special=skip_special)


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
"""Encodes prompts as ids, and decodes answers to text."""
