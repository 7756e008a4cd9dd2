"""How we choose a sequence's next tokens, and what we tell about them: plain data, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.errors import require
from engines.knobs import Checked, Proportion, Range, Seed

MOST_LOGPROBS = 20
"""Most of the likeliest tokens that we tell for one position, as in vLLM's and OpenAI's servers."""


class Logprobs(NamedTuple):
    """Log probabilities of n tokens under the model's own logits, before anything shapes them. Each token has the k likeliest
    tokens of its place, the likeliest first."""

    chosen: NDArray[np.float32]
    """[n]"""
    rank: NDArray[np.int64]
    """[n], from 1: how many tokens are at least as likely as the chosen one."""
    top_ids: NDArray[np.int64]
    top: NDArray[np.float32]
    """Both [n, k]."""

    @classmethod
    def joined(cls, each: "Sequence[Logprobs]") -> "Logprobs":
        """Concatenate one or more of them; all must have the same k."""
        chosen, rank, top_ids, top = zip(*each, strict=True)
        return cls(np.concatenate(chosen), np.concatenate(rank), np.concatenate(top_ids), np.concatenate(top))

    def cut(self, start: int, end: int, most: int) -> "Logprobs":
        """Return the log probabilities of the tokens at [start, end), each with its ``most`` likeliest."""
        rows = slice(start, end)
        return Logprobs(self.chosen[rows], self.rank[rows], self.top_ids[rows, :most], self.top[rows, :most])


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Checked):
    """How one sequence's tokens are chosen. Temperature 0 is greedy, whatever ``top_p``, ``top_k`` and ``min_p`` are.

    Logits are shaped in vLLM's order: ``allowed_token_ids``, ``bad_words``, ``min_tokens``, ``logit_bias``, the repetition,
    frequency and presence penalties, then the temperature, ``min_p``, ``top_k`` and ``top_p``.
    """

    temperature: Annotated[float, Range(0, 1e6)] = 0.0
    top_p: Proportion = 1.0
    """Keeps the fewest of the likeliest tokens that together have this probability, at least one."""
    top_k: Annotated[int, Range(0)] = 0
    """Keeps this many of the likeliest tokens, and those as likely as the last; 0 keeps all."""
    min_p: Annotated[float, Range(0, 1)] = 0.0
    """Keeps tokens that have at least this share of the likeliest token's probability."""
    seed: Seed = 0
    repetition_penalty: Annotated[float, Range(above=0)] = 1.0
    """Divides positive logits of tokens of the prompt and the answer so far, and multiplies negative ones."""
    frequency_penalty: Annotated[float, Range(-2, 2)] = 0.0
    """Subtracted from a token's logit for each time that the answer has it."""
    presence_penalty: Annotated[float, Range(-2, 2)] = 0.0
    """Subtracted from the logits of tokens that the answer has."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, number that is added to its logit), each id once."""
    allowed_token_ids: tuple[int, ...] | None = None
    """If given, no other token is chosen."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids that the answer must not have: the last id of each is not chosen behind the others."""
    min_tokens: Annotated[int, Range(0)] = 0
    """Until the answer has so many tokens, none of ``end_ids`` is chosen; the vocabulary must have these."""
    end_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    """Length of the prompt, behind which the answer begins."""
    logprobs: Annotated[int, Range(0, MOST_LOGPROBS)] | None = None
    """How many of the likeliest tokens to tell beside each token of the answer; None tells no log probabilities."""
    prompt_logprobs: Annotated[int, Range(0, MOST_LOGPROBS)] | None = None
    """The same for the prompt's tokens, from the second on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ids = self.allowed_token_ids
        require(ids is None or len(ids) > 0, "allowed_token_ids=[] allows no token: give some, or leave it out")

    @property
    def penalizes(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    @property
    def shapes_logits(self) -> bool:
        """Whether greedy sampling may take another token than the model's likeliest."""
        return (
            self.penalizes
            or bool(self.logit_bias or self.bad_words)
            or self.allowed_token_ids is not None
            or (self.min_tokens > 0 and bool(self.end_ids))
        )

    @property
    def is_plain(self) -> bool:
        """Whether we take the likeliest token, and tell nothing about it."""
        tells = self.logprobs is not None or self.prompt_logprobs is not None
        return self.temperature == 0 and not self.shapes_logits and not tells

    def check_ids(self, vocabulary: int) -> None:
        """Raise UserError for an id that a vocabulary of so many rows lacks."""
        check_vocabulary("logit_bias", [token for token, _ in self.logit_bias], vocabulary)
        check_vocabulary("allowed_token_ids", self.allowed_token_ids or (), vocabulary)
        check_vocabulary("bad_words", [token for word in self.bad_words for token in word], vocabulary)


def check_vocabulary(name: str, ids: Sequence[int], vocabulary: int) -> None:
    """Raise UserError for the first of the field's ids that a vocabulary of so many rows lacks."""
    wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
    require(wrong is None, f"{name} has the id {wrong}: give ids from 0 to {vocabulary - 1}, the model's vocabulary")


GREEDY = SamplingParams()
