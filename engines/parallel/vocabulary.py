"""Greedy tokens and confidences of logits whose columns lie on several ranks, which are not gathered."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.dllm.denoise import Reduced, Reduction, Sampling
from engines.kernels.confidence import Partial, combine, partial
from engines.models.protocol import DiffusionModel, Ranks
from engines.parallel.division import span


@dataclass(frozen=True, kw_only=True)
class VocabularyReduction(Reduction):
    """``Reduction`` by ``max_prob``, without sampling, of the columns [first, first + own) a rank holds.

    Three numbers of a row go round: the largest logit, its id and the logarithm of the summed exponentials. All
    ranks get the same answer: of equal logits the lowest id, as one process. Confidences differ from one process's
    by the rounding of sums alone.
    """

    ranks: Ranks
    first: int
    is_fused: bool = False
    """Whether the Triton kernel makes a rank's numbers."""

    def __call__(self, logits: Tensor, sampling: Sampling | None) -> Reduced:
        """``logits`` [rows, own] may be overwritten; of a bare ``DiffusionModel.local_logits``."""
        assert sampling is None, "tokens are drawn from whole rows"
        if self.dtype == "float64":
            logits = logits.to(torch.float64)
        if self.is_fused and self.dtype == "native":
            part = partial(logits, self.suppress_id, self.first)
            own = torch.stack([field.double() for field in part])
            best, token, maximum, sumexp = self.ranks.all_gather(own.unsqueeze(0), dim=0).unbind(1)
            return combine(Partial(best.float(), token.long(), maximum.float(), sumexp.float()))
        normaliser = torch.logsumexp(logits, dim=-1)
        if self.suppress_id is not None and self.first <= self.suppress_id < self.first + logits.shape[1]:
            logits[:, self.suppress_id - self.first] = -torch.inf
        best, token = logits.max(dim=-1)
        # Ids are exact in float64, and so are logits of any dtype.
        own = torch.stack((best.double(), (token + self.first).double(), normaliser.double()))
        best, token, normaliser = self.ranks.all_gather(own.unsqueeze(0), dim=0).unbind(1)
        # Lower ranks hold lower ids, and of equals the first is taken.
        best, winner = best.max(dim=0)
        token = token.gather(0, winner.unsqueeze(0)).squeeze(0).to(torch.int64)
        normaliser = torch.logsumexp(normaliser, dim=0)
        confidence = torch.exp(best.to(logits.dtype) - normaliser.to(logits.dtype))
        return token, confidence.to(torch.promote_types(confidence.dtype, torch.float32))


def vocabulary_reduction(
    reduction: Reduction, model: DiffusionModel, *, is_fused: bool = False
) -> VocabularyReduction | None:
    """The same reduction for ``model.local_logits``, of steps that draw nothing at random. None where the model is
    whole, or ``reduction`` needs whole rows."""
    ranks = model.tensor_parallel
    if ranks is None or reduction.confidence != "max_prob":
        return None
    return VocabularyReduction(
        confidence=reduction.confidence,
        confidence_of=reduction.confidence_of,
        dtype=reduction.dtype,
        suppress_id=reduction.suppress_id,
        ranks=ranks,
        is_fused=is_fused,
        first=span(model.config.vocab_size, ranks.rank, ranks.size)[0],
    )
