"""Log probabilities in the words of OpenAI's API: which text each token adds, and the tokens it was chosen among."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engines.ar.sampling import Logprobs
from engines.models.tokenizer import Speller
from engines.server.answer import INCOMPLETE

_LEAST = -9999.0
"""JSON has no minus infinity; OpenAI's servers say this."""
_MOST_PENDING = 3
"""Tokens that may hold bytes of a character before the one with its last."""


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
    """The text that each token of a sequence adds, as vLLM tells it: put together they are the whole, but for bytes that make no
    character. A token that ends in the middle of a character adds nothing, the one that completes it all of it."""

    def __init__(self, speller: Speller) -> None:
        self._speller = speller
        self._pending: tuple[int, ...] = ()
        """The last tokens that ended in the middle of a character."""

    def of(self, token: int) -> str:
        """The text that a token would add."""
        alone = self._speller.behind((token,))
        if INCOMPLETE in alone:
            for start in reversed(range(len(self._pending))):
                text = self._speller.behind((*self._pending[start:], token))
                if not text.endswith(INCOMPLETE):
                    return text
        return "" if alone.endswith(INCOMPLETE) else alone

    def add(self, token: int) -> None:
        """It is next."""
        self._pending = () if self.of(token) else (*self._pending, token)[-_MOST_PENDING:]


class ScoredTokens:
    """The tokens of one choice as they come, each with its score, None of a prompt's first."""

    def __init__(self, speller: Speller | None, *, is_chat: bool, has_names: bool = True) -> None:
        """Without ``has_names``, or a speller, a token is named by its id."""
        self._texts, self._is_chat = None if speller is None else TokenTexts(speller), is_chat
        self._has_names = has_names
        self._offset = 0

    def worded(self, ids: Sequence[int], scores: Sequence[Score | None]) -> dict[str, list[Any]]:
        """``logprobs`` of a choice, or of a chunk of it; parts of one choice are joined list by list."""
        if self._is_chat:
            return {"content": [self._content(token, score) for token, score in zip(ids, scores, strict=True)]}
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, score in zip(ids, scores, strict=True):
            text = self._name(token)
            top: dict[str, float] | None = None
            if score is not None:
                top = {text: score.logprob}
                for other, logprob in score.top:
                    name = self._name(other)
                    # Tokens of one text: the likeliest stands for them.
                    top[name] = max(logprob, top.get(name, logprob))
            for column, value in zip(found.values(), (self._offset, score and score.logprob, text, top), strict=True):
                column.append(value)
            self._offset += len(text)
            self._add(token)
        return found

    def _name(self, token: int) -> str:
        return self._texts.of(token) if self._texts is not None and self._has_names else f"token_id:{token}"

    def _add(self, token: int) -> None:
        if self._texts is not None:
            self._texts.add(token)

    def _content(self, token: int, score: Score | None) -> dict[str, Any]:
        assert score is not None, "an answer has no token without a score"
        said = self._named(token, score.logprob)
        said["top_logprobs"] = [self._named(*each) for each in score.top]
        self._add(token)
        return said

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        text = name if self._texts is None else self._texts.of(token)
        return {"token": name, "logprob": logprob, "bytes": list(text.encode())}


def prompt_logprobs(ids: Sequence[int], scores: Sequence[Score | None], speller: Speller | None) -> list[Any]:
    """The field of that name, as vLLM words it: of each place of the prompt its token and the likeliest, by id. Without a
    speller they have no text."""
    texts = None if speller is None else TokenTexts(speller)
    found: list[Mapping[str, Any] | None] = []
    for token, score in zip(ids, scores, strict=True):
        place: dict[str, Any] | None = None
        if score is not None:
            ranked = ((token, score.logprob, score.rank), *((*each, i + 1) for i, each in enumerate(score.top)))
            place = {}
            for other, logprob, rank in ranked:
                text = None if texts is None else texts.of(other)
                place.setdefault(str(other), {"logprob": logprob, "rank": rank, "decoded_token": text})
        found.append(place)
        if texts is not None:
            texts.add(token)
    return found


def joined(parts: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}
