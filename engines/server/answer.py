"""The text of one answer while its ids arrive: cut at its end, at a stop text, and never in the middle of a character."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Literal, NamedTuple

from engines.server.codec import Codec

FinishReason = Literal["stop", "length"]
INCOMPLETE = "�"
"""What bytes that are no whole character decode to."""
_MOST_HALVES = 16
"""Tokens at the end of an answer that are looked through for a whole character."""
WINDOW = 16
"""Tokens that are decoded together, at least."""


class Piece(NamedTuple):
    """What is new of an answer; why it ended is in its last piece."""

    text: str
    token_ids: tuple[int, ...]
    """Up to and including the one that ended it."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop text, or the id, that ended it; None of the tokenizer's own end of text."""


class Stops(NamedTuple):
    """What ends an answer before its length does."""

    texts: Sequence[str] = ()
    token_ids: frozenset[int] = frozenset()
    """Beside the ends that the codec knows."""
    ignores_eos: bool = False
    """Whether the ends that the codec knows are tokens as any other."""
    min_tokens: int = 0
    """Tokens before which nothing ends it."""
    are_shown: bool = False
    """Whether the stop that ended it is part of its text."""


NO_STOPS = Stops()


class Answer:
    """Pieces put together are the whole: the text that ``codec`` makes of all ids up to the end.

    An answer that has ended takes no more ids.
    """

    def __init__(self, codec: Codec, stops: Stops = NO_STOPS, *, skip_special: bool = True) -> None:
        self._decode = _decode_of(codec, skip_special=skip_special)
        self._stops = stops
        self._ends = stops.token_ids | (frozenset() if stops.ignores_eos else codec.end_ids)
        self._unsaid = None if stops.ignores_eos else codec.eos_id
        """The end that is no reason to tell."""
        self._beginnings = sorted(stops.texts)
        self._by_last: dict[str, list[str]] = {}
        """Stop texts by their last character."""
        for stop in stops.texts:
            self._by_last.setdefault(stop[-1], []).append(stop)
        self._longest = max(map(len, stops.texts), default=0)
        self._ids: list[int] = []
        self._text = _GrowingText(self._decode)
        self._shows_halves = codec.shows_half_characters
        self._num_whole = 0
        """Characters up to the last token that ended a whole one."""
        self._num_told = self._num_searched = 0
        """Characters."""
        self._num_held: int | None = None if stops.min_tokens else 0
        """Characters that nothing ends, once their tokens have come."""
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Up to and including the one that ended it."""
        return len(self._ids)

    def add(self, token_ids: Sequence[int], *, is_last: bool) -> Piece:
        assert self.finish_reason is None, "the answer has ended"
        before, first = len(self._ids), max(0, self._stops.min_tokens - len(self._ids))
        place = next((i for i, token in enumerate(token_ids) if i >= first and token in self._ends), None)
        self._ids += token_ids if place is None else token_ids[: place + 1]
        shown = self._ids
        if place is not None:
            end_id = self._ids[-1]
            self.finish_reason, self._stop_reason = "stop", None if end_id == self._unsaid else end_id
            shown = self._ids if self._stops.are_shown else self._ids[:-1]
        elif is_last:
            self.finish_reason = "length"
        text = self._text.of(shown) if self.finish_reason is None else self._decode(shown)
        if not self._shows_halves:
            text = text[: self._whole_end(text, shown, before)]
        found = self._find_stop(text)
        if found is not None:
            start, stop = found
            self.finish_reason, self._stop_reason = "stop", stop
            self._cut(start, stop, before)
            end = start + len(stop) * self._stops.are_shown
        else:
            end = len(text) if self.finish_reason is not None else self._safe_end(text)
        piece = Piece(text[self._num_told : end], tuple(self._ids[before:]), self.finish_reason, self._stop_reason)
        self._num_told = max(self._num_told, end)
        return piece

    def _whole_end(self, text: str, ids: Sequence[int], before: int) -> int:
        """Where the text of the last token that ended a whole character ends; ``before`` ids were looked through before."""
        if not text.endswith(INCOMPLETE):
            self._num_whole = len(text)
        else:
            for end in range(len(ids) - 1, max(before, len(ids) - _MOST_HALVES), -1):
                earlier = self._decode(ids[:end])
                if not earlier.endswith(INCOMPLETE):
                    self._num_whole = len(earlier)
                    break
        return self._num_whole

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """Where the stop text begins that is complete first, and which it is; of those that end together the first asked for."""
        if not self._stops.texts or len(self._ids) <= self._stops.min_tokens:
            return None
        if self._num_held is None:
            self._num_held = len(self._decode(self._ids[: self._stops.min_tokens]))
        behind = max(self._num_searched, self._num_held)
        # A stop text may have begun in what was held back, not in what was told, unless that is no part of the answer's text.
        told = 0 if self._stops.are_shown else self._num_told
        found: tuple[int, str] | None = None
        # One that is complete only now ends in what is new; those that end together have one last character.
        for stop in chain.from_iterable(self._by_last.get(last, ()) for last in {*text[behind:]}):
            start = text.find(stop, max(told, behind - len(stop) + 1))
            if start >= 0 and (found is None or start + len(stop) < found[0] + len(found[1])):
                found = start, stop
        self._num_searched = len(text.rstrip(INCOMPLETE))
        return found

    def _safe_end(self, text: str) -> int:
        """How far the text is what it will be: before bytes of half a character, or the beginning of a stop text."""
        end = len(text.rstrip(INCOMPLETE))
        if not self._stops.are_shown:
            for start in range(max(self._num_told, end - self._longest + 1), end):
                tail = text[start:end]
                nearest = bisect_left(self._beginnings, tail)
                if nearest < len(self._beginnings) and self._beginnings[nearest].startswith(tail):
                    return start
        return max(self._num_told, end)

    def _cut(self, start: int, stop: str, before: int) -> None:
        """Keep the fewest ids, but for those told before, whose text has ``stop`` at ``start``."""
        low, high = before, len(self._ids)
        while low < high:
            middle = (low + high) // 2
            text = self._decode(self._ids[:middle])
            if (text if self._shows_halves else text.rstrip(INCOMPLETE)).startswith(stop, start):
                high = middle
            else:
                low = middle + 1
        del self._ids[low:]


def _decode_of(codec: Codec, *, skip_special: bool) -> Callable[[Sequence[int]], str]:
    return codec.decode if skip_special else lambda ids: codec.decode(ids, skip_special=False)


class _GrowingText:
    """The text of ids of which there are ever more: no call decodes more than two windows of them.

    What is behind a whole character is settled. The window before goes along, as a tokenizer may treat the first token
    of a text as no other.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._settled = ""
        """Text of the ids before ``_end``."""
        self._start = self._end = 0
        self._overlap = 0
        """Characters of the ids from ``_start`` to ``_end``."""

    def of(self, ids: Sequence[int]) -> str:
        found = self._decode(ids[self._start :])
        text = self._settled + found[self._overlap :]
        if len(ids) - self._end >= WINDOW and not text.endswith(INCOMPLETE):
            own = self._decode(ids[self._end :])
            if own:
                self._settled, self._start, self._end, self._overlap = text, self._end, len(ids), len(own)
        return text
