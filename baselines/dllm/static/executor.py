"""Static batches as published code runs them, which the paper compares with (§3.1, §6.1). Padded rows are computed, and one call attends
over [n, T] rows with a mask over the keys of padding. The output head materialises logits, and a softmax, of every row at once, wanted or
not (§3.2). The module also measures what a batch holds in its worst steps, on the model and device that will serve."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from traceback import clear_frames

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.attention.backends import HostVarlen, VarlenAttention
from engines.attention.registry import batch_attention
from engines.dllm.config import DelayedCache, EngineConfig, GenerationConfig
from engines.dllm.denoise import Reduced, Reduction, Sampling, reduce_in_parts
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import Shared, peak_bytes
from engines.dllm.executor.graphs import PackedForward
from engines.dllm.executor.layout import PackedLayout
from engines.dllm.executor.output import guided_logits
from engines.dllm.executor.step import Candidates, Guidance, StepRows
from engines.dllm.executor.torch import TorchExecutor
from engines.dllm.method import Sampler
from engines.dllm.plan import Executor, ExecutorError, PlanItem, Request
from engines.dllm.scheduling import KvPool
from engines.errors import is_out_of_memory
from engines.kernels.host import Runs, attend_runs
from engines.models.config import ModelConfig
from engines.models.protocol import Attend, DiffusionModel
from engines.runtime.device import PoolTensors, Staging, store_by_index
from engines.runtime.rows import MIN_ROWS, Ints
from engines.runtime.step_timer import StepTimer

Project = Callable[[Tensor, Guidance | None], Tensor]
"""[N, V] logits of hidden states [N, d]."""
Reduce = Callable[[Tensor, Tensor | slice, Sampling | None], Reduced]
"""Token and confidence of the wanted rows of logits [N, V]."""


class MonolithicHead:
    """Computes the logits of every row. Published code also holds the softmax of all rows at once, sometimes in float64; we bound
    that."""

    def __init__(self, project: Project, reduce: Reduce) -> None:
        self._project, self._reduce = project, reduce

    def __call__(
        self, hidden: Tensor, guidance: Guidance | None, candidates: Candidates, sampling: Sampling | None
    ) -> Reduced:
        wanted = slice(None) if candidates.is_every_row else candidates.row
        return self._reduce(self._project(hidden, guidance), wanted, sampling)

    def logit_rows(self, num_rows: int, wanted: int) -> int:
        return num_rows


def reduce_every_row(reduction: Reduction) -> Reduce:
    def reduce(logits: Tensor, wanted: Tensor | slice, sampling: Sampling | None) -> Reduced:
        if sampling is not None:
            return reduce_in_parts(reduction, logits[wanted], sampling)
        token, confidence = reduce_in_parts(reduction, logits, None)
        return token[wanted], confidence[wanted]

    return reduce


class PaddedAttend:
    """Attention of a padded batch: members are in one phase, and their slabs of the pool are equally long. Masked rows of a slab are
    multiplied by zero, so the pool must hold finite values."""

    def __init__(
        self, shape: ModelConfig, pool: PoolTensors, attention: VarlenAttention, staging: Staging, timer: StepTimer
    ) -> None:
        self._is_host = isinstance(attention, HostVarlen)
        self.pool, self._staging, self.timer = pool, staging, timer
        self.heads = shape.n_heads, shape.n_kv_heads

    def __call__(self, items: Sequence[PlanItem], rows: StepRows, pad_to: int | None) -> Attend:
        assert pad_to is not None, "a padded executor runs static batches only"
        key_tokens = [item.key_tokens for item in items]
        is_refresh = items[0].phase.is_refresh
        width = pad_to if is_refresh else max(key_tokens)
        is_ragged = len({item.window_len for item in items}) > 1 and not is_refresh
        if self._is_host:
            runs = _runs(items, pad_to, None if is_ragged else width)
            return _on_host(rows, self.pool, self.timer, runs, is_refresh=is_refresh)
        mask = None
        if min(key_tokens) < width:
            columns = torch.arange(width, device=self.pool.k.device)
            mask = (columns < self._staging.ints(key_tokens).unsqueeze(1))[:, None, None, :]
        step = _Step(self, items, rows, mask)
        if is_refresh:
            return step.refresh
        if is_ragged:
            return step.ragged
        return step.reuse_of(width)


class _Step:
    """The layers of one step. Each gets its rows of q, k and v [N, H, D] end to end, with zeros up to MIN_ROWS."""

    def __init__(self, attend: PaddedAttend, items: Sequence[PlanItem], rows: StepRows, mask: Tensor | None) -> None:
        self.items, self.rows, self.pool, self.timer, self.mask = items, rows, attend.pool, attend.timer, mask
        self.num_rows, self.is_exact = rows.num_rows, rows.num_rows >= MIN_ROWS
        self.group = attend.heads[0] // attend.heads[1]
        n, head_dim = len(items), self.pool.k.shape[3]
        self.wide, self.narrow = ((n, rows.num_rows // n, each, head_dim) for each in attend.heads)

    def refresh(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.timer.lap_inside("gemm")
        if self.rows.pack is not None:
            self.rows.pack(self.pool.k[layer], self.pool.v[layer], q, k, v)
            self.timer.lap_inside("selection")
        q, k, v = self._drop_padding(q, k, v)
        return self._attention(q, k.view(self.narrow).transpose(1, 2), v.view(self.narrow).transpose(1, 2))

    def ragged(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Members near the ends of answers of different lengths: each attends alone over its own slab."""
        self.timer.lap_inside("gemm")
        _, k, v = self._drop_padding(q, k, v)
        store_by_index(self.pool.k[layer], self.pool.v[layer], self.rows.pool_row, k, v)
        outputs, end = [], 0
        for item in self.items:
            start, end = end, end + item.window_len
            slab = slice(item.kv_start, item.kv_start + item.key_tokens)
            own_k, own_v = (
                pool[layer, slab].repeat_interleave(self.group, dim=1).transpose(0, 1)[None]
                for pool in (self.pool.k, self.pool.v)
            )
            own_q = q[start:end].transpose(0, 1)[None]
            outputs.append(F.scaled_dot_product_attention(own_q, own_k, own_v)[0].transpose(0, 1))
        return self._pad_rows(torch.cat(outputs))

    def reuse_of(self, width: int) -> Attend:
        """Members with equal windows: one call attends over their slabs."""
        slabs_k, slabs_v = (_slabs(pool, self.items, width) for pool in (self.pool.k, self.pool.v))
        keys, values = ([slab.transpose(1, 2) for slab in slabs] for slabs in (slabs_k, slabs_v))
        # If all members keep equally many rows, the block's own rows are a plain part of the slabs.
        block_rows = None if self.mask is not None else slice(self.items[0].kept_rows, width)

        def reuse(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.timer.lap_inside("gemm")
            q, k, v = self._drop_padding(q, k, v)
            if block_rows is None:
                store_by_index(self.pool.k[layer], self.pool.v[layer], self.rows.pool_row, k, v)
            else:
                slabs_k[layer][:, block_rows].copy_(k.view(self.narrow))
                slabs_v[layer][:, block_rows].copy_(v.view(self.narrow))
            return self._attention(q, keys[layer], values[layer])

        return reuse

    def _drop_padding(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Drop the rows that fill up to MIN_ROWS."""
        return (q, k, v) if self.is_exact else (q[: self.num_rows], k[: self.num_rows], v[: self.num_rows])

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q is [N, H, D]; k and v are [n, Hkv, Lk, D]."""
        if self.group > 1:
            k, v = k.repeat_interleave(self.group, dim=1), v.repeat_interleave(self.group, dim=1)
        q = q.view(self.wide).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return self._pad_rows(out.transpose(1, 2).flatten(0, 1))

    def _pad_rows(self, out: Tensor) -> Tensor:
        if not self.is_exact:
            out = F.pad(out, (0, 0, 0, 0, 0, MIN_ROWS - self.num_rows))
        self.timer.lap_inside("attention")
        return out


def _runs(items: Sequence[PlanItem], pad_to: int, width: int | None) -> Runs:
    """Places of members' rows and keys: their own rows in a Refresh, else slabs of the pool. A padded batch multiplies ``width`` keys of
    each member."""
    is_refresh = items[0].phase.is_refresh
    rows = np.array([pad_to if is_refresh else item.window_len for item in items], dtype=np.int32)
    ends, num_keys = np.cumsum(rows, dtype=np.int32), np.array([item.key_tokens for item in items], dtype=np.int32)
    starts = ends - rows if is_refresh else np.array([item.kv_start for item in items], dtype=np.int32)
    lengths = num_keys if width is None else np.full_like(num_keys, width)
    return Runs(*(torch.from_numpy(values) for values in (ends - rows, ends, starts, lengths, num_keys)))


def _on_host(rows: StepRows, pool: PoolTensors, timer: StepTimer, runs: Runs, *, is_refresh: bool) -> Attend:
    """Return the attention of one step's layers, by the CPU kernel."""
    n = rows.num_rows

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        timer.lap_inside("gemm")
        pool_k, pool_v = pool.k[layer], pool.v[layer]
        if not is_refresh:
            store_by_index(pool_k, pool_v, rows.pool_row, k[:n], v[:n])
            k, v = pool_k, pool_v
        elif rows.pack is not None:
            rows.pack(pool_k, pool_v, q, k, v)
            timer.lap_inside("selection")
        out = torch.empty(q.shape, dtype=q.dtype)
        out[n:] = 0
        attend_runs(q, k, v, runs, out)
        timer.lap_inside("attention")
        return out

    return attend


def _slabs(pool: Tensor, items: Sequence[PlanItem], width: int) -> tuple[Tensor, ...]:
    """View the batch's equal slabs of the pool as [n, width, Hkv, D] for every layer."""
    start, row = items[0].kv_start, pool.stride(1)
    stride = items[1].kv_start - start if len(items) > 1 else width
    shape = (pool.shape[0], len(items), width, *pool.shape[2:])
    return pool.as_strided(shape, (pool.stride(0), stride * row, *pool.stride()[1:]), start * row).unbind()


def padded_executor(
    model: DiffusionModel,
    config: EngineConfig,
    kv_rows: int,
    *,
    batch_size: int,
    stop_ids: Collection[int] | None = None,
    profile_every: int = 0,
) -> TorchExecutor:
    """Build an executor for static batches as published code runs them: [n, T_max] rows and key-padding masks. Each member gets the ids
    it would get alone."""
    # A batch attends as it is, in one call; nothing here is ragged.
    attention = batch_attention(next(model.parameters()), model.config.head_dim)
    shared = Shared(model, config, num_slots=batch_size, attention=attention)
    kernels, state, staging, timer = shared.kernels, shared.state, shared.staging, shared.timer
    pool = shared.pool(kv_rows)
    pool.fill_with_zeros()
    rows = PackedLayout(
        model=model,
        state=state,
        timer=timer,
        selection=kernels.selection,
        attend=PaddedAttend(model.config, pool, attention, staging, timer),
        sends_spans=False,
        row_lengths=padded_lengths,
    )
    return shared.executor(
        pool=pool,
        rows=rows,
        forward=PackedForward(model, state, staging),
        head=MonolithicHead(partial(guided_logits, model, rows=slice(None)), reduce_every_row(kernels.reduction)),
        stop_ids=stop_ids,
        profile_every=profile_every,
    )


def padded_lengths(items: Sequence[PlanItem], pad_to: int | None) -> Ints:
    """Row counts of the members: in a Refresh that of the longest member, in a Reuse each member's own window."""
    assert pad_to is not None, "a padded executor runs static batches only"
    return np.array([pad_to if item.phase.is_refresh else item.window_len for item in items])


def static_batch_bytes(
    model: DiffusionModel,
    config: EngineConfig,
    sampler: Sampler,
    generation: GenerationConfig,
    *,
    longest: int,
    rows_per_request: int,
    batch_size: int,
    make_executor: Callable[[int], Executor],
) -> int:
    """Return the most bytes that ``batch_size`` requests of ``longest`` tokens hold at once, without model weights: cache slabs, token
    ids, and the temporaries of a Refresh and of the step after it.

    ``make_executor`` gets the number of cache rows. A method that caches builds its cache in the very first step here, so that one step
    holds all temporaries. Raises ExecutorError if the device has too little memory.
    """
    rule = replace(sampler.rule, delay=0) if isinstance(sampler.rule, DelayedCache) else sampler.rule
    prompt_len = longest - generation.gen_length
    token = 0 if model.config.mask_token_id else 1
    kv_rows = batch_size * rows_per_request

    def run() -> None:
        scheduler = StaticBatchScheduler(
            config, KvPool(kv_rows), rule, batch_size=batch_size, exact_steps=sampler.exact_steps
        )
        try:
            executor = make_executor(kv_rows)  # its slabs may already exceed the memory
        except RuntimeError as error:  # torch.OutOfMemoryError is a RuntimeError
            if not is_out_of_memory(error):
                raise
            # The failed frames still hold what was allocated.
            clear_frames(error.__traceback__)
            raise ExecutorError(f"out of memory for a cache of {kv_rows} rows") from error
        engine = Engine(scheduler, executor)
        for i in range(batch_size):
            engine.submit(
                Request(request_id=i, prompt_len=prompt_len, prompt_ids=(token,) * prompt_len, generation=generation)
            )
        try:
            for _ in range(2):
                record = engine.step()
                if record is not None and record.done.failed:
                    raise ExecutorError(record.done.failed[0][1])
        finally:
            engine.close()

    return peak_bytes(run, next(model.parameters()).device)
