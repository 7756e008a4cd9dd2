"""Attention of a padded batch: one call over [n, T] rows, with a mask over the keys of padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engines.attention import HostVarlen, VarlenAttention
from engines.dllm.executor.step import StepRows
from engines.dllm.plan import PlanItem
from engines.kernels.host import Runs, attend_runs
from engines.models.config import ModelConfig
from engines.models.protocol import Attend
from engines.runtime.device import PoolTensors, Staging
from engines.runtime.rows import MIN_ROWS
from engines.runtime.step_timer import StepTimer


class PaddedAttend:
    """Members are in one phase, and their slabs of the pool are equally long. Masked rows of a slab are multiplied by
    zero, so what lies in the pool has to be finite."""

    def __init__(
        self, shape: ModelConfig, pool: PoolTensors, attention: VarlenAttention, staging: Staging, timer: StepTimer
    ) -> None:
        self._is_host = isinstance(attention, HostVarlen)
        self._pool, self._staging, self._timer = pool, staging, timer
        self._heads = shape.n_heads, shape.n_kv_heads

    def __call__(self, items: Sequence[PlanItem], rows: StepRows, pad_to: int | None) -> Attend:
        assert pad_to is not None, "a padded executor runs static batches only"
        key_tokens = [item.key_tokens for item in items]
        is_refresh = items[0].phase.is_refresh
        width = pad_to if is_refresh else max(key_tokens)
        is_ragged = len({item.window_len for item in items}) > 1 and not is_refresh
        if self._is_host:
            runs = _runs(items, pad_to, None if is_ragged else width)
            return _HostStep(rows, self._pool, self._timer, runs, is_refresh=is_refresh).attend
        mask = None
        if min(key_tokens) < width:
            columns = torch.arange(width, device=self._pool.k.device)
            mask = (columns < self._staging.ints(key_tokens).unsqueeze(1))[:, None, None, :]
        step = _Step(items, rows, self._pool, self._timer, self._heads, mask)
        if is_refresh:
            return step.refresh
        if is_ragged:
            return step.ragged
        return step.reuse_of(width)


class _Step:
    """The layers of one step, each given its rows of q, k and v [N, H, D] end to end, with zeros up to MIN_ROWS."""

    def __init__(
        self,
        items: Sequence[PlanItem],
        rows: StepRows,
        pool: PoolTensors,
        timer: StepTimer,
        heads: tuple[int, int],
        mask: Tensor | None,
    ) -> None:
        self.items, self.rows, self.pool, self.timer, self.mask = items, rows, pool, timer, mask
        self.num_rows, self.is_exact = rows.num_rows, rows.num_rows >= MIN_ROWS
        self.group = heads[0] // heads[1]
        self.wide, self.narrow = ((len(items), rows.num_rows // len(items), each, pool.k.shape[3]) for each in heads)

    def refresh(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.timer.lap_inside("gemm")
        if self.rows.pack is not None:
            self.rows.pack(self.pool.k[layer], self.pool.v[layer], q, k, v)
            self.timer.lap_inside("selection")
        q, k, v = self._own(q, k, v)
        return self._attention(q, k.view(self.narrow).transpose(1, 2), v.view(self.narrow).transpose(1, 2))

    def ragged(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Members at the end of answers of several lengths: each alone over its own slab."""
        self.timer.lap_inside("gemm")
        self._store(layer, *self._own(q, k, v)[1:])
        found, end = [], 0
        for item in self.items:
            start, end = end, end + item.window_len
            slab = slice(item.kv_start, item.kv_start + item.key_tokens)
            own_k, own_v = (
                each[layer, slab].repeat_interleave(self.group, dim=1).transpose(0, 1)[None]
                for each in (self.pool.k, self.pool.v)
            )
            own_q = q[start:end].transpose(0, 1)[None]
            found.append(F.scaled_dot_product_attention(own_q, own_k, own_v)[0].transpose(0, 1))
        return self._filled(torch.cat(found))

    def reuse_of(self, width: int) -> Attend:
        """Members with equal windows: one call over their slabs."""
        slabs_k, slabs_v = (_slabs(each, self.items, width) for each in (self.pool.k, self.pool.v))
        keys, values = ([slab.transpose(1, 2) for slab in slabs] for slabs in (slabs_k, slabs_v))
        # Where all members keep equally many rows, the block's own are a plain part of the slabs.
        own = None if self.mask is not None else slice(self.items[0].kept_rows, width)

        def reuse(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.timer.lap_inside("gemm")
            q, k, v = self._own(q, k, v)
            if own is None:
                self._store(layer, k, v)
            else:
                slabs_k[layer][:, own].copy_(k.view(self.narrow))
                slabs_v[layer][:, own].copy_(v.view(self.narrow))
            return self._attention(q, keys[layer], values[layer])

        return reuse

    def _own(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Without the rows that fill up to MIN_ROWS."""
        return (q, k, v) if self.is_exact else (q[: self.num_rows], k[: self.num_rows], v[: self.num_rows])

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.pool.k[layer].index_copy_(0, self.rows.pool_row, k)
        self.pool.v[layer].index_copy_(0, self.rows.pool_row, v)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q is [N, H, D]; k and v are [n, Hkv, Lk, D]."""
        if self.group > 1:
            k, v = k.repeat_interleave(self.group, dim=1), v.repeat_interleave(self.group, dim=1)
        q = q.view(self.wide).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return self._filled(out.transpose(1, 2).flatten(0, 1))

    def _filled(self, out: Tensor) -> Tensor:
        if not self.is_exact:
            out = F.pad(out, (0, 0, 0, 0, 0, MIN_ROWS - self.num_rows))
        self.timer.lap_inside("attention")
        return out


def _runs(items: Sequence[PlanItem], pad_to: int, width: int | None) -> Runs:
    """Where members' rows and keys lie: their own rows in a Refresh, else slabs of the pool. A padded batch multiplies
    ``width`` keys of each."""
    is_refresh = items[0].phase.is_refresh
    rows = np.array([pad_to if is_refresh else item.window_len for item in items], dtype=np.int32)
    ends, seen = np.cumsum(rows, dtype=np.int32), np.array([item.key_tokens for item in items], dtype=np.int32)
    starts = ends - rows if is_refresh else np.array([item.kv_start for item in items], dtype=np.int32)
    lengths = seen if width is None else np.full_like(seen, width)
    return Runs(*(torch.from_numpy(each) for each in (ends - rows, ends, starts, lengths, seen)))


class _HostStep:
    """The layers of one step by a CPU's kernel."""

    def __init__(self, rows: StepRows, pool: PoolTensors, timer: StepTimer, runs: Runs, *, is_refresh: bool) -> None:
        self.rows, self.pool, self.timer, self.runs, self.is_refresh = rows, pool, timer, runs, is_refresh

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.timer.lap_inside("gemm")
        pool_k, pool_v, n = self.pool.k[layer], self.pool.v[layer], self.rows.num_rows
        if not self.is_refresh:
            pool_k.index_copy_(0, self.rows.pool_row, k[:n])
            pool_v.index_copy_(0, self.rows.pool_row, v[:n])
            k, v = pool_k, pool_v
        elif self.rows.pack is not None:
            self.rows.pack(pool_k, pool_v, q, k, v)
            self.timer.lap_inside("selection")
        out = torch.empty(q.shape, dtype=q.dtype)
        out[n:] = 0
        attend_runs(q, k, v, self.runs, out)
        self.timer.lap_inside("attention")
        return out


def _slabs(pool: Tensor, items: Sequence[PlanItem], width: int) -> tuple[Tensor, ...]:
    """The batch's equal slabs of every layer of the pool as a [n, width, Hkv, D] view."""
    start, row = items[0].kv_start, pool.stride(1)
    stride = items[1].kv_start - start if len(items) > 1 else width
    shape = (pool.shape[0], len(items), width, *pool.shape[2:])
    return pool.as_strided(shape, (pool.stride(0), stride * row, *pool.stride()[1:]), start * row).unbind()
