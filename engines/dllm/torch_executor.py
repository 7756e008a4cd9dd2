"""Runs step plans on a torch model, CPU or CUDA, and measures them.

Request state (token ids, seeds) lives on the device in slots. A step's metadata is built once, by
array arithmetic over plan items, and sent in one transfer; the model then runs one packed forward.
Refresh rows come first among the packed rows, so both kinds of attention read plain slices.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engines.attention import Run, varlen_attention
from engines.dllm.config import EngineConfig, require
from engines.dllm.denoise import Reduced, Sampling, choose, choose_parity, reduce_in_chunks
from engines.dllm.noise import row_keys
from engines.dllm.phase import Phase
from engines.dllm.plan import PlanItem, StepOutcome, StepPlan
from engines.dllm.request import Request
from engines.dllm.sparsity import ContextRows, importance, top_rows, top_rows_parity
from engines.models.llada import Attend, LLaDAModelLM

MIN_ROWS = 8
"""GEMMs with fewer rows take other kernels, whose rounding differs; a step is never narrower, so a
request's numbers are the same alone and in company (on CPU bit for bit)."""


class PoolWrite(NamedTuple):
    """Where a BUILD step's selection goes: entry e of request i, rank r -> pool row."""

    rows: ContextRows
    kept: list[int]
    num_context: list[int]
    entry_request: Tensor
    entry_rank: Tensor
    pool_row: Tensor


class StepRows(NamedTuple):
    """Device-side metadata of one step; N packed rows, R of them of Refresh requests."""

    slot: Tensor
    position: Tensor
    num_rows: int
    num_refresh_rows: int
    refresh_runs: list[Run]
    reuse_q_runs: list[Run]
    reuse_k_runs: list[Run]
    reuse_pool_row: Tensor
    build: PoolWrite | None


