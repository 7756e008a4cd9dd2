"""The decoding operator: logits in bounded chunks, each reduced at once to (token, confidence), then
remasking (LLaDA's sampler and its relatives; dLLM-Serve §4.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.dllm.config import Confidence, ConfidenceDtype
from engines.dllm.noise import gumbel_argmax, uniform

Reduced = tuple[Tensor, Tensor]
"""token [rows] int64, confidence [rows]."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Per-row randomness; only built when some request of the step needs it."""

    temperature: Tensor
    keys: Tensor
    random_remasking: Tensor
    """Rows whose confidence is drawn at random instead of read from the model."""

    def rows(self, index: slice | Tensor) -> Sampling:
        return Sampling(
            temperature=self.temperature[index], keys=self.keys[index], random_remasking=self.random_remasking[index]
        )


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """What is kept of a row of logits. ``suppress_id`` is never chosen, but it stays in the softmax:
    other tokens keep their confidence."""

    confidence: Confidence = "max_prob"
    dtype: ConfidenceDtype = "native"
    suppress_id: int | None = None

    def __call__(self, logits: Tensor, sampling: Sampling | None) -> Reduced:
        """x0 and its noise-free confidence per row; may overwrite ``logits``."""
        if self.dtype == "float64":
            logits = logits.to(torch.float64)
        if self.confidence != "max_prob":
            return self._from_probabilities(logits, sampling)
        normaliser = torch.logsumexp(logits, dim=-1)
        if self.suppress_id is not None:
            logits[:, self.suppress_id] = -torch.inf
        best, token = logits.max(dim=-1)
        if sampling is not None:
            token = _sampled(logits, token, sampling)
            best = logits.gather(1, token.unsqueeze(1)).squeeze(1)
        return token, _remasked(torch.exp(best - normaliser), sampling)

    def _from_probabilities(self, logits: Tensor, sampling: Sampling | None) -> Reduced:
        """Dream's confidences need the whole distribution: top-1 minus top-2, or negative entropy."""
        p = torch.softmax(logits, dim=-1)
        token = p.argmax(dim=-1)
        if sampling is not None:
            token = _sampled(logits, token, sampling)
        if self.confidence == "margin":
            top = p.topk(2, dim=-1).values
            return token, _remasked(top[:, 0] - top[:, 1], sampling)
        return token, _remasked((p * torch.log(p + 1e-10)).sum(dim=-1), sampling)


def _sampled(logits: Tensor, greedy: Tensor, sampling: Sampling) -> Tensor:
    token = gumbel_argmax(logits, sampling.temperature, sampling.keys)
    return torch.where(sampling.temperature > 0, token, greedy)


def _remasked(confidence: Tensor, sampling: Sampling | None) -> Tensor:
    """Random remasking draws the confidence, from another stream than the tokens'."""
    if sampling is None:
        return confidence
    drawn = uniform(~sampling.keys, 1).squeeze(1).to(confidence.dtype)
    return torch.where(sampling.random_remasking, drawn, confidence)


def reduce_in_chunks(
    project: Callable[[Tensor], Tensor],
    rows: Tensor,
    max_num_logits: int,
    reduction: Reduction,
    sampling: Sampling | None,
) -> Reduced:
    """Logit decomposition (§4.3): at most ``max_num_logits`` rows of logits exist at any time.

    ``project`` gives the logits of a part of ``rows``; chunks are made and released one by one.
    """
    tokens, confidences = [], []
    for start in range(0, rows.shape[0], max_num_logits):
        part = slice(start, start + max_num_logits)
        token, confidence = reduction(project(rows[part]), None if sampling is None else sampling.rows(part))
        tokens.append(token)
        confidences.append(confidence)
    return torch.cat(tokens), torch.cat(confidences)


def choose(confidence: Tensor, commit: Tensor, threshold: Tensor | None = None, factor: Tensor | None = None) -> Tensor:
    """[n, B] bool: which positions to commit. Ties go to the lower position (``stable``).

    confidence [n, B], -inf where nothing may be committed; commit [n] is the quota. With a
    threshold [n] (inf where a request has none) every position reaching it is taken as well; with a
    factor [n] (0 where a request has none) Fast-dLLM's factor rule says how many.
    """
    order = confidence.sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(confidence.shape[1], device=confidence.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    if factor is not None:
        commit = torch.where(factor > 0, _passing(confidence.gather(1, order), factor), commit)
    chosen = rank < commit.unsqueeze(1)
    if threshold is not None:
        chosen |= confidence >= threshold.unsqueeze(1)
    return chosen & (confidence > -torch.inf)


def _passing(ranked: Tensor, factor: Tensor) -> Tensor:
    """[n] tokens the factor rule commits of ``ranked`` [n, B], best first and -inf past the candidates.

    The j-th (from 1) needs 1 - factor / (j + 1); the first always passes; the first to fail ends
    the run. Upstream's quirk is kept: if only the very last candidate fails, it is committed too.
    """
    place = torch.arange(1, ranked.shape[1] + 1, device=ranked.device)
    level = 1 - factor.unsqueeze(1) / (place + 1)
    candidates = (ranked > -torch.inf).sum(dim=1)
    passes = (ranked >= level) | (place == 1)
    run = passes.long().cumprod(dim=1).sum(dim=1).minimum(candidates)
    return torch.where(run == candidates - 1, candidates, run)


def choose_parity(confidence: Tensor, commit: list[int], offsets: list[int], lengths: list[int]) -> Tensor:
    """As ``choose`` by ``torch.topk`` on a 1-D tensor of the length the published sampler ranks
    (all T positions on a Refresh, the window on a Reuse); its order of ties is the library's."""
    chosen = torch.zeros_like(confidence, dtype=torch.bool)
    for i, (count, offset, length) in enumerate(zip(commit, offsets, lengths, strict=True)):
        if count == 0:
            continue
        ranked = confidence.new_full((length,), -torch.inf)
        width = min(confidence.shape[1], length - offset)
        ranked[offset : offset + width] = confidence[i, :width]
        index = torch.topk(ranked, count).indices - offset
        chosen[i, index[(index >= 0) & (index < width)]] = True
    return chosen & (confidence > -torch.inf)
