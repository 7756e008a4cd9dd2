"""The output head of packed steps (dLLM-Serve §4.3; §3.2 for logits made all at once)."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.dllm.config import EngineConfig
from engines.dllm.decode.denoise import Reduced, Reduction, Sampling, reduce_in_chunks
from engines.dllm.decode.vocabulary import VocabularyReduction
from engines.dllm.executor.step import Candidates, Guidance
from engines.models.protocol import DiffusionModel


class PackedHead:
    """Logits of the candidates alone, at most ``max_num_logits`` rows of them at a time; or, monolithic, of every row of the
    step at once, of which the candidates' are reduced."""

    def __init__(
        self,
        model: DiffusionModel,
        config: EngineConfig,
        reduction: Reduction,
        local: VocabularyReduction | None = None,
    ) -> None:
        self._model, self._max_num_logits = model, config.max_num_logits
        self._is_monolithic = config.logit_rows == "monolithic"
        self._reduction, self._local = reduction, local

    def __call__(
        self, hidden: Tensor, guidance: Guidance | None, candidates: Candidates, sampling: Sampling | None
    ) -> Reduced:
        needs_whole_rows = self._local is None or sampling is not None or guidance is not None
        reduction = self._reduction if needs_whole_rows or self._local is None else self._local

        def project(rows: Tensor | slice) -> Tensor:
            if needs_whole_rows:
                return guided_logits(self._model, hidden, guidance, rows)
            return self._model.local_logits(hidden[rows])

        if self._is_monolithic:
            return reduction(project(slice(None))[candidates.row], sampling)
        return reduce_in_chunks(project, candidates.row, self._max_num_logits, reduction, sampling)

    def logit_rows(self, num_rows: int, wanted: int) -> int:
        return num_rows if self._is_monolithic else wanted


def guided_logits(model: DiffusionModel, hidden: Tensor, guidance: Guidance | None, rows: Tensor | slice) -> Tensor:
    """[M, V] logits of some packed rows, guided where the step has guidance."""
    logits = model.logits(hidden[rows])
    if guidance is None:
        return logits
    base = model.logits(guidance.hidden[rows])
    scale = guidance.scale[rows].unsqueeze(1)
    return torch.where(scale > 0, base + (scale + 1) * (logits - base), logits)
