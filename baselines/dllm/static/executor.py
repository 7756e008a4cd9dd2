"""Static batching: request-level FCFS, a batch is padded to its longest member and runs to completion.

What the paper compares with (§3.1, §6.1): no admission while a batch runs, padded rows are computed,
and the output head materialises logits for every row of the batch at once.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engines.attention import Sdpa, VarlenAttention
from engines.dllm.config import EngineConfig
from engines.dllm.decode.denoise import Reduced, Reduction, Sampling, reduce_in_parts
from engines.dllm.executor.rows import Ints
from engines.dllm.executor.step import MIN_ROWS, Candidates, Guidance, StepRows
from engines.dllm.executor.torch import TorchExecutor
from engines.dllm.plan import PlanItem, StepOutcome, StepPlan
from engines.models.protocol import Attend, DiffusionModel


class MonolithicTorchExecutor(TorchExecutor):
    """Every row that reaches the output head gets logits at once, and a softmax, wanted or not. Published code
    holds the softmax of all rows too, in float64 where it likes; here that is bounded."""

    def _attention_backend(self) -> VarlenAttention:
        """Batches are attended to as they are, in one call; nothing here is ragged."""
        return Sdpa()

    def _reduce(
        self,
        hidden: Tensor,
        guidance: Guidance | None,
        candidates: Candidates,
        reduction: Reduction,
        sampling: Sampling | None,
    ) -> Reduced:
        wanted = slice(None) if candidates.is_every_row else candidates.row
        return self._reduce_at_once(self._logits(hidden, guidance), wanted, reduction, sampling)

    def _logits(self, hidden: Tensor, guidance: Guidance | None) -> Tensor:
        return self._project(hidden, guidance, slice(None))

    def _reduce_at_once(
        self, logits: Tensor, wanted: Tensor | slice, reduction: Reduction, sampling: Sampling | None
    ) -> Reduced:
        if sampling is not None:
            return reduce_in_parts(reduction, logits[wanted], sampling)
        token, confidence = reduce_in_parts(reduction, logits, None)
        return token[wanted], confidence[wanted]

    def _logit_rows(self, num_rows: int, wanted: int) -> int:
        return num_rows


class PaddedTorchExecutor(MonolithicTorchExecutor):
    """Executes static batches as published code does: [n, T_max] rows and key-padding masks. Each
    member gets the ids it would get alone."""

    def __init__(
        self,
        model: DiffusionModel,
        config: EngineConfig,
        kv_rows: int,
        *,
        batch_size: int,
        stop_ids: Collection[int] | None = None,
        profile_every: int = 0,
    ) -> None:
        super().__init__(model, config, kv_rows, num_slots=batch_size, stop_ids=stop_ids, profile_every=profile_every)
        # Masked rows of a slab are multiplied by zero, so what lies there has to be finite.
        self.pool_k.zero_()
        self.pool_v.zero_()
        self._pad_to = 0
        self._heads = model.config.n_heads, model.config.n_kv_heads

    def execute(self, plan: StepPlan) -> StepOutcome:
        assert plan.pad_to is not None, "a padded executor runs static batches only"
        self._pad_to = plan.pad_to
        return super().execute(plan)

    def _row_lengths(self, items: list[PlanItem]) -> Ints:
        return np.array([self._pad_to if item.phase.is_refresh else item.window_len for item in items])

    def _attend(self, items: list[PlanItem], rows: StepRows) -> Attend:
        n = len(items)
        key_tokens = [item.key_tokens for item in items]
        is_refresh = items[0].phase.is_refresh
        width = self._pad_to if is_refresh else max(key_tokens)
        mask = None
        if min(key_tokens) < width:
            columns = torch.arange(width, device=self.device)
            mask = (columns < self._ints(key_tokens).unsqueeze(1))[:, None, None, :]

        timer, num_rows, is_exact = self._timer, rows.num_rows, rows.num_rows >= MIN_ROWS
        wide, narrow = ((n, num_rows // n, heads, self.pool_k.shape[3]) for heads in self._heads)
        group = self._heads[0] // self._heads[1]

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """The rows of q [n, L, H, D] end to end, then zeros up to MIN_ROWS; k and v [n, Hkv, Lk, D]."""
            if group > 1:
                k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask).transpose(1, 2).flatten(0, 1)
            if not is_exact:
                out = F.pad(out, (0, 0, 0, 0, 0, MIN_ROWS - num_rows))
            timer.lap_inside("attention")
            return out

        def refresh(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            timer.lap_inside("gemm")
            if rows.pack is not None:
                rows.pack(self.pool_k[layer], self.pool_v[layer], q, k, v)
                timer.lap_inside("selection")
            if not is_exact:
                q, k, v = q[:num_rows], k[:num_rows], v[:num_rows]
            return attention(q.view(wide), k.view(narrow).transpose(1, 2), v.view(narrow).transpose(1, 2))

        if is_refresh:
            return refresh
        slabs_k, slabs_v = self._slabs(self.pool_k, items, width), self._slabs(self.pool_v, items, width)
        if mask is None:
            # All members keep equally many rows, so the block's own are a plain part of the slabs.
            own = slice(items[0].kept_rows, width)
            own_k, own_v = ([slab[:, own] for slab in slabs] for slabs in (slabs_k, slabs_v))
        keys, values = ([slab.transpose(1, 2) for slab in slabs] for slabs in (slabs_k, slabs_v))

        def reuse(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            timer.lap_inside("gemm")
            if not is_exact:
                q, k, v = q[:num_rows], k[:num_rows], v[:num_rows]
            if mask is None:
                own_k[layer].copy_(k.view(narrow))
                own_v[layer].copy_(v.view(narrow))
            else:
                self.pool_k[layer].index_copy_(0, rows.pool_row, k)
                self.pool_v[layer].index_copy_(0, rows.pool_row, v)
            return attention(q.view(wide), keys[layer], values[layer])

        return reuse

    @staticmethod
    def _slabs(pool: Tensor, items: list[PlanItem], width: int) -> tuple[Tensor, ...]:
        """The batch's equal slabs of every layer of the pool as a [n, width, Hkv, D] view."""
        start, row = items[0].kv_start, pool.stride(1)
        stride = items[1].kv_start - start if len(items) > 1 else width
        shape = (pool.shape[0], len(items), width, *pool.shape[2:])
        return pool.as_strided(shape, (pool.stride(0), stride * row, *pool.stride()[1:]), start * row).unbind()
