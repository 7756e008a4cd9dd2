"""Greedy tokens and confidences of logits whose columns lie on several ranks, which are not gathered."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.dllm.decode.denoise import Reduced, Reduction, Sampling
from engines.kernels.confidence import Partial, combine, combine_reference, partial, partial_reference
from engines.models.protocol import DiffusionModel, Ranks
from engines.parallel.division import span


@dataclass(frozen=True, kw_only=True)
class VocabularyReduction(Reduction):
    """``Reduction`` by ``max_prob``, without sampling, of the columns [first, first + own) a rank holds.

    Four numbers of a row go round: the largest logit that may be chosen, its id, the largest of all and the sum of
    exponentials relative to it. All ranks get the same answer: of equal logits the lowest id, as one process.
    Confidences differ from one process's by the rounding of sums alone.
    """

    ranks: Ranks
    first: int
    is_fused: bool = False
    """Whether the Triton kernel makes a rank's numbers."""

    def __call__(self, logits: Tensor, sampling: Sampling | None) -> Reduced:
        """``logits`` [rows, own] may be overwritten; of a bare ``DiffusionModel.local_logits``."""
        assert sampling is None, "tokens are drawn from whole rows"
        is_wide = self.dtype == "float64"
        wide = torch.float64 if is_wide else torch.promote_types(logits.dtype, torch.float32)
        is_fused = self.is_fused and not is_wide
        summed = partial if is_fused else partial_reference
        # Ids are exact in float64, and so are logits of any dtype.
        part = summed(logits.to(torch.float64) if is_wide else logits, self.suppress_id, self.first)
        own = torch.stack([field.double() for field in part])
        best, token, maximum, sumexp = self.ranks.all_gather(own.unsqueeze(0), dim=0).unbind(1)
        parts = Partial(best.to(wide), token.long(), maximum.to(wide), sumexp.to(wide))
        token, confidence = combine(parts) if is_fused else combine_reference(parts)
        rounded = confidence if is_wide else confidence.to(logits.dtype)
        return token, rounded.to(wide)


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
