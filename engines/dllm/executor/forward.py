"""One packed forward, as a captured graph or operator by operator, and the second one guidance takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engines.dllm.executor.graphs import StepGraphs
from engines.dllm.executor.state import RequestState
from engines.dllm.executor.step import EagerRows, Forwarded, GraphRows, Guidance, StepLayout
from engines.dllm.plan import PlanItem, StepPlan
from engines.models.protocol import DiffusionModel
from engines.runtime.staging import Staging


class PackedForward:
    def __init__(
        self, model: DiffusionModel, state: RequestState, staging: Staging, graphs: StepGraphs | None = None
    ) -> None:
        self._model, self._state, self._staging = model, state, staging
        self._graphs = graphs

    def __call__(self, plan: StepPlan, items: Sequence[PlanItem], layout: StepLayout) -> Forwarded:
        if isinstance(layout.rows, GraphRows):
            assert self._graphs is not None
            return Forwarded(self._graphs.run(*layout.rows), None, layout.num_rows)
        assert layout.rows is not None
        ids = self._state.tokens.take(layout.rows.rows.flat)
        hidden = self._model.hidden(ids, layout.rows.rotary, layout.rows.attend)
        guidance = self._unconditional(items, layout.rows, ids) if self._state.guided else None
        return Forwarded(hidden, guidance, layout.num_rows)

    def rest(self) -> None:
        return

    def _unconditional(self, items: Sequence[PlanItem], eager: EagerRows, ids: Tensor) -> Guidance:
        """Hidden states of a second forward with the prompts masked (classifier-free guidance)."""
        rows = eager.rows
        requests = [self._state.request(item) for item in items]
        lengths = [end - start for start, end in (*rows.refresh_runs, *rows.reuse_q_runs)]
        pad = (0, len(ids) - sum(lengths))
        prompt_len = np.pad(np.repeat([request.prompt_len for request in requests], lengths), pad)
        scale = np.pad(np.repeat([request.generation.cfg_scale for request in requests], lengths), pad)
        masked = torch.where(rows.position < self._staging.ints(prompt_len), self._model.config.mask_token_id, ids)
        hidden = self._model.hidden(masked, eager.rotary, eager.attend)
        return Guidance(hidden, self._staging.floats(scale).to(hidden.dtype))
