"""The decoding operator: logits in bounded chunks, each reduced at once to (token, confidence), then
low-confidence remasking (LLaDA's sampler; dLLM-Serve §4.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.dllm.noise import gumbel_argmax

Reduced = tuple[Tensor, Tensor]
"""token [rows] int64, confidence [rows] in the logits' dtype."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Per-row sampling state; only built when some request has a temperature above zero."""

    temperature: Tensor
    keys: Tensor


def reduce_logits(logits: Tensor, sampling: Sampling | None, suppress_id: int | None) -> Reduced:
    """x0 and softmax(logits)[x0] per row, noise-free confidence also at a temperature.

    ``suppress_id`` is never chosen, but it stays in the softmax: other tokens keep their confidence.
    """
    normaliser = torch.logsumexp(logits, dim=-1)
    if suppress_id is not None:
        logits[:, suppress_id] = -torch.inf
    if sampling is None:
        best, token = logits.max(dim=-1)
        return token, torch.exp(best - normaliser)
    greedy = logits.argmax(dim=-1)
    sampled = gumbel_argmax(logits, sampling.temperature, sampling.keys)
    token = torch.where(sampling.temperature > 0, sampled, greedy)
    return token, torch.exp(logits.gather(1, token.unsqueeze(1)).squeeze(1) - normaliser)


def reduce_in_chunks(
    project: Callable[[Tensor], Tensor],
    hidden: Tensor,
    max_num_logits: int,
    sampling: Sampling | None,
    suppress_id: int | None,
) -> Reduced:
    """Logit decomposition (§4.3): at most ``max_num_logits`` rows of logits exist at any time.

    hidden [rows, d]; ``project`` is the output head. Chunks are made and released one by one.
    """
    tokens, confidences = [], []
    for start in range(0, hidden.shape[0], max_num_logits):
        part = slice(start, start + max_num_logits)
        of_chunk = sampling and Sampling(temperature=sampling.temperature[part], keys=sampling.keys[part])
        token, confidence = reduce_logits(project(hidden[part]), of_chunk, suppress_id)
        tokens.append(token)
        confidences.append(confidence)
    return torch.cat(tokens), torch.cat(confidences)


def choose(confidence: Tensor, commit: Tensor, threshold: Tensor | None) -> Tensor:
    """[n, B] bool: which positions to commit. Ties go to the lower position (``stable``).

    confidence [n, B], -inf where nothing may be committed; commit [n] is the quota. With a
    threshold [n] (inf where a request has none) every position reaching it is taken as well.
    """
    order = confidence.sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(confidence.shape[1], device=confidence.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    chosen = rank < commit.unsqueeze(1)
    if threshold is not None:
        chosen |= confidence >= threshold.unsqueeze(1)
    return chosen & (confidence > -torch.inf)


def choose_parity(confidence: Tensor, commit: list[int], offsets: list[int], lengths: list[int]) -> Tensor:
    """As ``choose`` by ``torch.topk`` on a 1-D tensor of the length the published sampler ranks
    (all T positions on a Refresh, the block on a Reuse); its order of ties is the library's."""
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
