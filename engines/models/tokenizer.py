"""Text to token ids and back, from a checkpoint folder, with the ``tokenizers`` library alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from engines.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    backend: Tokenizer
    mask_token_id: int
    eos_token_id: int

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """No special token is added at either end."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text up to the first end-of-text token; special tokens are left out."""
        ids = list(ids)
        if self.eos_token_id in ids:
            ids = ids[: ids.index(self.eos_token_id)]
        return self.backend.decode(ids, skip_special_tokens=True)


def load_tokenizer(directory: Path) -> TextTokenizer:
    """Read ``tokenizer.json`` and the special tokens named by ``tokenizer_config.json``."""
    path, config_path = directory / "tokenizer.json", directory / "tokenizer_config.json"
    for needed in (path, config_path):
        if not needed.is_file():
            raise UserError(
                f"tokenizer directory {directory} lacks {needed.name}: give a checkpoint folder that has it"
            )
    backend = Tokenizer.from_file(str(path))
    config = json.loads(config_path.read_text())
    ids = {}
    for role in ("mask_token", "eos_token"):
        token = config.get(role)
        content = token.get("content") if isinstance(token, dict) else token
        found = None if content is None else backend.token_to_id(content)
        if found is None:
            raise UserError(f"{config_path} names {role}={content!r}, which tokenizer.json does not hold: fix the name")
        ids[role] = found
    return TextTokenizer(backend=backend, mask_token_id=ids["mask_token"], eos_token_id=ids["eos_token"])
