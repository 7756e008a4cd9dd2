"""The output head of packed steps (dLLM-Serve §4.3; §3.2 for logits made all at once)."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.dllm.config import EngineConfig
from engines.dllm.decode.denoise import Reduced, Reduction, Sampling, reduce_in_chunks
from engines.dllm.decode.vocabulary import VocabularyReduction
from engines.dllm.executor.step import Candidates, Guidance, Head
from engines.models.protocol import DiffusionModel


class ChunkedHead:
    """Logits of the candidates alone, at most ``max_num_logits`` rows of them at a time."""

    def __init__(
        self,
        model: DiffusionModel,
        reduction: Reduction,
        local: VocabularyReduction | None = None,
        *,
        max_num_logits: int,
    ) -> None:
        self._model, self._max_num_logits = model, max_num_logits
        self._reduction, self._local = reduction, local

    def __call__(
        self, hidden: Tensor, guidance: Guidance | None, candidates: Candidates, sampling: Sampling | None
    ) -> Reduced:
        model, local = self._model, self._local

        def project(rows: Tensor) -> Tensor:
            return guided_logits(model, hidden, guidance, rows)

        def project_here(rows: Tensor) -> Tensor:
            return model.local_logits(hidden[rows])

        if local is None or sampling is not None or guidance is not None:
            return reduce_in_chunks(project, candidates.row, self._max_num_logits, self._reduction, sampling)
        return reduce_in_chunks(project_here, candidates.row, self._max_num_logits, local, sampling)

    def logit_rows(self, num_rows: int, wanted: int) -> int:
        return wanted


class WholeHead:
    """Logits of every row of the step at once, of which the candidates' are reduced."""

    def __init__(self, model: DiffusionModel, reduction: Reduction, local: VocabularyReduction | None = None) -> None:
        self._model = model
        self._reduction, self._local = reduction, local

    def __call__(
        self, hidden: Tensor, guidance: Guidance | None, candidates: Candidates, sampling: Sampling | None
    ) -> Reduced:
        if self._local is None or sampling is not None or guidance is not None:
            logits = guided_logits(self._model, hidden, guidance, slice(None))
            return self._reduction(logits[candidates.row], sampling)
        return self._local(self._model.local_logits(hidden)[candidates.row], sampling)

    def logit_rows(self, num_rows: int, wanted: int) -> int:
        return num_rows


def guided_logits(model: DiffusionModel, hidden: Tensor, guidance: Guidance | None, rows: Tensor | slice) -> Tensor:
    """[M, V] logits of some packed rows, guided where the step has guidance."""
    logits = model.logits(hidden[rows])
    if guidance is None:
        return logits
    base = model.logits(guidance.hidden[rows])
    scale = guidance.scale[rows].unsqueeze(1)
    return torch.where(scale > 0, base + (scale + 1) * (logits - base), logits)


def packed_head(
    model: DiffusionModel, config: EngineConfig, reduction: Reduction, local: VocabularyReduction | None
) -> Head:
    if config.logit_rows == "monolithic":
        return WholeHead(model, reduction, local)
    return ChunkedHead(model, reduction, local, max_num_logits=config.max_num_logits)
