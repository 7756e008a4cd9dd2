"""Chooses the next token of each sequence, greedily or by the sequence's own seed, and its log probabilities.

A draw depends only on (seed, position), and only a row's own sequence shapes it. So a sequence gets the same tokens alone, in
any batch and after it was preempted. Shapes: m sequences, V vocabulary rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engines.ar.sampling import MOST_LOGPROBS, Logprobs, SamplingParams
from engines.runtime.device import Staging
from engines.runtime.noise import gumbel_argmax, row_keys
from engines.runtime.rows import Ints

NUM_CANDIDATES = 1024
"""Tokens of a row among which a host looks for its nucleus first."""


class Draws(NamedTuple):
    """Parameters and random keys for the draws of m sequences, some of which do not take the likeliest token."""

    temperature: Tensor
    """[m] float64"""
    top_p: Tensor
    """[m] float64"""
    keys: Tensor
    """[m] int64, one for each sequence and position."""
    keeps_all: bool
    """Whether all rows keep all tokens."""
    top_k: Tensor | None = None
    """[m] int64, 0 for all; None if no row has one."""
    min_p: Tensor | None = None
    """[m] float64; None if no row has one."""

    @classmethod
    def of(cls, each: Sequence[SamplingParams], positions: Ints, staging: Staging) -> "Draws | None":
        """Return the draws of the tokens at ``positions`` [m]; None if every sequence takes the likeliest token."""
        if all(params.temperature == 0 for params in each):
            return None
        seeds, places, top_k = staging.send(
            np.array([params.seed for params in each], dtype=np.int64),
            positions,
            np.array([params.top_k for params in each], dtype=np.int64),
        )
        temperature, top_p, min_p = (
            staging.floats(column) for column in np.array([(p.temperature, p.top_p, p.min_p) for p in each]).T
        )
        return cls(
            temperature,
            top_p,
            draw_keys(seeds, places),
            all((params.top_p, params.top_k, params.min_p) == (1, 0, 0) for params in each),
            top_k if any(params.top_k for params in each) else None,
            min_p if any(params.min_p for params in each) else None,
        )


def draw_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return keys [m] int64 for seeds and positions [m] int64."""
    return row_keys(seeds, torch.zeros_like(seeds), positions)


def next_tokens(logits: Tensor, draws: Draws | None) -> Tensor:
    """Return ids [m] for logits [m, V]; without draws all rows are greedy."""
    if draws is None:
        return likeliest(logits)
    kept = None
    if not draws.keeps_all:
        kept = nucleus(logits, draws.temperature, draws.top_p, draws.top_k, draws.min_p)
    return gumbel_argmax(logits, draws.temperature, draws.keys, kept)


