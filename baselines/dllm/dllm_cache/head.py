"""dLLM-Cache's output head: the greedy token of exponentials, and guidance whose difference is kept."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from baselines.dllm.dllm_cache.forward import Residual
from baselines.dllm.static.head import Project, Reduce
from engines.dllm.denoise import Reduced, Reduction, Sampling, reduce_in_parts
from engines.dllm.executor.step import Guidance
from engines.models.protocol import DiffusionModel


def logits_with_residual(model: DiffusionModel, residual: Residual) -> Project:
    """Logits; the difference guidance makes is kept until the next forward without the prompts."""

    def project(hidden: Tensor, guidance: Guidance | None) -> Tensor:
        logits = model.logits(hidden)
        if guidance is None:
            return logits
        if residual.logits is None:
            residual.logits = logits - model.logits(guidance.hidden)
        scale = guidance.scale.unsqueeze(1)
        return torch.where(scale > 0, (logits - residual.logits) + (scale + 1) * residual.logits, logits)

    return project


def reduce_by_exponentials(reduction: Reduction) -> Reduce:
    """LLaDA's rule; rows that draw their token are reduced by ``reduction``."""
    by_exponentials = partial(reduce_exponentials, suppress_id=reduction.suppress_id)

    def reduce(logits: Tensor, wanted: Tensor | slice, sampling: Sampling | None) -> Reduced:
        token, confidence = reduce_in_parts(by_exponentials, logits, None)
        token, confidence = token[wanted], confidence[wanted]
        if sampling is None:
            return token, confidence
        drawn, drawn_confidence = reduce_in_parts(reduction, logits[wanted], sampling)
        hot = sampling.temperature > 0
        drawn_confidence = drawn_confidence.to(confidence.dtype)
        return (
            torch.where(hot, drawn, token),
            torch.where(hot | sampling.random_remasking, drawn_confidence, confidence),
        )

    return reduce


def reduce_wanted(reduction: Reduction) -> Reduce:
    """Dream's own rule ranks probabilities."""
    return lambda logits, wanted, sampling: reduce_in_parts(reduction, logits[wanted], sampling)


def reduce_exponentials(logits: Tensor, _: Sampling | None = None, *, suppress_id: int | None) -> Reduced:
    """Greedy token and its probability, both in the logits' dtype.

    The token is the argmax of exp(logits), as published: where exp overflows or distinct logits share
    an exponential, the lowest id wins.
    """
    odds = logits.exp()
    if suppress_id is not None:
        odds[:, suppress_id] = -1
    token = odds.argmax(dim=-1)
    del odds
    return token, torch.softmax(logits, dim=-1).gather(1, token.unsqueeze(1)).squeeze(1)
