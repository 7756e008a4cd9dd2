"""The text of one answer while its ids arrive, never cut inside a character, and log probabilities in the format of OpenAI's API."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from engines.ar.sampling import Logprobs
from engines.models.tokenizer import Speller
from engines.server.codec import Codec

FinishReason = Literal["stop", "length"]
INCOMPLETE = "�"
"""The character to which the bytes of an incomplete character decode."""
_MOST_HALVES = 16
"""Most tokens at the end of an answer that we search for one that ends a whole character."""
WINDOW = 16
"""Fewest tokens that we decode together."""


class Piece(NamedTuple):
    """The new part of an answer; the last piece says why the answer ended."""

    text: str
    token_ids: tuple[int, ...]
    """The new ids, up to and including the one that ended the answer."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop text or the id that ended the answer; None for the tokenizer's own end of text."""


class Stops(NamedTuple):
    """The stops that may end an answer before its length does."""

    texts: Sequence[str] = ()
    token_ids: frozenset[int] = frozenset()
    """Ids that end the answer, beside the ends that the codec knows."""
    specials: Mapping[int, str] = MappingProxyType({})
    """Stop texts by the ids of the special tokens that they are: they end an answer whose text leaves special tokens out, too."""
    ignores_eos: bool = False
    """Whether the ends that the codec knows count as ordinary tokens."""
    min_tokens: int = 0
    """Tokens of the answer before which no stop ends it."""
    are_shown: bool = False
    """Whether the stop that ended the answer is part of its text."""


NO_STOPS = Stops()


class Answer:
    """An answer in pieces. Together the pieces are the text to which ``codec`` decodes all ids up to the end.

    An answer that has ended takes no more ids.
    """

    def __init__(self, codec: Codec, stops: Stops = NO_STOPS, *, skip_special: bool = True) -> None:
        self._decode = partial(codec.decode, skip_special=skip_special)
        self._stops = stops
        self._ends = stops.token_ids | stops.specials.keys() | (frozenset() if stops.ignores_eos else codec.end_ids)
        self._unsaid = None if stops.ignores_eos else codec.eos_id
        """The end of text, which we do not tell as a stop reason."""
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
        """Characters up to the last token that ended a whole character."""
        self._num_told = self._num_searched = 0
        """Characters that were told, and characters that were searched for stop texts."""
        self._num_held: int | None = None if stops.min_tokens else 0
        """Characters of the first ``min_tokens`` tokens, in which no stop counts; None until these tokens have come."""
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens, up to and including the one that ended the answer."""
        return len(self._ids)

    def add(self, token_ids: Sequence[int], *, is_last: bool) -> Piece:
        assert self.finish_reason is None, "the answer has ended"
        before, first = len(self._ids), max(0, self._stops.min_tokens - len(self._ids))
        index = next((i for i, token in enumerate(token_ids) if i >= first and token in self._ends), None)
        self._ids += token_ids if index is None else token_ids[: index + 1]
        shown_ids = self._ids
        if index is not None:
            end_id = self._ids[-1]
            self.finish_reason = "stop"
            self._stop_reason = self._stops.specials.get(end_id, None if end_id == self._unsaid else end_id)
            shown_ids = self._ids if self._stops.are_shown else self._ids[:-1]
        elif is_last:
            self.finish_reason = "length"
        text = self._text.text_of(shown_ids) if self.finish_reason is None else self._decode(shown_ids)
        if not self._shows_halves:
            text = text[: self._whole_end(text, shown_ids, before)]
        match = self._find_stop(text)
        if match is not None:
            start, stop = match
            self.finish_reason, self._stop_reason = "stop", stop
            self._cut(start, stop, before)
            end = start + len(stop) * self._stops.are_shown
        else:
            end = len(text) if self.finish_reason is not None else self._safe_end(text)
        piece = Piece(text[self._num_told : end], tuple(self._ids[before:]), self.finish_reason, self._stop_reason)
        self._num_told = max(self._num_told, end)
        return piece

    def _whole_end(self, text: str, ids: Sequence[int], before: int) -> int:
        """Return where the last token that ended a whole character ends in the text. We searched ``before`` ids earlier."""
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
        """Return the start of the stop text that is complete first, and that text. If several end together, the first asked for wins."""
        if not self._stops.texts or len(self._ids) <= self._stops.min_tokens:
            return None
        if self._num_held is None:
            self._num_held = len(self._decode(self._ids[: self._stops.min_tokens]))
        searched = max(self._num_searched, self._num_held)
        # A stop text cannot begin in told text, as we held back its beginning. Stops that are shown are not held back.
        num_told = 0 if self._stops.are_shown else self._num_told
        match: tuple[int, str] | None = None
        # A stop that is complete only now ends in the new text, and stops that end together have the same last character.
        for stop in chain.from_iterable(self._by_last.get(last, ()) for last in {*text[searched:]}):
            start = text.find(stop, max(num_told, searched - len(stop) + 1))
            if start >= 0 and (match is None or start + len(stop) < match[0] + len(match[1])):
                match = start, stop
        self._num_searched = len(text.rstrip(INCOMPLETE))
        return match

    def _safe_end(self, text: str) -> int:
        """Return how far the text is final: up to bytes of half a character, or to what may begin a stop text."""
        end = len(text.rstrip(INCOMPLETE))
        if not self._stops.are_shown:
            for start in range(max(self._num_told, end - self._longest + 1), end):
                tail = text[start:end]
                index = bisect_left(self._beginnings, tail)
                if index < len(self._beginnings) and self._beginnings[index].startswith(tail):
                    return start
        return max(self._num_told, end)

    def _cut(self, start: int, stop: str, before: int) -> None:
        """Keep the fewest ids whose text has ``stop`` at ``start``, but at least the ``before`` ids that were told."""
        low, high = before, len(self._ids)
        while low < high:
            middle = (low + high) // 2
            text = self._decode(self._ids[:middle])
            if (text if self._shows_halves else text.rstrip(INCOMPLETE)).startswith(stop, start):
                high = middle
            else:
                low = middle + 1
        del self._ids[low:]


class _GrowingText:
    """The text of a growing list of ids; no call decodes more than two windows of them.

    Text that ends with a whole character is settled. We decode the last settled window again with the new ids, because a
    tokenizer may treat the first token of a text differently.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._settled = ""
        """Text of the ids before ``_end``."""
        self._start = self._end = 0
        self._overlap = 0
        """Characters of the ids from ``_start`` to ``_end``."""

    def text_of(self, ids: Sequence[int]) -> str:
        decoded = self._decode(ids[self._start :])
        text = self._settled + decoded[self._overlap :]
        if len(ids) - self._end >= WINDOW and not text.endswith(INCOMPLETE):
            tail = self._decode(ids[self._end :])
            if tail:
                self._settled, self._start, self._end, self._overlap = text, self._end, len(ids), len(tail)
        return text


