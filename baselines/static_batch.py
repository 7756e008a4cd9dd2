"""Static batching: request-level FCFS, a batch is padded to its longest member and runs to completion.

What the paper compares with (§3.1, §6.1): no admission while a batch runs, padded rows are computed,
and the output head materialises logits for every row of the batch at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.attention import sdpa
from engines.dllm.config import EngineConfig
from engines.dllm.denoise import Reduced, Reduction, Sampling
from engines.dllm.plan import PlanItem, StepOutcome, StepPlan
from engines.dllm.torch_executor import Guidance, StepRows, TorchExecutor
from engines.models.protocol import Attend, DiffusionModel


class PaddedTorchExecutor(TorchExecutor):
    """Executes static batches as published code does: [n, T_max] rows, key-padding masks, monolithic
    logits. Each member gets the ids it would get alone."""

    def __init__(self, model: DiffusionModel, config: EngineConfig, kv_rows: int, *, batch_size: int) -> None:
        super().__init__(model, config, kv_rows, num_slots=batch_size)
        # Masked rows of a slab are multiplied by zero, so what lies there has to be finite.
        self.pool_k.zero_()
        self.pool_v.zero_()
        self._pad_to = 0

    def execute(self, plan: StepPlan) -> StepOutcome:
        assert plan.pad_to is not None, "a padded executor runs static batches only"
        self._pad_to = plan.pad_to
        return super().execute(plan)

    def _row_lengths(self, items: list[PlanItem]) -> list[int]:
        return [self._pad_to if item.phase.is_refresh else item.window_len for item in items]

    def _attend(self, items: list[PlanItem], rows: StepRows) -> Attend:
        n = len(items)
        keys = [item.key_tokens for item in items]
        is_refresh = items[0].phase.is_refresh
        width = self._pad_to if is_refresh else max(keys)
        columns = torch.arange(width, device=self.device)
        mask = (columns < torch.tensor(keys, device=self.device).unsqueeze(1))[:, None, None, :]
        start = items[0].kv_start
        stride = items[1].kv_start - start if n > 1 else width

        def batched(x: Tensor) -> Tensor:
            return x[: rows.num_rows].view(n, -1, *x.shape[1:])

        def padded(pool: Tensor) -> Tensor:
            """The batch's equal slabs of the pool as one [n, width, Hkv, D] view."""
            row = pool.stride(0)
            return pool.as_strided(
                (n, width, *pool.shape[1:]), (stride * row, *pool.stride()), pool.storage_offset() + start * row
            )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = torch.zeros_like(q)
            if is_refresh:
                out[: rows.num_rows] = sdpa(batched(q), batched(k), batched(v), mask).flatten(0, 1)
                if rows.build is not None:
                    self._pack(layer, q, k, v, rows.build)
            else:
                pool_k, pool_v = self.pool_k[layer], self.pool_v[layer]
                pool_k.index_copy_(0, rows.reuse_pool_row, k[: rows.num_rows])
                pool_v.index_copy_(0, rows.reuse_pool_row, v[: rows.num_rows])
                out[: rows.num_rows] = sdpa(batched(q), padded(pool_k), padded(pool_v), mask).flatten(0, 1)
            return out

        return attend

    def _reduce(
        self,
        hidden: Tensor,
        guidance: Guidance | None,
        head_rows: Tensor,
        reduction: Reduction,
        sampling: Sampling | None,
    ) -> Reduced:
        """Every row of the batch gets logits and a softmax at once, wanted or not."""
        logits = self._project(hidden, guidance, slice(None))
        if sampling is not None:
            return reduction(logits[head_rows], sampling)
        token, confidence = reduction(logits, None)
        return token[head_rows], confidence[head_rows]

    def _logit_rows(self, rows: StepRows, wanted: int) -> int:
        return rows.num_rows