class TorchExecutor:
    """``num_slots`` requests at most are resident; the KV pool holds ``kv_rows`` rows of K and V."""

    def __init__(
        self, model: LLaDAModelLM, config: EngineConfig, kv_rows: int, *, num_slots: int | None = None
    ) -> None:
        self.model = model
        self.config = config
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        shape = model.config
        self.num_slots = num_slots or config.max_num_seqs
        self.max_len = min(config.max_model_len, shape.max_sequence_length)
        pool_shape = (shape.n_layers, kv_rows, shape.n_kv_heads, shape.head_dim)
        self.pool_k = torch.empty(pool_shape, dtype=self.dtype, device=self.device)
        self.pool_v = torch.empty(pool_shape, dtype=self.dtype, device=self.device)
        # The last column belongs to no position: padding of a ragged block is read from and written to it.
        self.tokens = torch.full(
            (self.num_slots, self.max_len + 1), shape.mask_token_id, dtype=torch.int64, device=self.device
        )
        self._free = list(range(self.num_slots))
        self._slots: dict[int, int] = {}
        self._requests: dict[int, Request] = {}
        self._draws: dict[int, int] = {}

    # ---- requests -------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Refuse what this model cannot run, before it is queued."""
        shape = self.model.config
        ids = request.prompt_ids
        require(ids is not None and len(ids) == request.prompt_len,
                f"request {request.request_id} has no prompt_ids of length prompt_len={request.prompt_len}: give the token ids")  # fmt: skip
        assert ids is not None
        require(request.total_len <= shape.max_sequence_length,
                f"prompt of {request.prompt_len} tokens + gen_length={request.generation.gen_length} exceeds the model's "
                f"max_sequence_length={shape.max_sequence_length}: shorten the prompt or the generation")  # fmt: skip
        require(0 <= min(ids) and max(ids) < shape.vocab_size,
                f"prompt_ids of request {request.request_id} hold ids outside [0, {shape.vocab_size}): use this model's tokenizer")  # fmt: skip
        require(shape.mask_token_id not in ids,
                f"prompt_ids of request {request.request_id} hold the mask id {shape.mask_token_id}: remove it from the prompt")  # fmt: skip

    def _admit(self, requests: Seq[Request]) -> None:
        for request in requests:
            slot = self._free.pop()
            self._slots[request.request_id] = slot
            self._requests[request.request_id] = request
            self._draws[request.request_id] = 0
            row = self.tokens[slot]
            row[: request.prompt_len] = torch.tensor(request.prompt_ids, dtype=torch.int64)
            row[request.prompt_len : request.total_len] = self.model.config.mask_token_id

    def release(self, request_id: int) -> tuple[int, ...]:
        slot = self._slots.pop(request_id)
        request = self._requests.pop(request_id)
        del self._draws[request_id]
        self._free.append(slot)
        return tuple(self.tokens[slot, request.prompt_len : request.total_len].tolist())

    # ---- one step -------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutcome:
        self._admit(plan.admitted)
        order = sorted(range(len(plan.items)), key=lambda i: not plan.items[i].phase.is_refresh)
        items = [plan.items[i] for i in order]
        rows = self._rows(items)
        ids = self.tokens[rows.slot, rows.position]

        started = perf_counter()
        hidden = self.model(ids, rows.position, self._attend(items, rows))
        self._synchronize()
        forward_s = perf_counter() - started

        committed, logit_rows, head_s = self._denoise(items, rows, hidden)
        by_plan = [0] * len(items)
        for place, i in enumerate(order):
            by_plan[i] = committed[place]
        return StepOutcome(
            committed=tuple(by_plan),
            query_rows=rows.num_rows,
            logit_rows=logit_rows,
            forward_s=forward_s + head_s,
            duration_s=None,
        )

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _rows(self, items: list[PlanItem]) -> StepRows:
        """Packed rows of the step, from arrays over its items."""
        slot = np.array([self._slots[item.request_id] for item in items])
        refresh = np.array([item.phase.is_refresh for item in items])
        length = np.array(self._row_lengths(items))
        first = np.array([0 if item.phase.is_refresh else item.block_start for item in items])
        base = np.concatenate(([0], np.cumsum(length)))
        num_rows = int(base[-1])
        packed = np.zeros((2, max(num_rows, MIN_ROWS)), dtype=np.int64)
        packed[0, :num_rows] = np.repeat(slot, length)
        packed[1, :num_rows] = np.arange(num_rows) + np.repeat(first - base[:-1], length)
        metadata = self._to_device(packed)

        runs = list(zip(base[:-1].tolist(), base[1:].tolist(), strict=True))
        num_refresh = int(refresh.sum())
        reuse = items[num_refresh:]
        kept = np.array([item.kv_start + item.kept_rows for item in reuse], dtype=np.int64)
        num_refresh_rows = int(base[num_refresh])
        offset = np.arange(num_refresh_rows, num_rows) + np.repeat(kept - base[num_refresh:-1], length[num_refresh:])
        build = [(item, run) for item, run in zip(items, runs, strict=True) if item.phase is Phase.BUILD]
        return StepRows(
            slot=metadata[0],
            position=metadata[1],
            num_rows=num_rows,
            num_refresh_rows=num_refresh_rows,
            refresh_runs=runs[:num_refresh],
            reuse_q_runs=runs[num_refresh:],
            reuse_k_runs=[(item.kv_start, item.kv_start + item.kept_rows + item.block_len) for item in reuse],
            reuse_pool_row=self._to_device(offset),
            build=self._pool_write(build) if build else None,
        )

    def _row_lengths(self, items: list[PlanItem]) -> list[int]:
        """Packed rows of each request; a padding subclass gives more than its query tokens."""
        return [item.query_tokens for item in items]

    def _pool_write(self, build: list[tuple[PlanItem, Run]]) -> PoolWrite:
        """Row indices of block and context of every building request, padded to the longest."""
        items = [item for item, _ in build]
        base = np.array([run[0] for _, run in build])[:, None]
        start = np.array([item.block_start for item in items])[:, None]
        block_len = np.array([item.block_len for item in items])[:, None]
        num_context = np.array([item.total_len - item.block_len for item in items])
        j = np.arange(num_context.max())[None, :]
        context_valid = j < num_context[:, None]
        # Context index j -> position: the prefix as it is, the suffix past the block.
        context = base + np.where(context_valid, np.where(j < start, j, j + block_len), 0)
        b = np.arange(block_len.max())[None, :]
        block_valid = b < block_len
        block = base + np.where(block_valid, start + b, 0)
        kept = np.array([item.kept_rows for item in items])
        entry_request = np.repeat(np.arange(len(items)), kept)
        entry_rank = np.arange(kept.sum()) - np.repeat(np.cumsum(kept) - kept, kept)
        pool_row = np.repeat(np.array([item.kv_start for item in items]), kept) + entry_rank
        return PoolWrite(
            rows=ContextRows(
                block_rows=self._to_device(block),
                block_valid=self._to_device(block_valid),
                context_rows=self._to_device(context),
                context_valid=self._to_device(context_valid),
            ),
            kept=kept.tolist(),
            num_context=num_context.tolist(),
            entry_request=self._to_device(entry_request),
            entry_rank=self._to_device(entry_rank),
            pool_row=self._to_device(pool_row),
        )

    def _attend(self, items: list[PlanItem], rows: StepRows) -> Attend:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = torch.empty_like(q)
            if rows.num_rows < out.shape[0]:
                out[rows.num_rows :] = 0
            varlen_attention(out, q, k, v, rows.refresh_runs, rows.refresh_runs)
            if rows.build is not None:
                self._pack(layer, q, k, v, rows.build)
            if rows.reuse_q_runs:
                pool_k, pool_v = self.pool_k[layer], self.pool_v[layer]
                own = slice(rows.num_refresh_rows, rows.num_rows)
                # The block's fresh rows go right behind the retained ones: one run, no concatenation.
                pool_k.index_copy_(0, rows.reuse_pool_row, k[own])
                pool_v.index_copy_(0, rows.reuse_pool_row, v[own])
                varlen_attention(out, q, pool_k, pool_v, rows.reuse_q_runs, rows.reuse_k_runs)
            return out

        return attend

    def _pack(self, layer: int, q: Tensor, k: Tensor, v: Tensor, write: PoolWrite) -> None:
        """Select this layer's context rows and pack them densely; the index map ends here (§4.5)."""
        sparsity = self.config.sparsity
        if sparsity.selection == "dense":
            source = write.rows.context_rows[write.entry_request, write.entry_rank]
            self.pool_k[layer].index_copy_(0, write.pool_row, k[source])
            self.pool_v[layer].index_copy_(0, write.pool_row, v[source])
            return
        score = importance(q, k, write.rows, sparsity.selection, sparsity.pool_kernel)
        if self.config.tie_policy == "parity":
            chosen = top_rows_parity(score, write.kept, write.num_context)
        else:
            chosen = top_rows(score, max(write.kept))
        index = chosen[write.entry_request, :, write.entry_rank]
        source = write.rows.context_rows[write.entry_request.unsqueeze(1), index]
        # Row j of head h is head h's own j-th token; one shared column serves all heads in ``uniform``.
        head = torch.arange(k.shape[1], device=k.device).unsqueeze(0)
        source = source.expand(-1, k.shape[1])
        self.pool_k[layer].index_copy_(0, write.pool_row, k[source, head])
        self.pool_v[layer].index_copy_(0, write.pool_row, v[source, head])

    # ---- decoding -------------------------------------------------------------------------

    def _denoise(self, items: list[PlanItem], rows: StepRows, hidden: Tensor) -> tuple[list[int], int, float]:
        """Commit this step's tokens in place; (committed per item, logit rows, seconds in the head)."""
        runs = rows.refresh_runs + rows.reuse_q_runs
        slot = np.array([self._slots[item.request_id] for item in items])[:, None]
        start = np.array([item.block_start for item in items])[:, None]
        length = np.array([item.block_len for item in items])[:, None]
        offset = np.arange(length.max())[None, :]
        inside = offset < length
        position = np.where(inside, start + offset, self.max_len)
        in_block = np.array(
            [
                [run[0] + (item.block_start if item.phase.is_refresh else 0)]
                for item, run in zip(items, runs, strict=True)
            ]
        )
        index = self._to_device(
            np.stack((np.broadcast_to(slot, position.shape), position, in_block + np.where(inside, offset, 0)))
        )
        valid = self._to_device(inside)
        slots, positions, packed = index[0], index[1], index[2]
        masked = (self.tokens[slots, positions] == self.model.config.mask_token_id) & valid

        if self.config.suppress_mask_token:
            # How many positions are masked is known here without asking the device; which, there.
            counts = [item.masks_left for item in items]
            candidates = (~masked).sort(dim=1, stable=True).indices
        else:
            counts = [item.block_len for item in items]
            candidates = torch.arange(masked.shape[1], device=self.device).expand_as(masked)
        request_np = np.repeat(np.arange(len(items)), counts)
        rank_np = np.arange(len(request_np)) - np.repeat(np.cumsum(counts) - counts, counts)
        request, rank = self._to_device(np.stack((request_np, rank_np)))
        place = candidates[request, rank]
        logit_rows = len(request_np)

        head_rows = packed[request, place]
        sampling = self._sampling(items, request, positions[request, place])
        if logit_rows < MIN_ROWS:
            pad = MIN_ROWS - logit_rows
            head_rows = torch.cat((head_rows, head_rows[-1:].expand(pad) if logit_rows else packed[0, :1].expand(pad)))
            if sampling is not None:
                sampling = Sampling(
                    temperature=torch.cat((sampling.temperature, sampling.temperature.new_zeros(pad))),
                    keys=torch.cat((sampling.keys, sampling.keys.new_zeros(pad))),
                )
        suppress = self.model.config.mask_token_id if self.config.suppress_mask_token else None
        started = perf_counter()
        token, confidence = self._reduce(hidden, head_rows, sampling, suppress)
        self._synchronize()
        head_s = perf_counter() - started

        x0 = torch.zeros_like(positions)
        x0[request, place] = token[:logit_rows]
        conf = torch.full(positions.shape, -torch.inf, dtype=confidence.dtype, device=self.device)
        conf[request, place] = confidence[:logit_rows]
        conf.masked_fill_(~masked, -torch.inf)
        return self._commit(items, conf, x0, slots, positions), self._logit_rows(rows, logit_rows), head_s

    def _logit_rows(self, rows: StepRows, wanted: int) -> int:
        """Rows the output head computed for ``wanted`` candidates."""
        return wanted

    def _reduce(self, hidden: Tensor, head_rows: Tensor, sampling: Sampling | None, suppress: int | None) -> Reduced:
        return reduce_in_chunks(self.model.logits, hidden[head_rows], self.config.max_num_logits, sampling, suppress)

    def _commit(self, items: list[PlanItem], conf: Tensor, x0: Tensor, slots: Tensor, positions: Tensor) -> list[int]:
        if self.config.compat == "upstream":
            first = self._to_device(np.array([item.phase is Phase.FULL and self._is_sparse for item in items]))
            conf[:, 0] = torch.where(first & (conf[:, 0] > -torch.inf), torch.inf, conf[:, 0])
        commit = [item.commit for item in items]
        thresholds = [self._requests[item.request_id].generation.threshold for item in items]
        has_threshold = any(threshold is not None for threshold in thresholds)
        if self.config.tie_policy == "parity" and not has_threshold:
            offsets = [item.block_start if item.phase.is_refresh else 0 for item in items]
            chosen = choose_parity(conf, commit, offsets, [item.query_tokens for item in items])
        else:
            limit = None
            if has_threshold:
                limit = self._to_device(np.array([np.inf if t is None else t for t in thresholds], dtype=np.float32))
            chosen = choose(conf, self._to_device(np.array(commit)), limit)
        self.tokens[slots, positions] = torch.where(chosen, x0, self.tokens[slots, positions])
        if has_threshold:
            # The one place where the host must know what the device decided.
            return chosen.sum(dim=1).tolist()
        return commit

    @property
    def _is_sparse(self) -> bool:
        return self.config.sparsity.refresh_delay > 0

    def _sampling(self, items: list[PlanItem], request: Tensor, position: Tensor) -> Sampling | None:
        generations = [self._requests[item.request_id].generation for item in items]
        draws = [self._draws[item.request_id] for item in items]
        for item in items:
            self._draws[item.request_id] += 1
        if all(generation.temperature == 0 for generation in generations):
            return None
        temperature = self._to_device(np.array([generation.temperature for generation in generations]))
        seeds_and_draws = self._to_device(
            np.array([[generation.seed for generation in generations], draws], dtype=np.int64)
        )
        seeds, counts = seeds_and_draws[0][request], seeds_and_draws[1][request]
        return Sampling(temperature=temperature[request], keys=row_keys(seeds, counts, position))