def likeliest(logits: Tensor) -> Tensor:
    """Return the likeliest ids [m]; of equally likely ones the lowest."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    # numpy's argmax takes a tenth of the time of torch's in float32, and a twentieth in bfloat16.
    return torch.from_numpy(logits.float().numpy().argmax(axis=-1))


def nucleus(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor | None = None, min_p: Tensor | None = None
) -> Tensor:
    """Return bool [m, V]: the tokens of softmax(logits / temperature) that ``min_p``, ``top_k`` and ``top_p`` keep, in this order.

    At least one is kept. ``top_k`` keeps all tokens as likely as the last. In ``top_p``, the lower id of equally likely tokens
    comes first. Temperature 0 keeps the likeliest.
    """
    if logits.device.type != "cpu" or logits.shape[1] <= 4 * NUM_CANDIDATES:
        return _nucleus_of_all(logits, temperature, top_p, top_k, min_p)
    kept, is_sure = _nucleus_of_likeliest(logits, temperature, top_p, top_k, min_p)
    if not is_sure.all():
        unsure = (~is_sure).nonzero()[:, 0]
        parts = (part if part is None else part[unsure] for part in (logits, temperature, top_p, top_k, min_p))
        kept[unsure] = _nucleus_of_all(*parts)  # type: ignore[arg-type]
    return kept


def _nucleus_of_all(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor | None, min_p: Tensor | None
) -> Tensor:
    values, order = logits.to(torch.float64).sort(dim=-1, descending=True, stable=True)
    probs = torch.softmax(_heated(values, values[:, :1], temperature), dim=-1)
    kept, _ = _cut(values, probs, top_p, top_k, min_p)
    return torch.zeros_like(kept).scatter_(1, order, kept)


def _nucleus_of_likeliest(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor | None, min_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return ``nucleus`` from the ``NUM_CANDIDATES`` likeliest tokens of each row, and bool [m]: rows of which they hold all that is kept.

    A host sorts a vocabulary in some ten times the time that finding its likeliest tokens takes.
    """
    candidates = logits.topk(NUM_CANDIDATES, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, place = logits.gather(1, candidates).to(torch.float64).sort(dim=-1, descending=True, stable=True)
    whole = _heated(logits.to(torch.float64), values[:, :1], temperature).exp_().sum(dim=-1, keepdim=True)
    probs = _heated(values, values[:, :1], temperature).exp_() / whole
    kept, ends_inside = _cut(values, probs, top_p, top_k, min_p, rest=1 - probs.sum(dim=-1, keepdim=True))
    is_cut = torch.zeros_like(ends_inside)
    for limit in (top_k, min_p):
        if limit is not None:
            is_cut |= limit.unsqueeze(1) > 0
    # A token that is as likely as the last candidate may have equals among the others.
    is_inside = (ends_inside | ~is_cut) & ~(kept & (values <= values[:, -1:])).any(dim=-1, keepdim=True)
    keeps_all = ~is_cut & (top_p == 1).unsqueeze(1)
    by_token = torch.zeros(logits.shape, dtype=torch.bool).scatter_(1, candidates.gather(1, place), kept)
    return by_token | keeps_all, (is_inside | keeps_all)[:, 0]


def _heated(values: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """(values - largest) / temperature: we subtract the largest, so that no temperature overflows."""
    return (values - largest) / temperature.clamp(min=torch.finfo(torch.float64).tiny).unsqueeze(1)


def _cut(
    values: Tensor, probs: Tensor, top_p: Tensor, top_k: Tensor | None, min_p: Tensor | None, rest: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return bool [m, n]: which of n sorted tokens are kept, and bool [m, 1]: whether ``min_p`` or ``top_k`` end among them. ``rest`` is the
    probability of all other tokens."""
    kept = torch.ones_like(probs, dtype=torch.bool)
    if min_p is not None:
        kept &= probs >= min_p.unsqueeze(1) * probs[:, :1]
    if top_k is not None:
        last = torch.where(top_k > 0, top_k.clamp(max=values.shape[1]), values.shape[1]) - 1
        kept &= values >= values.gather(1, last.unsqueeze(1))
    ends_inside = ~kept[:, -1:]
    mass = torch.where(kept, probs, 0.0)
    mass_before = mass.cumsum(dim=-1) - mass
    total = mass.sum(dim=-1, keepdim=True) + torch.where(ends_inside, 0.0, rest)
    top_p = top_p.unsqueeze(1)
    kept &= (mass_before < top_p * total) | (top_p == 1)
    return kept, ends_inside


class LogitRules:
    """The rules, on the device, that shape one sequence's logits; its penalties are apart (``penalize``)."""

    def __init__(self, params: SamplingParams, staging: Staging) -> None:
        self.params = params
        self._allowed = None if params.allowed_token_ids is None else staging.ints(params.allowed_token_ids)
        self._ends = staging.ints(params.end_ids) if params.end_ids else None
        self._biased = staging.ints([token for token, _ in params.logit_bias])
        self._bias = staging.floats(np.array([bias for _, bias in params.logit_bias], dtype=np.float64)).float()
        words = params.bad_words
        self._openings = np.array([len(word) - 1 for word in words], dtype=np.int64)
        longest = int(self._openings.max(initial=0))
        # Aligned to the right; -1 in front stands for any token.
        openings = np.full((len(words), longest), -1, dtype=np.int64)
        for row, word in zip(openings, words, strict=True):
            row[longest - len(word) + 1 :] = word[:-1]
        self._opening_ids = staging.ints(openings)
        self._last_ids = staging.ints([word[-1] for word in words])

    def apply(self, logits: Tensor, tokens: Tensor, staging: Staging) -> None:
        """Shape logits [V] float32 in place; ``tokens`` [n] are all tokens of the sequence so far."""
        if self._allowed is not None:
            allowed = logits.index_select(0, self._allowed)
            logits.fill_(-torch.inf).index_copy_(0, self._allowed, allowed)
        num_answered = len(tokens) - self.params.prompt_tokens
        if self.params.bad_words:
            recent = tokens[-self._opening_ids.shape[1] :] if self._opening_ids.shape[1] else tokens[:0]
            opening = self._opening_ids[:, self._opening_ids.shape[1] - len(recent) :]
            (is_whole,) = staging.send((self._openings <= num_answered).astype(np.int64))
            is_next = ((opening == recent) | (opening < 0)).all(dim=1) & (is_whole > 0)
            logits.index_put_((self._last_ids,), torch.where(is_next, -torch.inf, 0.0), accumulate=True)
        if self._ends is not None and num_answered < self.params.min_tokens:
            logits.index_fill_(0, self._ends, -torch.inf)
        if self.params.logit_bias:
            logits.index_add_(0, self._biased, self._bias)


def penalize(logits: Tensor, tokens: Tensor, ends: Ints, each: Sequence[SamplingParams], staging: Staging) -> Tensor:
    """Return logits [m, V] float32 after their penalties. ``tokens`` [m, n] are the sequences' tokens, each up to its ``ends`` [m]."""
    prompts, stops = staging.send(np.array([params.prompt_tokens for params in each], dtype=np.int64), ends)
    position = torch.arange(tokens.shape[1], device=tokens.device)
    is_real = position < stops.unsqueeze(1)
    is_answer = is_real & (position >= prompts.unsqueeze(1))
    seen, answered = (torch.zeros_like(logits).scatter_add_(1, tokens, mask.float()) for mask in (is_real, is_answer))
    factors = np.array([(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in each]).T
    repetition, frequency, presence = (staging.floats(column).float().unsqueeze(1) for column in factors)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where((seen > 0) & (repetition != 1), repeated, logits)
    return logits - frequency * answered - presence * (answered > 0)


class TokenScores:
    """Log probabilities of rows, before their next tokens are known."""

    def __init__(self, logits: Tensor) -> None:
        """logits [n, V], as the model made them."""
        self._all = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        # We take as many for all rows: the scores of a row must not depend on what others ask for.
        self._top = self._all.topk(min(MOST_LOGPROBS, logits.shape[1]), dim=-1)

    def of(self, tokens: Tensor) -> Logprobs:
        """Return the scores of the tokens [n] that follow the rows, each with the likeliest of its place; waits for the device."""
        chosen = self._all.gather(1, tokens.unsqueeze(1))
        rank = (self._all >= chosen).sum(dim=-1)
        top, ids = (part.cpu().numpy() for part in self._top)
        order = np.lexsort((ids, -top))
        columns = chosen[:, 0].cpu().numpy(), rank.cpu().numpy()
        return Logprobs(*columns, np.take_along_axis(ids, order, 1), np.take_along_axis(top, order, 1))
