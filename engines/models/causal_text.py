"""Texts and conversations of a causal checkpoint: its tokenizer, its chat template, and the ids that end an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engines.errors import UserError, require
from engines.models.chat import USUAL_FORM, ChatTemplate, PromptForm, load_chat_template, parse_messages
from engines.models.checkpoint import read_json
from engines.models.tokenizer import NO_ID, Speller, TextTokenizer, find_backend, longest_token, token_content

_ANY_FAMILY = "dream"
"""``load_chat_template`` knows formats of checkpoints without a template, which are not used here."""


@dataclass(frozen=True, kw_only=True)
class CausalText:
    """Prompts are encoded as transformers and vLLM do: a raw text gets the special tokens that its tokenizer adds, a
    rendered conversation, which spells its own, none."""

    backend: Tokenizer
    template: ChatTemplate | None
    end_ids: frozenset[int]
    eos_id: int | None = None
    """The tokenizer's own end of text, one of ``end_ids``."""
    mask_id: int = NO_ID
    """A token of diffusion LLMs that no text spells."""

    @property
    def shows_half_characters(self) -> bool:
        """Whether bytes of half a character at the end of an answer are part of its text: of a causal model they are not, as in
        vLLM."""
        return self.mask_id != NO_ID

    @cached_property
    def speller(self) -> Speller:
        return Speller(self.backend)

    @cached_property
    def longest_token(self) -> int:
        return longest_token(self.backend)

    def encode(self, text: str, *, add_special: bool | None = None, keep: int | None = None) -> tuple[int, ...]:
        """``add_special`` None adds the special tokens; ``keep`` as in ``encoded``."""
        return tuple(self._tokenizer.encode(text, add_special=add_special is not False, keep=keep))

    def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Ids of each word as it begins a text and, where that takes as many tokens and begins with another, as it stands
        behind a blank, as vLLM tells bad words."""
        found: list[tuple[int, ...]] = []
        for word in words:
            first, *others = (self._ids(blank + word.lstrip()) for blank in ("", " "))
            require(len(first) > 0, f"bad_words has {word!r}, which has no token: leave it out")
            found.append(first)
            found += [ids for ids in others if len(ids) == len(first) and ids[0] != first[0]]
        return tuple(found)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        form: PromptForm = USUAL_FORM,
        *,
        add_special: bool | None = None,
        keep: int | None = None,
    ) -> tuple[int, ...]:
        """May take seconds: a template runs in a process of its own."""
        if self.template is None:
            raise UserError("messages: the checkpoint has no chat template: give a prompt to /v1/completions")
        return self.encode(
            self.template.render(parse_messages(messages), form), add_special=add_special is True, keep=keep
        )

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        """Has what the mask spells be text."""
        end = NO_ID if self.eos_id is None else self.eos_id
        return TextTokenizer(backend=self.backend, mask_token_id=self.mask_id, eos_token_id=end)


def load_causal_text(directory: Path) -> CausalText | None:
    """None where the folder has no tokenizer."""
    backend = find_backend(directory)
    if backend is None:
        return None
    template = load_chat_template(directory, _ANY_FAMILY)
    eos_id = _text_end(directory, backend)
    return CausalText(
        backend=backend,
        template=None if template.source is None else template,
        end_ids=stored_ends(directory) | (frozenset() if eos_id is None else {eos_id}),
        eos_id=eos_id,
    )


def stored_ends(directory: Path) -> frozenset[int]:
    """What the checkpoint generates up to, as in vLLM; a text ends at its tokenizer's end of text besides."""
    for name in ("generation_config.json", "config.json"):
        found: Any = read_json(directory / name).get("eos_token_id") if (directory / name).is_file() else None
        ids = found if isinstance(found, list) else [] if found is None else [found]
        require(
            all(type(each) is int and each >= 0 for each in ids),
            f"{directory / name} has eos_token_id={found!r}: give an id, or a list of ids",
        )
        if ids:
            return frozenset(ids)
    return frozenset()


def _text_end(directory: Path, backend: Tokenizer) -> int | None:
    config = directory / "tokenizer_config.json"
    content = token_content(read_json(config).get("eos_token")) if config.is_file() else None
    return None if content is None else backend.token_to_id(content)
