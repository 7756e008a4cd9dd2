"""Runs step plans on a torch model, CPU or CUDA, and measures them.

Request state (token ids, seeds) lives on the device in slots. A step's metadata is built once, by
array arithmetic over plan items, and sent in one transfer; the model then runs one packed forward.
Refresh rows come first among the packed rows, so both kinds of attention read plain slices.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engines.attention import Run, varlen_attention
from engines.dllm.config import EngineConfig
from engines.dllm.denoise import Reduced, Reduction, Sampling, choose, choose_parity, reduce_in_chunks
from engines.dllm.noise import row_keys, uniform
from engines.dllm.phase import Phase
from engines.dllm.plan import PlanItem, StepOutcome, StepPlan
from engines.dllm.request import Request, check_request
from engines.dllm.sparsity import ContextRows, importance, top_rows, top_rows_parity
from engines.models.protocol import Attend, DiffusionModel, Rotary

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
    entry_row: Tensor
    """Packed row of an entry where every context row is kept, in order."""
    pool_row: Tensor


class StepRows(NamedTuple):
    """Device-side metadata of one step; N packed rows, R of them of Refresh requests."""

    position: Tensor
    flat: Tensor
    """Index into the flattened token store."""
    num_rows: int
    num_refresh_rows: int
    refresh_runs: list[Run]
    reuse_q_runs: list[Run]
    reuse_k_runs: list[Run]
    reuse_pool_row: Tensor
    build: PoolWrite | None


class BlockRows(NamedTuple):
    """[n, B] indices of the active blocks: request slot, position, packed row."""

    positions: Tensor
    packed: Tensor
    flat: Tensor
    """Index into the flattened token store."""
    padding: Tensor | None
    """Places past the end of a block shorter than the longest; None where all are equally long."""


class Candidates(NamedTuple):
    """``size`` positions that get logits: request of the step, place in its block, packed row; padded to
    MIN_ROWS with repetitions of one."""

    size: int
    request: Tensor
    place: Tensor
    row: Tensor


class StepLayout(NamedTuple):
    """What of a step follows from the rows it computes, whatever they hold: the steps of a block share it."""

    rows: StepRows
    rotary: Rotary
    attend: Attend
    block: BlockRows
    every: Candidates | None
    """All positions of the blocks, where finished ones get logits too."""


class Guidance(NamedTuple):
    """Classifier-free guidance of one step, by packed row; scale 0 leaves a row as it is."""

    hidden: Tensor
    scale: Tensor


class TorchExecutor:
    """``num_slots`` requests at most are resident; the KV pool holds ``kv_rows`` rows of K and V.

    ``stop_ids`` end requests with ``stop_at_eos``; the default is the model's end of text alone.
    """

    def __init__(
        self,
        model: DiffusionModel,
        config: EngineConfig,
        kv_rows: int,
        *,
        num_slots: int | None = None,
        stop_ids: Collection[int] | None = None,
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
        self._stop_ids = torch.tensor(sorted(stop_ids or {shape.eos_token_id}), device=self.device)
        self._free = list(range(self.num_slots))
        self._slots: dict[int, int] = {}
        self._requests: dict[int, Request] = {}
        self._draws: dict[int, int] = {}
        self._reduction = Reduction(
            confidence=config.decode.confidence,
            confidence_of=config.decode.confidence_of,
            dtype=config.decode.confidence_dtype,
            suppress_id=shape.mask_token_id if config.suppress_mask_token else None,
        )
        self._guided: set[int] = set()
        self._sampled: set[int] = set()
        """Requests whose steps need random numbers."""
        self._parallel: set[int] = set()
        self._stopping: set[int] = set()
        self._layout: tuple[object, StepLayout] | None = None
        self._ends: dict[int, int] = {}
        """Where requests end that a stop token ends."""

    # ---- requests -------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Refuse what this model cannot run, before it is queued."""
        check_request(request, self.model.config)

    def _admit(self, requests: Seq[Request]) -> None:
        for request in requests:
            slot = self._free.pop()
            self._slots[request.request_id] = slot
            self._requests[request.request_id] = request
            self._draws[request.request_id] = 0
            generation = request.generation
            if generation.cfg_scale > 0:
                self._guided.add(request.request_id)
            if generation.temperature > 0 or generation.alg_temp > 0 or generation.remasking == "random":
                self._sampled.add(request.request_id)
            if generation.is_parallel:
                self._parallel.add(request.request_id)
            if generation.stop_at_eos:
                self._stopping.add(request.request_id)
            row = self.tokens[slot]
            row[: request.prompt_len] = torch.tensor(request.prompt_ids, dtype=torch.int64)
            row[request.prompt_len : request.total_len] = self.model.config.mask_token_id

    def release(self, request_id: int) -> tuple[int, ...]:
        slot = self._slots.pop(request_id)
        request = self._requests.pop(request_id)
        del self._draws[request_id]
        for special in (self._guided, self._sampled, self._parallel, self._stopping):
            special.discard(request_id)
        self._free.append(slot)
        end = self._ends.pop(request_id, request.total_len)
        rest = (self.model.config.eos_token_id,) * (request.total_len - end)
        return (*self.tokens[slot, request.prompt_len : end].tolist(), *rest)

    # ---- one step -------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutcome:
        self._admit(plan.admitted)
        order = sorted(range(len(plan.items)), key=lambda i: not plan.items[i].phase.is_refresh)
        items = [plan.items[i] for i in order]
        layout = self._layout_of(items, plan.pad_to)
        rows = layout.rows
        ids = self.tokens.take(rows.flat)

        started = perf_counter()
        hidden = self.model.hidden(ids, layout.rotary, layout.attend)
        unconditional = self._unconditional(items, layout, ids)
        self._synchronize()
        forward_s = perf_counter() - started

        committed, stops, logit_rows, head_s = self._denoise(items, layout, hidden, unconditional)
        by_plan = [0] * len(items)
        for place, i in enumerate(order):
            by_plan[i] = committed[place]
        return StepOutcome(
            committed=tuple(by_plan),
            query_rows=rows.num_rows,
            logit_rows=logit_rows,
            forward_s=forward_s + head_s,
            duration_s=None,
            stops=stops,
        )

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _layout_of(self, items: list[PlanItem], pad_to: int | None) -> StepLayout:
        """That of the step before where this one computes the same rows, else a new one."""
        key = (
            pad_to,
            *(
                (self._slots[i.request_id], i.phase, i.total_len, i.block_start, i.block_end, i.window_end, i.kept_rows,
                 i.kv_start)
                for i in items
            ),
        )  # fmt: skip
        if self._layout is None or self._layout[0] != key:
            rows = self._rows(items)
            block = self._block_rows(items, rows)
            every = None
            if not self.config.suppress_mask_token:
                every = self._every(items, block)
            rotary, attend = self.model.rotary(rows.position), self._attend(items, rows)
            self._layout = key, StepLayout(rows=rows, rotary=rotary, attend=attend, block=block, every=every)
        return self._layout[1]

    def _rows(self, items: list[PlanItem]) -> StepRows:
        """Packed rows of the step, from arrays over its items."""
        slot = np.array([self._slots[item.request_id] for item in items])
        refresh = np.array([item.phase.is_refresh for item in items])
        length = np.array(self._row_lengths(items))
        first = np.array([0 if item.phase.is_refresh else item.block_start for item in items])
        base = np.concatenate(([0], np.cumsum(length)))
        num_rows = int(base[-1])
        packed = np.zeros((2, max(num_rows, MIN_ROWS)), dtype=np.int64)
        packed[0, :num_rows] = np.arange(num_rows) + np.repeat(first - base[:-1], length)
        packed[1, :num_rows] = packed[0, :num_rows] + np.repeat(slot * self.tokens.shape[1], length)
        metadata = self._to_device(packed)

        runs = list(zip(base[:-1].tolist(), base[1:].tolist(), strict=True))
        num_refresh = int(refresh.sum())
        reuse = items[num_refresh:]
        kept = np.array([item.kv_start + item.kept_rows for item in reuse], dtype=np.int64)
        num_refresh_rows = int(base[num_refresh])
        offset = np.arange(num_refresh_rows, num_rows) + np.repeat(kept - base[num_refresh:-1], length[num_refresh:])
        build = [(item, run) for item, run in zip(items, runs, strict=True) if item.phase is Phase.BUILD]
        return StepRows(
            position=metadata[0],
            flat=metadata[1],
            num_rows=num_rows,
            num_refresh_rows=num_refresh_rows,
            refresh_runs=runs[:num_refresh],
            reuse_q_runs=runs[num_refresh:],
            reuse_k_runs=[(item.kv_start, item.kv_start + item.kept_rows + item.window_len) for item in reuse],
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
        window_len = np.array([item.window_len for item in items])[:, None]
        num_context = np.array([item.total_len - item.window_len for item in items])
        j = np.arange(num_context.max())[None, :]
        context_valid = j < num_context[:, None]
        # Context index j -> position: the prefix as it is, the suffix past the window.
        context = base + np.where(context_valid, np.where(j < start, j, j + window_len), 0)
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
            entry_row=self._to_device(context[entry_request, entry_rank]),
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
            self.pool_k[layer].index_copy_(0, write.pool_row, k[write.entry_row])
            self.pool_v[layer].index_copy_(0, write.pool_row, v[write.entry_row])
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

    def _unconditional(self, items: list[PlanItem], layout: StepLayout, ids: Tensor) -> Guidance | None:
        """Hidden states of a second forward with the prompts masked (classifier-free guidance)."""
        if not self._guided:
            return None
        requests = [self._requests[item.request_id] for item in items]
        lengths = self._row_lengths(items)
        pad = len(ids) - sum(lengths)
        prompt_len = np.repeat([request.prompt_len for request in requests], lengths)
        scale = np.repeat([request.generation.cfg_scale for request in requests], lengths)
        position = layout.rows.position
        in_prompt = position < self._to_device(np.pad(prompt_len, (0, pad)))
        masked = torch.where(in_prompt, self.model.config.mask_token_id, ids)
        hidden = self.model.hidden(masked, layout.rotary, layout.attend)
        return Guidance(hidden, self._to_device(np.pad(scale, (0, pad))).to(hidden.dtype))

    # ---- decoding -------------------------------------------------------------------------

    def _denoise(
        self, items: list[PlanItem], layout: StepLayout, hidden: Tensor, guidance: Guidance | None
    ) -> tuple[list[int], dict[int, int], int, float]:
        """Commit this step's tokens in place; (committed per item, stops, logit rows, seconds in the head)."""
        block = layout.block
        current = self.tokens.take(block.flat)
        fixed = current != self.model.config.mask_token_id
        if block.padding is not None:
            fixed |= block.padding
        candidates = layout.every
        if candidates is None:
            # How many positions are masked is known here without asking the device; which, there.
            places = fixed.sort(dim=1, stable=True).indices
            candidates = self._candidates([item.masks_left for item in items], block, places)
        sampling = self._sampling(items, candidates, block)
        started = perf_counter()
        token, confidence = self._reduce(hidden, guidance, candidates.row, self._reduction, sampling)
        self._synchronize()
        head_s = perf_counter() - started

        def in_block(values: Tensor, rest: float) -> Tensor:
            """[n, B] values of the candidates, ``rest`` elsewhere."""
            values = values[: candidates.size]
            if candidates.size == block.positions.numel():
                return values.view(block.positions.shape)
            grid = torch.full(block.positions.shape, rest, dtype=values.dtype, device=self.device)
            grid[candidates.request[: candidates.size], candidates.place[: candidates.size]] = values
            return grid

        conf = in_block(confidence, -torch.inf).masked_fill_(fixed, -torch.inf)
        token = in_block(token, 0)
        chosen: Tensor | None = None
        known: list[int] | None
        if self._commits_best(items):
            known, best = [1] * len(items), conf.argmax(dim=1, keepdim=True)  # of equals the first, as documented
            self.tokens.put_(block.flat.gather(1, best), token.gather(1, best))
        else:
            chosen, known = self._choose(items, conf, block)
            self.tokens.put_(block.flat, torch.where(chosen, token, current))
        committed, stops = self._read_back(items, block, chosen, known)
        return committed, stops, self._logit_rows(layout.rows, candidates.size), head_s

    def _commits_best(self, items: list[PlanItem]) -> bool:
        """Whether every request commits its most confident masked position, no more and no other: most steps."""
        decode = self.config.decode
        if decode.quota == "origin" or decode.first_step != "ranked" or self.config.tie_policy == "parity":
            return False
        return not self._parallel and all(item.commit == 1 for item in items)

    def _candidates(self, counts: list[int], block: BlockRows, places: Tensor) -> Candidates:
        """The first ``counts`` of every request's ``places`` [n, B]."""
        count = sum(counts)
        index = np.zeros((2, max(count, MIN_ROWS)), dtype=np.int64)
        index[0, :count] = np.repeat(np.arange(len(counts)), counts)
        index[1, :count] = np.arange(count) - np.repeat(np.cumsum(counts) - counts, counts)
        request, rank = self._to_device(index)
        place = places[request, rank]
        return Candidates(size=count, request=request, place=place, row=block.packed[request, place])

    def _every(self, items: list[PlanItem], block: BlockRows) -> Candidates:
        """All places of the blocks, in order."""
        length = np.array([item.block_len for item in items])[:, None]
        request, place = np.nonzero(np.arange(length.max()) < length)
        size = len(place)
        pad = max(0, MIN_ROWS - size)
        index = self._to_device(np.pad(np.stack((request, place)), ((0, 0), (0, pad))))
        return Candidates(size=size, request=index[0], place=index[1], row=block.packed[index[0], index[1]])

    def _block_rows(self, items: list[PlanItem], rows: StepRows) -> BlockRows:
        """[n, B] indices of every active block, padded to the longest."""
        runs = rows.refresh_runs + rows.reuse_q_runs
        slot = np.array([self._slots[item.request_id] for item in items])[:, None]
        start = np.array([item.block_start for item in items])[:, None]
        length = np.array([item.block_len for item in items])[:, None]
        offset = np.arange(length.max())[None, :]
        inside = offset < length
        position = np.where(inside, start + offset, self.max_len)
        run_start = np.array([[run[0]] for run in runs])
        in_run = np.array([[item.block_start if item.phase.is_refresh else 0] for item in items]) + offset
        if self.model.config.shifts_logits:
            # Row i predicts token i + 1; the first row of whatever was forwarded keeps its own.
            in_run = np.maximum(in_run - 1, 0)
        packed = run_start + np.where(inside, in_run, 0)
        index = np.empty((3, *position.shape), dtype=np.int64)
        index[0], index[1], index[2] = position, packed, slot * self.tokens.shape[1] + position
        positions, packed, flat = self._to_device(index)
        padding = None if inside.all() else self._to_device(~inside)
        return BlockRows(positions=positions, packed=packed, flat=flat, padding=padding)

    def _reduce(
        self,
        hidden: Tensor,
        guidance: Guidance | None,
        head_rows: Tensor,
        reduction: Reduction,
        sampling: Sampling | None,
    ) -> Reduced:
        def project(part: Tensor) -> Tensor:
            return self._project(hidden, guidance, part)

        if self.config.logit_rows == "monolithic":
            return reduction(self._project(hidden, guidance, slice(None))[head_rows], sampling)
        return reduce_in_chunks(project, head_rows, self.config.max_num_logits, reduction, sampling)

    def _project(self, hidden: Tensor, guidance: Guidance | None, part: Tensor | slice) -> Tensor:
        """Logits of some packed rows, guided where the step has guidance."""
        logits = self.model.logits(hidden[part])
        if guidance is None:
            return logits
        base = self.model.logits(guidance.hidden[part])
        scale = guidance.scale[part].unsqueeze(1)
        return torch.where(scale > 0, base + (scale + 1) * (logits - base), logits)

    def _logit_rows(self, rows: StepRows, wanted: int) -> int:
        """Rows the output head computed for ``wanted`` candidates."""
        return rows.num_rows if self.config.logit_rows == "monolithic" else wanted

    def _read_back(
        self, items: list[PlanItem], block: BlockRows, chosen: Tensor | None, known: list[int] | None
    ) -> tuple[list[int], dict[int, int]]:
        """Tokens committed per item, and the first stop token of completed blocks (``StepOutcome.stops``).

        The host waits for the device only to learn what it cannot know: how many tokens parallel
        decoding committed, and the stop tokens of blocks that are, or then may be, complete. All of
        it comes in one transfer.
        """
        if known is not None and not self._stopping:
            return known, {}
        asked = [item.request_id in self._stopping for item in items]
        if known is None:
            assert chosen is not None
            counted = chosen.sum(dim=1)
            if not any(asked):
                return counted.tolist(), {}
        elif not any(a and count >= i.masks_left for a, i, count in zip(asked, items, known, strict=True)):
            return known, {}
        else:
            counted = torch.zeros(len(items), dtype=torch.int64, device=self.device)
        # max_len, the position of a ragged block's padding, is no position of a token.
        ids = self.tokens.take(block.flat)
        first = torch.where(torch.isin(ids, self._stop_ids), block.positions, self.max_len).amin(dim=1)
        counts, places = torch.stack((counted, first)).tolist()
        committed = counts if known is None else known
        stops = {}
        for wants, item, count, place in zip(asked, items, committed, places, strict=True):
            if wants and count >= item.masks_left and place < self.max_len:
                stops[item.request_id] = place
                self._ends[item.request_id] = item.block_end
        return committed, stops

    def _choose(self, items: list[PlanItem], conf: Tensor, block: BlockRows) -> tuple[Tensor, list[int] | None]:
        """Which positions to commit, and how many per item where that does not depend on the model."""
        commit = [item.commit for item in items]
        generations = [self._requests[item.request_id].generation for item in items]
        decode = self.config.decode
        if decode.quota == "origin":
            return self._choose_at_random(items, conf, block), None
        if decode.first_step != "ranked":
            first = self._to_device(np.array([item.step_in_block == 0 for item in items]))
            if decode.first_step == "first_position":
                conf[:, 1:].masked_fill_(first.unsqueeze(1), -torch.inf)
            else:
                conf[:, 0] = torch.where(first & (conf[:, 0] > -torch.inf), torch.inf, conf[:, 0])
        is_parallel = [generation.is_parallel for generation in generations]
        by_library = None
        if self.config.tie_policy == "parity":
            offsets = [item.block_start if item.phase.is_refresh else 0 for item in items]
            by_library = choose_parity(conf, commit, offsets, [item.query_tokens for item in items])
            if not any(is_parallel):
                return by_library, commit
        threshold = factor = None
        if any(is_parallel):
            limits = np.array([[np.inf if g.threshold is None else g.threshold, g.factor or 0.0] for g in generations])
            threshold, factor = self._to_device(limits.T.copy()).to(conf.dtype)
        quota = commit[0] if len(set(commit)) == 1 else self._to_device(np.array(commit))
        chosen = choose(conf, quota, threshold, factor)
        if by_library is not None:
            chosen = torch.where(self._to_device(np.array(is_parallel)).unsqueeze(1), chosen, by_library)
        return chosen, None if any(is_parallel) else commit

    def _choose_at_random(self, items: list[PlanItem], conf: Tensor, block: BlockRows) -> Tensor:
        """Dream's ``origin``: each mask is committed with the schedule's probability."""
        share = self._to_device(np.array([item.commit_probability for item in items])).unsqueeze(1)
        seeds = self._to_device(np.array([self._requests[item.request_id].generation.seed for item in items]))
        steps = self._to_device(np.array([item.step_in_block for item in items]))
        keys = ~row_keys(seeds.unsqueeze(1), steps.unsqueeze(1), block.positions)
        drawn = uniform(keys.flatten(), 1).view(conf.shape)
        return (drawn < share) & (conf > -torch.inf)

    def _sampling(self, items: list[PlanItem], candidates: Candidates, block: BlockRows) -> Sampling | None:
        if not self._sampled:
            return None
        generations = [self._requests[item.request_id].generation for item in items]
        draws = [self._draws[item.request_id] for item in items]
        for item in items:
            self._draws[item.request_id] += 1
        request, position = candidates.request, block.positions[candidates.request, candidates.place]
        vocabulary = self.model.config.vocab_size
        real = [[g.temperature, g.top_p, g.alg_temp, float(g.remasking == "random")] for g in generations]
        whole = [[g.seed, n, min(g.top_k or vocabulary, vocabulary)] for g, n in zip(generations, draws, strict=True)]
        temperature, top_p, alg_temp, is_random = self._to_device(np.array(real))[request].unbind(1)
        seeds, counts, top_k = self._to_device(np.array(whole, dtype=np.int64))[request].unbind(1)
        truncates = any(g.top_p < 1 or g.top_k is not None for g in generations)
        return Sampling(
            temperature=temperature,
            keys=row_keys(seeds, counts, position),
            random_remasking=is_random > 0,
            top_p=top_p if truncates else None,
            top_k=top_k if truncates else None,
            alg_temp=alg_temp if any(g.alg_temp > 0 for g in generations) else None,
        )
