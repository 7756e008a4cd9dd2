"""Text to token ids and back, from a checkpoint folder, with the ``tokenizers`` library alone."""

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from engines.errors import UserError
from engines.models.checkpoint import read_json, read_text

# Python tokenizers whose rules ``byte_level_bpe`` implements; published without a tokenizer.json.
_QWEN2_CLASSES = ("DreamTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast")

SpecialToken: TypeAlias = Literal["mask_token", "eos_token"]
NO_ID = -1
"""Stands for the id of a special token that a tokenizer does not have; no text has this id."""


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    backend: Tokenizer
    mask_token_id: int
    """``NO_ID`` for an autoregressive model."""
    eos_token_id: int

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool = False, keep: int | None = None) -> list[int]:
        """Return the ids of a text, with special tokens at its ends only if ``add_special``. A mask that is spelt out stays
        text. ``keep`` is as in ``encode_text``."""
        ids = encode_text(self.backend, text, add_special=add_special, keep=keep)
        return (
            encode_text(self._maskless, text, add_special=add_special, keep=keep) if self.mask_token_id in ids else ids
        )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            require_text(text)
        batch = [encoding.ids for encoding in self.backend.encode_batch(list(texts), add_special_tokens=False)]
        return [self.encode(text) if self.mask_token_id in ids else ids for text, ids in zip(texts, batch, strict=True)]

    @cached_property
    def _maskless(self) -> Tokenizer:
        return without_token(self.backend, self.mask_token_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text up to the first end-of-text token, without special tokens, masks and ids that have no token."""
        ids = list(ids)
        if self.eos_token_id in ids:
            ids = ids[: ids.index(self.eos_token_id)]
        # LLaDA's mask is not registered as a mask token, and need not be a special one.
        return self.backend.decode([i for i in ids if i != self.mask_token_id], skip_special_tokens=True)


def encode_text(backend: Tokenizer, text: str, *, add_special: bool, keep: int | None = None) -> list[int]:
    """Return the ids of a text. At most ``keep`` remain, added special tokens included: we cut the text's beginning, as
    transformers does with ``truncation_side="left"``."""
    require_text(text)
    if keep is None:
        return backend.encode(text, add_special_tokens=add_special).ids
    encoding = backend.encode(text, add_special_tokens=False)
    encoding.truncate(max(0, keep - (backend.num_special_tokens_to_add(False) if add_special else 0)), direction="left")
    return backend.post_process(encoding, add_special_tokens=add_special).ids


def without_token(backend: Tokenizer, token_id: int) -> Tokenizer:
    """Return a tokenizer in which no text spells this token: its spelling is ordinary text, and other texts keep their ids."""
    spelling = backend.id_to_token(token_id)
    stand_in = f"<{secrets.token_hex(16)}>"
    parts = json.loads(backend.to_str())
    for token in parts["added_tokens"]:
        if token["id"] == token_id:
            token |= {"content": stand_in, "normalized": False}
    model = parts["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {stand_in if name == spelling else name: number for name, number in model["vocab"].items()}
    else:
        model["vocab"] = [[stand_in if name == spelling else name, score] for name, score in model["vocab"]]
    if "merges" in model:
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if spelling not in (*pair, "".join(pair))]
    return Tokenizer.from_str(json.dumps(parts))


def require_text(text: str) -> None:
    """Raise UserError for a text that has no UTF-8 encoding."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        start = error.start
        raise UserError(
            f"text {text[max(0, start - 10) : start + 10]!r} holds half a character (a lone surrogate, at {start}): take it out"
        ) from None


def load_tokenizer(directory: Path, *, required: Collection[SpecialToken] = get_args(SpecialToken)) -> TextTokenizer:
    """Read the tokenizer and the special tokens of a checkpoint folder, which must have the ``required`` ones.

    The tokenizer is ``tokenizer.json``, or ``vocab.json`` and ``merges.txt`` under the rules of a class
    known here (Dream, SDAR). Special tokens are those named by ``tokenizer_config.json``; a mask it does not
    name (LLaDA) is the ``mask_token_id`` of ``config.json``.
    """
    config_path = directory / "tokenizer_config.json"
    if not config_path.is_file():
        raise UserError(
            f"tokenizer directory {directory} lacks tokenizer_config.json: give a checkpoint folder that has it"
        )
    config = read_json(config_path)
    backend = _backend(directory, config)
    ids = {}
    for role in ("mask_token", "eos_token"):
        content = token_content(config.get(role))
        token_id = None if content is None else backend.token_to_id(content)
        if content is None and role == "mask_token":
            path = directory / "config.json"
            mask = read_json(path).get("mask_token_id") if path.is_file() else None
            token_id = mask if type(mask) is int and backend.id_to_token(mask) is not None else None
        if content is None and token_id is None and role not in required:
            token_id = NO_ID
        if token_id is None:
            raise UserError(f"{config_path} names {role}={content!r}, which the tokenizer does not hold: fix the name")
        ids[role] = token_id
    return TextTokenizer(backend=backend, mask_token_id=ids["mask_token"], eos_token_id=ids["eos_token"])


_MOST_SHRINK = 4
"""Most bytes of a text that become one byte when it is normalized: 𝐀 (four bytes) becomes A."""


def longest_token(backend: Tokenizer) -> int:
    """Most bytes of a text that one token stands for."""
    longest = max((len(token.encode()) for token in backend.get_vocab(with_added_tokens=True)), default=1)
    return longest * (1 if backend.normalizer is None else _MOST_SHRINK)


def special_tokens(backend: Tokenizer | None, texts: Collection[str]) -> dict[int, str]:
    """Return those of the texts that are special tokens, by their ids."""
    added = {} if backend is None or not texts else backend.get_added_tokens_decoder()
    return {id_: token.content for id_, token in added.items() if token.special and token.content in texts}


class Speller:
    """Decodes tokens to their text within a longer text, with special tokens spelt out."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        # We decode behind an ordinary token, because a decoder may treat the first token of a text differently.
        self._opening = backend.encode("a", add_special_tokens=False).ids[-1:]
        self._length = len(self.text(self._opening))
        self._texts: dict[tuple[int, ...], str] = {}

    def text(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def text_after(self, ids: tuple[int, ...]) -> str:
        """Return the text of ids that follow a whole character."""
        text = self._texts.get(ids)
        if text is None:
            text = self.text([*self._opening, *ids])[self._length :]
            if len(ids) == 1:
                self._texts[ids] = text
        return text


def token_content(token: Any) -> str | None:
    """The text of a special token as ``tokenizer_config.json`` stores it: a string, or an object with ``content``."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a ``tokenizer.json``."""
    text = read_text(path)
    try:
        return Tokenizer.from_str(text)
    except BaseException as error:  # a bare Exception for bad files, and what its Rust code panics with
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise UserError(f"{path} is no tokenizer ({error}): restore the file") from None


def find_backend(directory: Path) -> Tokenizer | None:
    """Read a folder's tokenizer as ``load_tokenizer`` does; None if it has none, or one whose rules we do not know."""
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    return _backend(directory, config) if _has_backend(directory, config) else None


def _has_backend(directory: Path, config: Mapping[str, Any]) -> bool:
    if (directory / "tokenizer.json").is_file():
        return True
    is_known = config.get("tokenizer_class") in _QWEN2_CLASSES
    return is_known and all((directory / name).is_file() for name in ("vocab.json", "merges.txt"))


def _backend(directory: Path, config: Mapping[str, Any]) -> Tokenizer:
    path = directory / "tokenizer.json"
    if path.is_file():
        return read_tokenizer(path)
    if not _has_backend(directory, config):
        raise UserError(
            f"tokenizer directory {directory} lacks tokenizer.json (and is no {' or '.join(_QWEN2_CLASSES)} with vocab.json "
            f"and merges.txt; tokenizer_class={config.get('tokenizer_class')!r}): give a checkpoint folder that has it"
        )
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    added = config.get("added_tokens_decoder") or {}
    try:
        return byte_level_bpe(vocab, merges, added)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{directory / 'tokenizer_config.json'} has an added_tokens_decoder that is no table of id to token: restore the "
            f"file"
        ) from error


# How Qwen2 splits text before merging: this is part of the tokenizer's definition, but in none of its data files.
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
    """Build Qwen2's tokenizer. ``added``: id (as text) -> token, the ``added_tokens_decoder`` of ``tokenizer_config.json``."""
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
