"""Attention of a padded batch: one call over [n, T] rows, with a mask over the keys of padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.dllm.executor.step import StepRows
from engines.dllm.plan import PlanItem
from engines.models.config import ModelConfig
from engines.models.protocol import Attend
from engines.runtime.pool import PoolTensors
from engines.runtime.rows import MIN_ROWS
from engines.runtime.staging import Staging
from engines.runtime.step_timer import StepTimer


class PaddedAttend:
    """Members are in one phase, and their slabs of the pool are equally long. Masked rows of a slab are multiplied by
    zero, so what lies in the pool has to be finite."""

    def __init__(self, shape: ModelConfig, pool: PoolTensors, staging: Staging, timer: StepTimer) -> None:
        self._pool, self._staging, self._timer = pool, staging, timer
        self._heads = shape.n_heads, shape.n_kv_heads

    def __call__(self, items: Sequence[PlanItem], rows: StepRows, pad_to: int | None) -> Attend:
        assert pad_to is not None, "a padded executor runs static batches only"
        n = len(items)
        pool, head_dim = self._pool, self._pool.k.shape[3]
        key_tokens = [item.key_tokens for item in items]
        is_refresh = items[0].phase.is_refresh
        width = pad_to if is_refresh else max(key_tokens)
        mask = None
        if min(key_tokens) < width:
            columns = torch.arange(width, device=pool.k.device)
            mask = (columns < self._staging.ints(key_tokens).unsqueeze(1))[:, None, None, :]

        timer, num_rows, is_exact = self._timer, rows.num_rows, rows.num_rows >= MIN_ROWS
        wide, narrow = ((n, num_rows // n, heads, head_dim) for heads in self._heads)
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
                rows.pack(pool.k[layer], pool.v[layer], q, k, v)
                timer.lap_inside("selection")
            if not is_exact:
                q, k, v = q[:num_rows], k[:num_rows], v[:num_rows]
            return attention(q.view(wide), k.view(narrow).transpose(1, 2), v.view(narrow).transpose(1, 2))

        windows = [item.window_len for item in items]
        ends = list(accumulate(windows))

        def ragged(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Members at the end of answers of several lengths: each alone over its own slab."""
            timer.lap_inside("gemm")
            pool.k[layer].index_copy_(0, rows.pool_row, k[:num_rows])
            pool.v[layer].index_copy_(0, rows.pool_row, v[:num_rows])
            found = []
            for item, window, end in zip(items, windows, ends, strict=True):
                slab = slice(item.kv_start, item.kv_start + item.key_tokens)
                own_k, own_v = (
                    each[layer, slab].repeat_interleave(group, dim=1).transpose(0, 1)[None] for each in (pool.k, pool.v)
                )
                own_q = q[end - window : end].transpose(0, 1)[None]
                found.append(F.scaled_dot_product_attention(own_q, own_k, own_v)[0].transpose(0, 1))
            out = torch.cat(found)
            if not is_exact:
                out = F.pad(out, (0, 0, 0, 0, 0, MIN_ROWS - num_rows))
            timer.lap_inside("attention")
            return out

        if is_refresh:
            return refresh
        if len(set(windows)) > 1:
            return ragged
        slabs_k, slabs_v = _slabs(pool.k, items, width), _slabs(pool.v, items, width)
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
                pool.k[layer].index_copy_(0, rows.pool_row, k)
                pool.v[layer].index_copy_(0, rows.pool_row, v)
            return attention(q.view(wide), keys[layer], values[layer])

        return reuse


def _slabs(pool: Tensor, items: Sequence[PlanItem], width: int) -> tuple[Tensor, ...]:
    """The batch's equal slabs of every layer of the pool as a [n, width, Hkv, D] view."""
    start, row = items[0].kv_start, pool.stride(1)
    stride = items[1].kv_start - start if len(items) > 1 else width
    shape = (pool.shape[0], len(items), width, *pool.shape[2:])
    return pool.as_strided(shape, (pool.stride(0), stride * row, *pool.stride()[1:]), start * row).unbind()