_LEAST = -9999.0
"""Stands for minus infinity, which JSON lacks, as in OpenAI's servers."""
_MOST_PENDING = 3
"""Most tokens that hold bytes of a character before the token with its last byte."""


class Score(NamedTuple):
    """How likely one token is."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    """(id, log probability), the likeliest first."""


def scores_of(logprobs: Logprobs) -> Iterator[Score]:
    columns = (logprobs.chosen, logprobs.rank, logprobs.top_ids, logprobs.top)
    for logprob, rank, ids, top in zip(*(column.tolist() for column in columns), strict=True):
        yield Score(
            max(logprob, _LEAST), rank, tuple((token, max(each, _LEAST)) for token, each in zip(ids, top, strict=True))
        )


class TokenTexts:
    """The text that each token of a sequence adds, as in vLLM. Together they are the whole text, except for bytes that make no
    character. A token that ends inside a character adds nothing; the token that completes the character adds all of it."""

    def __init__(self, speller: Speller) -> None:
        self._speller = speller
        self._pending: tuple[int, ...] = ()
        """The last tokens that ended in the middle of a character."""

    def text_of(self, token: int) -> str:
        """Return the text that this token would add next."""
        alone = self._speller.text_after((token,))
        if INCOMPLETE in alone:
            for start in reversed(range(len(self._pending))):
                text = self._speller.text_after((*self._pending[start:], token))
                if not text.endswith(INCOMPLETE):
                    return text
        return "" if alone.endswith(INCOMPLETE) else alone

    def add(self, token: int) -> None:
        """Append this token."""
        self._pending = () if self.text_of(token) else (*self._pending, token)[-_MOST_PENDING:]


class ScoredTokens:
    """Formats the tokens of one choice as they come, each with its score, which is None for a prompt's first token."""

    def __init__(self, speller: Speller | None, *, is_chat: bool, has_names: bool = True) -> None:
        """Without ``has_names``, or a speller, a token is named by its id."""
        self._texts, self._is_chat = None if speller is None else TokenTexts(speller), is_chat
        self._has_names = has_names
        self._offset = 0

    def logprobs_field(self, ids: Sequence[int], scores: Sequence[Score | None]) -> dict[str, list[Any]]:
        """Return the ``logprobs`` of a choice, or of a chunk of it; ``join_logprobs`` joins the chunks of one choice."""
        if self._is_chat:
            return {"content": [self._chat_entry(token, score) for token, score in zip(ids, scores, strict=True)]}
        columns: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, score in zip(ids, scores, strict=True):
            text = self._token_name(token)
            top: dict[str, float] | None = None
            if score is not None:
                top = {text: score.logprob}
                for other, logprob in score.top:
                    name = self._token_name(other)
                    # If several tokens have the same text, we tell the likeliest.
                    top[name] = max(logprob, top.get(name, logprob))
            for column, value in zip(columns.values(), (self._offset, score and score.logprob, text, top), strict=True):
                column.append(value)
            self._offset += len(text)
            self._add(token)
        return columns

    def _token_name(self, token: int) -> str:
        return self._texts.text_of(token) if self._texts is not None and self._has_names else f"token_id:{token}"

    def _add(self, token: int) -> None:
        if self._texts is not None:
            self._texts.add(token)

    def _chat_entry(self, token: int, score: Score | None) -> dict[str, Any]:
        assert score is not None, "an answer has no token without a score"
        entry = self._token_entry(token, score.logprob)
        entry["top_logprobs"] = [self._token_entry(*pair) for pair in score.top]
        self._add(token)
        return entry

    def _token_entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._token_name(token)
        text = name if self._texts is None else self._texts.text_of(token)
        return {"token": name, "logprob": logprob, "bytes": list(text.encode())}


def prompt_logprobs(ids: Sequence[int], scores: Sequence[Score | None], speller: Speller | None) -> list[Any]:
    """Return the field of that name in vLLM's format: for each place of the prompt its token and the likeliest ones, by id.
    Without a speller they have no text."""
    texts = None if speller is None else TokenTexts(speller)
    entries: list[Mapping[str, Any] | None] = []
    for token, score in zip(ids, scores, strict=True):
        entry: dict[str, Any] | None = None
        if score is not None:
            ranked = ((token, score.logprob, score.rank), *((*pair, i + 1) for i, pair in enumerate(score.top)))
            entry = {}
            for other, logprob, rank in ranked:
                text = None if texts is None else texts.text_of(other)
                entry.setdefault(str(other), {"logprob": logprob, "rank": rank, "decoded_token": text})
        entries.append(entry)
        if texts is not None:
            texts.add(token)
    return entries


def join_logprobs(parts: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}
