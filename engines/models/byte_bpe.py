"""Qwen2's byte-level BPE from ``vocab.json`` and ``merges.txt``, the only files Dream publishes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from engines.errors import UserError

# How Qwen2 cuts text before merging: part of the tokenizer's definition, in none of its data files.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def byte_level_bpe(vocab: Path, merges: Path, added: Mapping[str, Mapping[str, Any]]) -> Tokenizer:
    """``added``: id (as text) -> token, the ``added_tokens_decoder`` of ``tokenizer_config.json``."""
    try:
        model = BPE.from_file(str(vocab), str(merges))
    except Exception as error:  # tokenizers raises bare Exception for bad files
        raise UserError(f"{vocab} and {merges.name} are not a BPE vocabulary ({error}): restore them") from error
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for number, token in sorted(added.items(), key=lambda item: int(item[0])):
        special = bool(token.get("special", False))
        tokenizer.add_tokens(
            [
                AddedToken(
                    token["content"],
                    single_word=bool(token.get("single_word", False)),
                    lstrip=bool(token.get("lstrip", False)),
                    rstrip=bool(token.get("rstrip", False)),
                    normalized=bool(token.get("normalized", not special)),
                    special=special,
                )
            ]
        )
        # Ids are handed out in order, so a gap or a wrong vocabulary shows here.
        if tokenizer.token_to_id(token["content"]) != int(number):
            raise UserError(
                f"added token {token['content']!r} should have id {number} but the vocabulary of {vocab} gives "
                f"{tokenizer.token_to_id(token['content'])}: restore the tokenizer's files"
            )
    return tokenizer
