"""The text of one answer while its ids arrive: cut at its end, at a stop text, and never in the middle of a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from engines.server.codec import Codec

FinishReason = Literal["stop", "length"]
_INCOMPLETE = "�"
"""What bytes that are no whole character decode to."""
WINDOW = 16
"""Tokens that are decoded together, at least."""


class Piece(NamedTuple):
    """What is new of an answer; ``finish_reason`` is in its last piece."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


class Answer:
    """Pieces put together are the whole: the text that ``codec`` makes of all ids up to the end.

    ``ignores_eos`` takes end tokens as any other. An answer that has ended takes no more ids.
    """

    def __init__(self, codec: Codec, stop: Sequence[str] = (), *, ignores_eos: bool = False) -> None:
        self._codec = codec
        self._stop = tuple(stop)
        self._ends = frozenset() if ignores_eos else codec.end_ids
        self._ids: list[int] = []
        self._text = _GrowingText(codec)
        self._num_told = 0
        """Characters."""
        self.num_tokens = 0
        """Up to and including the one that ended it."""
        self.finish_reason: FinishReason | None = None

    def add(self, token_ids: Sequence[int], *, is_last: bool) -> Piece:
        assert self.finish_reason is None, "the answer has ended"
        before = len(self._ids)
        place = next((i for i, token in enumerate(token_ids) if token in self._ends), None)
        self._ids += token_ids if place is None else token_ids[:place]
        self.num_tokens = len(self._ids) + (place is not None)
        if place is not None:
            self.finish_reason = "stop"
        elif is_last:
            self.finish_reason = "length"
        text = self._codec.decode(self._ids) if self.finish_reason is not None else self._text.of(self._ids)
        # A stop text may have begun in what was held back, not in what was told.
        found = [at for each in self._stop if (at := text.find(each, self._num_told)) >= 0]
        if found:
            self.finish_reason = "stop"
            end = min(found)
            self._cut(end, before)
        else:
            end = len(text) if self.finish_reason is not None else self._safe_end(text)
        piece = Piece(text[self._num_told : end], tuple(self._ids[before:]), self.finish_reason)
        self._num_told = max(self._num_told, end)
        return piece

    def _safe_end(self, text: str) -> int:
        """How far the text is what it will be: before bytes of half a character, or the beginning of a stop text."""
        end = len(text.rstrip(_INCOMPLETE))
        longest = max(map(len, self._stop), default=0)
        for start in range(max(self._num_told, end - longest + 1), end):
            if any(each.startswith(text[start:end]) for each in self._stop):
                return start
        return max(self._num_told, end)

    def _cut(self, end: int, before: int) -> None:
        """Keep the fewest ids, but for those told before, whose text has the stop text that begins at ``end``."""
        low, high = before, len(self._ids)
        while low < high:
            middle = (low + high) // 2
            text = self._codec.decode(self._ids[:middle])
            if any(text.startswith(each, end) for each in self._stop):
                high = middle
            else:
                low = middle + 1
        del self._ids[low:]
        self.num_tokens = low


class _GrowingText:
    """The text of ids of which there are ever more: no call decodes more than two windows of them.

    What is behind a whole character is settled. The window before goes along, as a tokenizer may treat the first token
    of a text as no other.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._settled = ""
        """Text of the ids before ``_end``."""
        self._start = self._end = 0
        self._overlap = 0
        """Characters of the ids from ``_start`` to ``_end``."""

    def of(self, ids: Sequence[int]) -> str:
        found = self._codec.decode(ids[self._start :])
        text = self._settled + found[self._overlap :]
        if len(ids) - self._end >= WINDOW and not text.endswith(_INCOMPLETE):
            own = self._codec.decode(ids[self._end :])
            if own:
                self._settled, self._start, self._end, self._overlap = text, self._end, len(ids), len(own)
        return text
