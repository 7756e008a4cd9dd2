"""Log probabilities in the words of OpenAI's API: which text each token adds, and the tokens it was chosen among."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engines.ar.sampling import Logprobs
from engines.models.tokenizer import Speller

_LEAST = -9999.0
"""JSON has no minus infinity; OpenAI's servers say this."""
_INCOMPLETE = "\ufffd"
_MOST_PENDING = 3
"""Tokens that may hold the bytes of a character before its last."""


class Score(NamedTuple):
    """How likely one token is."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    """(id, log probability), the likeliest first."""


def scores_of(found: Logprobs) -> Iterator[Score]:
    columns = (found.chosen, found.rank, found.top_ids, found.top)
    for logprob, rank, ids, top in zip(*(column.tolist() for column in columns), strict=True):
        yield Score(
            max(logprob, _LEAST), rank, tuple((token, max(each, _LEAST)) for token, each in zip(ids, top, strict=True))
        )


class TokenTexts:
    """The text that each token of a sequence adds: put together they are the whole. Bytes of a character add nothing before its
    last. Without a speller a token is named by its id."""

    def __init__(self, speller: Speller | None) -> None:
        self._speller = speller
        self._pending: list[int] = []
        """Tokens since the last whole character."""
        self._told = 0
        """Characters of these that were told."""

    def of(self, token: int) -> str:
        """The text that a token would add."""
        if self._speller is None:
            return f"token_id:{token}"
        return self._whole(self._speller, token)[self._told :]

    def add(self, token: int) -> None:
        """It is next."""
        if self._speller is None:
            return
        text = self._whole(self._speller, token)
        if len(self._pending) < _MOST_PENDING and self._speller.behind((*self._pending, token)).endswith(_INCOMPLETE):
            self._pending.append(token)
            self._told = len(text)
        else:
            self._pending, self._told = [], 0

    def _whole(self, speller: Speller, token: int) -> str:
        text = speller.behind((*self._pending, token))
        return text if len(self._pending) == _MOST_PENDING else text.rstrip(_INCOMPLETE)


class ScoredTokens:
    """The tokens of one choice as they come, each with its score, None of a prompt's first."""

    def __init__(self, speller: Speller | None, *, is_chat: bool) -> None:
        self._texts, self._is_chat = TokenTexts(speller), is_chat
        self._offset = 0

    def worded(self, ids: Sequence[int], scores: Sequence[Score | None]) -> dict[str, list[Any]]:
        """``logprobs`` of a choice, or of a chunk of it; parts of one choice are joined list by list."""
        if self._is_chat:
            return {"content": [self._content(token, score) for token, score in zip(ids, scores, strict=True)]}
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, score in zip(ids, scores, strict=True):
            text = self._texts.of(token)
            top: dict[str, float] | None = None
            if score is not None:
                top = {text: score.logprob}
                for other, logprob in score.top:
                    name = self._texts.of(other)
                    # Tokens of one text: the likeliest stands for them.
                    top[name] = max(logprob, top.get(name, logprob))
            for column, value in zip(found.values(), (self._offset, score and score.logprob, text, top), strict=True):
                column.append(value)
            self._offset += len(text)
            self._texts.add(token)
        return found

    def _content(self, token: int, score: Score | None) -> dict[str, Any]:
        assert score is not None, "an answer has no token without a score"
        said = self._named(token, score.logprob)
        said["top_logprobs"] = [self._named(*each) for each in score.top]
        self._texts.add(token)
        return said

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._texts.of(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def prompt_logprobs(ids: Sequence[int], scores: Sequence[Score | None], speller: Speller | None) -> list[Any]:
    """The field of that name, as vLLM words it: of each place of the prompt its token and the likeliest, by id."""
    texts = TokenTexts(speller)
    found: list[Mapping[str, Any] | None] = []
    for token, score in zip(ids, scores, strict=True):
        place: dict[str, Any] | None = None
        if score is not None:
            ranked = ((token, score.logprob, score.rank), *((*each, i + 1) for i, each in enumerate(score.top)))
            place = {}
            for other, logprob, rank in ranked:
                place.setdefault(str(other), {"logprob": logprob, "rank": rank, "decoded_token": texts.of(other)})
        found.append(place)
        texts.add(token)
    return found


def joined(parts: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}
