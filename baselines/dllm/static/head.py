"""The output head of published code: logits, and a softmax, of every row it is given, wanted or not (§3.2)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engines.dllm.denoise import Reduced, Reduction, Sampling, reduce_in_parts
from engines.dllm.executor.output import guided_logits
from engines.dllm.executor.step import Candidates, Guidance
from engines.models.protocol import DiffusionModel

Project = Callable[[Tensor, Guidance | None], Tensor]
"""[N, V] logits of hidden states [N, d]."""
Reduce = Callable[[Tensor, Tensor | slice, Sampling | None], Reduced]
"""Token and confidence of the wanted rows of logits [N, V]."""


class MonolithicHead:
    """Published code holds the softmax of all rows at once too, in float64 where it likes; here that is bounded."""

    def __init__(self, project: Project, reduce: Reduce) -> None:
        self._project, self._reduce = project, reduce

    def __call__(
        self, hidden: Tensor, guidance: Guidance | None, candidates: Candidates, sampling: Sampling | None
    ) -> Reduced:
        wanted = slice(None) if candidates.is_every_row else candidates.row
        return self._reduce(self._project(hidden, guidance), wanted, sampling)

    def logit_rows(self, num_rows: int, wanted: int) -> int:
        return num_rows


def every_row_s_logits(model: DiffusionModel) -> Project:
    return lambda hidden, guidance: guided_logits(model, hidden, guidance, slice(None))


def reduce_every_row(reduction: Reduction) -> Reduce:
    def reduce(logits: Tensor, wanted: Tensor | slice, sampling: Sampling | None) -> Reduced:
        if sampling is not None:
            return reduce_in_parts(reduction, logits[wanted], sampling)
        token, confidence = reduce_in_parts(reduction, logits, None)
        return token[wanted], confidence[wanted]

    return reduce
