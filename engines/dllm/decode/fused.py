"""The decode rule's reduction without a copy of the logits."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from engines.dllm.decode.denoise import Reduced, Reduction, Sampling
from engines.kernels.confidence import confidence


@dataclass(frozen=True, kw_only=True)
class FusedReduction(Reduction):
    """``Reduction`` with greedy tokens and their probabilities from one kernel: summed in float32 and rounded to the
    logits' dtype, as torch's softmax is. Draws and other confidences need whole distributions, and get them from torch."""

    def __call__(self, logits: Tensor, sampling: Sampling | None) -> Reduced:
        if sampling is not None or self.confidence != "max_prob" or self.dtype != "native":
            return super().__call__(logits, sampling)
        token, probability = confidence(logits, self.suppress_id)
        return token, probability.to(logits.dtype).to(torch.float32)


def fused(reduction: Reduction) -> FusedReduction:
    return FusedReduction(**{field.name: getattr(reduction, field.name) for field in fields(reduction)})
