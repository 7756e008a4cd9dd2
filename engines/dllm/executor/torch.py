"""Runs step plans on a torch model, CPU or CUDA, and measures them.

Request state (token ids) lives on the device in slots. A step's metadata is built once, by array arithmetic
over plan items (``step_rows``), and sent in one transfer; the model then runs one packed forward. Refresh
rows come first among the packed rows, so both kinds of attention read plain slices. The host waits for the
device only for what it cannot know (``_read_back``, ``release``) and lest it run more than a step ahead (``step_timer``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from itertools import pairwise
from traceback import clear_frames
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines import kernels
from engines.attention import (
    SpanMetadata,
    Spans,
    VarlenAttention,
    attention_backend,
    availability,
    sdpa,
    varlen_attention,
)
from engines.attention.flash import reads_pool_in_place
from engines.dllm.cache.selection import SelectAndPack, TorchSelectAndPack, TritonSelectAndPack
from engines.dllm.config import EngineConfig
from engines.dllm.decode.denoise import Reduced, Reduction, Sampling, choose, choose_parity, reduce_in_chunks
from engines.dllm.decode.noise import row_keys, uniform
from engines.dllm.decode.vocabulary import vocabulary_reduction
from engines.dllm.executor.graphs import CudaRecorder, Recorder, StepGraphs, mixed_keys, reuse_keys
from engines.dllm.executor.rows import BlockRows, BuildRows, Ints, ItemTable, PackedRows, Places
from engines.dllm.executor.step import MIN_ROWS, Block, Candidates, Guidance, StepLayout, StepRows
from engines.dllm.plan import ExecutorError, PlanItem, StepOutcome, StepPlan
from engines.dllm.request import Request, check_request
from engines.models.layers import FusedOps, fuse
from engines.models.protocol import Attend, DiffusionModel
from engines.runtime.staging import staging_to
from engines.runtime.step_timer import StepTimes, timer_of


class TorchExecutor:
    """``num_slots`` requests at most are resident; the KV pool holds ``kv_rows`` rows of K and V.

    ``stop_ids`` end requests with ``stop_at_eos``; the default is the model's end of text alone. Every
    ``profile_every``-th step is divided into parts (``STEP_PARTS``), none if 0.
    """

    def __init__(
        self,
        model: DiffusionModel,
        config: EngineConfig,
        kv_rows: int,
        *,
        num_slots: int | None = None,
        stop_ids: Collection[int] | None = None,
        profile_every: int = 0,
    ) -> None:
        self.model = model
        self.config = config
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        shape = model.config
        self.num_slots = num_slots or config.max_num_seqs
        self.max_len = min(config.max_model_len, shape.max_sequence_length)
        self.attention = self._attention_backend()
        recorder = self._recorder()
        # Padding of a graph has a slot and a row of its own.
        spare = int(recorder is not None)
        pool_shape = (shape.n_layers, kv_rows + spare, model.kv_heads_here, shape.head_dim)
        self.pool_k = torch.empty(pool_shape, dtype=self.dtype, device=self.device)
        self.pool_v = torch.empty(pool_shape, dtype=self.dtype, device=self.device)
        # The last column belongs to no position: padding of a ragged block is read from and written to it.
        self.tokens = torch.full(
            (self.num_slots + spare, self.max_len + 1), shape.mask_token_id, dtype=torch.int64, device=self.device
        )
        self._stop_ids = torch.tensor(sorted(stop_ids or {shape.eos_token_id}), device=self.device)
        self._free = list(range(self.num_slots))
        self._slots: dict[int, int] = {}
        self._requests: dict[int, Request] = {}
        self._draws: dict[int, int] = {}
        self._guided: set[int] = set()
        self._sampled: set[int] = set()
        """Requests whose steps need random numbers."""
        self._parallel: set[int] = set()
        self._stopping: set[int] = set()
        self._reduction = Reduction(
            confidence=config.decode.confidence,
            confidence_of=config.decode.confidence_of,
            dtype=config.decode.confidence_dtype,
            suppress_id=shape.mask_token_id if config.suppress_mask_token else None,
        )
        self._fuse()
        self._local = vocabulary_reduction(self._reduction, model, is_fused=self._serves("partial"))
        """Of the logits this process computes, where there are others; None where it computes all."""
        self._staging = staging_to(self.device)
        self._timer = timer_of(self.device)
        self._selection = self._select_and_pack()
        self._graphs: StepGraphs | None = None
        if recorder is not None:
            self._graphs = StepGraphs(
                model, self.attention, self.tokens, self.pool_k, self.pool_v, self._staging, recorder
            )
        self._profile_every = profile_every
        self._num_steps = 0
        self._layout: tuple[object, StepLayout] | None = None
        self._ends: dict[int, int] = {}
        """Where requests end that a stop token ends."""

    def _attention_backend(self) -> VarlenAttention:
        return attention_backend(self.config.attention_backend, *self._attention_case())

    def _attention_case(self) -> tuple[torch.device, torch.dtype, int, int, int]:
        shape, kv_heads = self.model.config, self.model.kv_heads_here
        return self.device, self.dtype, shape.head_dim, shape.n_heads * kv_heads // shape.n_kv_heads, kv_heads

    def paths(self) -> dict[str, Any]:
        """What its steps run on, and what was passed over and why, as JSON; nothing on a CPU, which has no choice."""
        if self.device.type == "cpu":
            return {}
        missing = {name: why for name, why in availability(*self._attention_case()).items() if why is not None}
        faulty: Mapping[str, str] = {}
        if self._serves():
            from engines.kernels.probe import faults

            faulty = faults(self.device, self.dtype)
        return {
            "attention_backend": self.attention.name,
            "attention_unavailable": missing,
            "fused_kernels": self._serves(),
            "kernel_faults": dict(faulty),
            "cuda_graph_sizes": 0 if self._graphs is None else len(self._graphs.keys),
        }

    def _recorder(self) -> Recorder | None:
        """How forwards are captured; None where they are not."""
        if self.device.type != "cuda" or not self.config.cuda_graphs or not reads_pool_in_place(self.attention):
            return None
        return CudaRecorder()

    def _select_and_pack(self) -> SelectAndPack:
        ranks = self.model.tensor_parallel
        # Kernels sum in another order, and of a rank's heads alone.
        needs_torch = self.config.tie_policy == "parity" or (ranks and self.config.sparsity.selection == "uniform")
        if not needs_torch and self._serves("pack", "scores"):
            return TritonSelectAndPack(self.config)
        return TorchSelectAndPack(self.config, ranks)

    def _serves(self, *names: str) -> bool:
        """Whether these Triton kernels do; float32 is for comparing, operator by operator."""
        if not self.config.fused_kernels or self.dtype == torch.float32 or not kernels.available(self.device):
            return False
        from engines.kernels.probe import serves

        return all(serves(name, self.device, self.dtype) for name in names)

    def _fuse(self) -> None:
        """Kernels of the model's layers and of the output head; a model that another executor used may have some."""
        if self.device.type == "cpu" and not self._serves():
            return
        assert isinstance(self.model, nn.Module)
        fuse(self.model, FusedOps())
        if self._serves():
            from engines.kernels.probe import fused_ops

            fuse(self.model, fused_ops(self.device, self.dtype))
        if self._serves("confidence"):
            from engines.dllm.decode.fused import fused

            self._reduction = fused(self._reduction)

    def prepare(self, block_length: int) -> None:
        """Capture the graphs of steps with blocks of that length, before anything is timed."""
        if self._graphs is None:
            return
        with torch.inference_mode():
            # The largest first: the others then fit into its memory.
            slots = self.config.max_num_seqs
            for key in sorted({*reuse_keys(slots, block_length), *mixed_keys(slots)}, reverse=True):
                self._graphs.capture(key)
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ---- requests -------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Refuse what this model cannot run, before it is queued."""
        check_request(request, self.model.config)

    def _admit(self, requests: Seq[Request]) -> None:
        if not requests:
            return
        mask_id, width = self.model.config.mask_token_id, self.tokens.shape[1]
        ids, flat = [], []
        for request in requests:
            slot = self._free.pop()
            self._slots[request.request_id] = slot
            self._requests[request.request_id] = request
            self._draws[request.request_id] = 0
            generation = request.generation
            for special, is_special in (
                (self._guided, generation.cfg_scale > 0),
                (
                    self._sampled,
                    generation.temperature > 0 or generation.alg_temp > 0 or generation.remasking == "random",
                ),
                (self._parallel, generation.is_parallel),
                (self._stopping, generation.stop_at_eos),
            ):
                if is_special:
                    special.add(request.request_id)
            row = np.full(request.total_len, mask_id, dtype=np.int64)
            assert request.prompt_ids is not None
            row[: request.prompt_len] = request.prompt_ids
            ids.append(row)
            flat.append(np.arange(slot * width, slot * width + request.total_len))
        index, values = self._staging.send(np.concatenate(flat), np.concatenate(ids))
        self.tokens.put_(index, values)

    def release(self, request_id: int) -> tuple[int, ...]:
        request = self._requests.pop(request_id, None)
        if request is None:  # lost before it was admitted
            return ()
        slot = self._slots.pop(request_id)
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
        if not self._requests:
            self._timer.rest()
        self._timer.begin(detailed=self._profile_every > 0 and self._num_steps % self._profile_every == 0)
        try:
            return self._run(plan)
        except RuntimeError as error:  # of which torch.OutOfMemoryError is one
            if not _is_out_of_memory(error):
                raise
            self._timer.abandon()
            self._layout = None
            # The frames that failed hold the step's tensors.
            clear_frames(error.__traceback__)
            raise ExecutorError(_out_of_memory(plan, self.config, self.device)) from error
        finally:
            self._num_steps += 1

    def wait(self) -> None:
        self._timer.wait()

    def times(self) -> Mapping[int, StepTimes]:
        return self._timer.times()

    def _run(self, plan: StepPlan) -> StepOutcome:
        self._admit(plan.admitted)
        order = list(range(len(plan.items)))
        if len(order) > 1:
            order.sort(key=lambda i: not plan.items[i].phase.is_refresh)
        items = [plan.items[i] for i in order]
        layout = self._layout_of(items, plan.pad_to)
        self._timer.lap("metadata")
        hidden, guidance, query_rows = self._forward(plan, items, layout)
        self._timer.lap("gemm")
        committed, stops, logit_rows = self._denoise(items, layout, hidden, guidance)
        self._timer.lap("commit")
        taken = self._timer.end()
        by_plan = [0] * len(items)
        for place, i in enumerate(order):
            by_plan[i] = committed[place]
        return StepOutcome(
            committed=tuple(by_plan),
            query_rows=query_rows,
            logit_rows=logit_rows,
            forward_s=None if taken is None else taken.forward_s,
            duration_s=None,
            stops=stops,
            graph=layout.graph is not None,
            parts=None if taken is None else taken.parts,
        )

    def _forward(
        self, plan: StepPlan, items: list[PlanItem], layout: StepLayout
    ) -> tuple[Tensor, Guidance | None, int]:
        """Hidden states of the packed rows, guidance, and how many rows were computed."""
        if layout.graph is not None:
            assert self._graphs is not None
            return self._graphs.run(*layout.graph), None, layout.num_rows
        assert layout.rows is not None
        ids = self.tokens.take(layout.rows.flat)
        return self._hidden_of(ids, layout), self._unconditional(items, layout, ids), layout.num_rows

    def _hidden_of(self, ids: Tensor, layout: StepLayout) -> Tensor:
        assert layout.rotary is not None
        assert layout.attend is not None
        return self.model.hidden(ids, layout.rotary, layout.attend)

    def _layout_of(self, items: list[PlanItem], pad_to: int | None) -> StepLayout:
        """That of the step before where this one computes the same rows, else a new one."""
        slots = [self._slots[item.request_id] for item in items]
        key = (
            pad_to,
            self._timer.detailed,
            slots,
            [(i.phase, i.total_len, i.block_start, i.block_end, i.window_end, i.kept_rows, i.kv_start) for i in items],
        )
        if self._layout is None or self._layout[0] != key:
            self._layout = key, self._new_layout(items, ItemTable.of(items, slots))
        return self._layout[1]

    def _new_layout(self, items: list[PlanItem], table: ItemTable) -> StepLayout:
        """All of a step's metadata, in one transfer but for the candidates."""
        packed = self._packed_rows(items, table)
        places = BlockRows.of(
            table, packed.base, width=self.tokens.shape[1], shifts_logits=self.model.config.shifts_logits
        )
        arrays = [places.position, places.packed, places.flat]
        if places.inside is not None:
            arrays.append((~places.inside).astype(np.int64))
        build = BuildRows.of(table, items, packed.base)
        graph = None
        if self._graphs is not None and build is None and not self._guided and not self._timer.detailed:
            key = self._graphs.key_of(table, packed)
            graph = None if key is None else (key, table, packed)
        rows = None
        if graph is None:
            num_places = len(arrays)
            arrays += [packed.position, packed.flat, packed.pool_row]
            spans = None if self.attention.needs_host_runs else self._span_arrays(packed, table)
            arrays += [] if spans is None else [spans]
            if build is not None:
                arrays += self._selection.arrays(build)
            sent = self._staging.send(*arrays)
            positions, block_packed, flat, *padding = sent[:num_places]
            rows = self._rows(items, table, packed, build, sent[num_places:], has_spans=spans is not None)
        else:
            positions, block_packed, flat, *padding = self._staging.send(*arrays)
        block = Block(positions, block_packed, flat, padding[0] != 0 if padding else None)
        every = None
        if not self.config.suppress_mask_token:
            every = self._candidates(table.block_end - table.block_start, block, None)
            every = every._replace(is_every_row=self._is_every_row(places, packed))
        return StepLayout(
            num_rows=packed.num_rows,
            rows=rows,
            rotary=None if rows is None else self.model.rotary(rows.position),
            attend=None if rows is None else self._attend(items, rows),
            graph=graph,
            block=block,
            every=every,
        )

    def _packed_rows(self, items: list[PlanItem], table: ItemTable) -> PackedRows:
        return PackedRows.of(table, self._row_lengths(items), width=self.tokens.shape[1], least=MIN_ROWS)

    def _row_lengths(self, items: list[PlanItem]) -> Ints | None:
        """Packed rows of each request where they are not its query tokens: a padding subclass has more."""
        return None

    def _rows(
        self,
        items: list[PlanItem],
        table: ItemTable,
        packed: PackedRows,
        build: BuildRows | None,
        sent: Seq[Tensor],
        *,
        has_spans: bool,
    ) -> StepRows:
        position, flat, pool_row = sent[:3]
        runs = list(pairwise(packed.base.tolist()))
        own, spans = sent[3:], None
        if has_spans:
            spans, own = self._spans(own[0], packed, table), own[1:]
        return StepRows(
            num_rows=packed.num_rows,
            num_refresh_rows=packed.num_refresh_rows,
            position=position,
            flat=flat,
            pool_row=pool_row,
            refresh_runs=runs[: table.num_refresh],
            reuse_q_runs=runs[table.num_refresh :],
            reuse_k_runs=[(i.kv_start, i.kv_start + i.key_tokens) for i in items[table.num_refresh :]],
            spans=spans,
            pack=None if build is None else self._selection.pack(build, own),
        )

    def _span_arrays(self, packed: PackedRows, table: ItemTable) -> Ints:
        """``Spans`` of the Refresh sequences, then of the Reuse ones, whose queries are counted from their own first."""
        m, lengths = table.num_refresh, np.diff(packed.base)
        refresh = SpanMetadata.of_lengths(lengths[:m])
        reuse = SpanMetadata.of_lengths(lengths[m:], table.kv_start[m:], packed.key_len)
        return np.concatenate((*refresh, *reuse)).astype(np.int64)

    def _spans(self, sent: Tensor, packed: PackedRows, table: ItemTable) -> tuple[Spans, Spans]:
        m, n = table.num_refresh, len(table.slot) - table.num_refresh
        longest = np.diff(packed.base)
        parts = sent.to(torch.int32).split([m + 1, m + 1, m, n + 1, n + 1, n])
        max_q, max_window = int(longest[:m].max(initial=0)), int(longest[m:].max(initial=0))
        return (
            Spans(cu_q=parts[0], k_start=parts[1], k_len=parts[2], max_q=max_q, max_k=max_q),
            Spans(
                cu_q=parts[3],
                k_start=parts[4],
                k_len=parts[5],
                max_q=max_window,
                max_k=int(packed.key_len.max(initial=0)),
            ),
        )

    def _attend(self, items: list[PlanItem], rows: StepRows) -> Attend:
        if rows.spans is None and len(rows.reuse_q_runs) == 1 and not rows.refresh_runs:
            return self._attend_alone(rows)
        timer, attention = self._timer, self.attention
        first, own = slice(0, rows.num_refresh_rows), slice(rows.num_refresh_rows, rows.num_rows)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            timer.lap_inside("gemm")
            out = torch.empty_like(q)
            if rows.num_rows < out.shape[0]:
                out[rows.num_rows :] = 0
            if rows.spans is None:
                varlen_attention(out, q, k, v, rows.refresh_runs, rows.refresh_runs)
            elif rows.refresh_runs:
                attention(q[first], k[first], v[first], rows.spans[0], out[first])
            if rows.pack is not None:
                timer.lap_inside("attention")
                rows.pack(self.pool_k[layer], self.pool_v[layer], q, k, v)
                timer.lap_inside("selection")
            if rows.reuse_q_runs:
                pool_k, pool_v = self.pool_k[layer], self.pool_v[layer]
                # The block's fresh rows go right behind the retained ones: one run, no concatenation.
                pool_k.index_copy_(0, rows.pool_row, k[own])
                pool_v.index_copy_(0, rows.pool_row, v[own])
                if rows.spans is None:
                    varlen_attention(out, q, pool_k, pool_v, rows.reuse_q_runs, rows.reuse_k_runs)
                else:
                    attention(q[own], pool_k, pool_v, rows.spans[1], out[own])
            timer.lap_inside("attention")
            return out

        return attend

    def _attend_alone(self, rows: StepRows) -> Attend:
        """Of one Reuse request: its rows and its run of the pool are plain slices, and nothing is copied together."""
        timer, num_rows = self._timer, rows.num_rows
        (start, end) = rows.reuse_k_runs[0]
        run, own = slice(start, end), slice(end - num_rows, end)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            timer.lap_inside("gemm")
            pool_k, pool_v = self.pool_k[layer], self.pool_v[layer]
            pool_k[own] = k[:num_rows]
            pool_v[own] = v[:num_rows]
            out = sdpa(q[None, :num_rows], pool_k[None, run], pool_v[None, run])[0]
            if num_rows < q.shape[0]:
                out = F.pad(out, (0, 0, 0, 0, 0, q.shape[0] - num_rows))
            timer.lap_inside("attention")
            return out

        return attend

    def _unconditional(self, items: list[PlanItem], layout: StepLayout, ids: Tensor) -> Guidance | None:
        """Hidden states of a second forward with the prompts masked (classifier-free guidance)."""
        rows = layout.rows
        if not self._guided or rows is None:
            return None
        requests = [self._requests[item.request_id] for item in items]
        lengths = [end - start for start, end in (*rows.refresh_runs, *rows.reuse_q_runs)]
        pad = (0, len(ids) - sum(lengths))
        prompt_len = np.pad(np.repeat([request.prompt_len for request in requests], lengths), pad)
        scale = np.pad(np.repeat([request.generation.cfg_scale for request in requests], lengths), pad)
        masked = torch.where(rows.position < self._ints(prompt_len), self.model.config.mask_token_id, ids)
        hidden = self._hidden_of(masked, layout)
        return Guidance(hidden, self._floats(scale).to(hidden.dtype))

    def _ints(self, values: Seq[int] | np.ndarray) -> Tensor:
        """int64 on the device."""
        return self._staging.send(np.array(values, dtype=np.int64))[0]

    def _floats(self, values: np.ndarray) -> Tensor:
        """float64 on the device."""
        (bits,) = self._staging.send(np.ascontiguousarray(values, dtype=np.float64).view(np.int64))
        return bits.view(torch.float64)

    # ---- decoding -------------------------------------------------------------------------

    def _denoise(
        self, items: list[PlanItem], layout: StepLayout, hidden: Tensor, guidance: Guidance | None
    ) -> tuple[list[int], dict[int, int], int]:
        """Commit this step's tokens in place; (committed per item, stops, logit rows)."""
        block = layout.block
        current = self.tokens.take(block.flat)
        fixed = current != self.model.config.mask_token_id
        if block.padding is not None:
            fixed |= block.padding
        candidates = layout.every
        if candidates is None:
            # How many positions are masked is known here without asking the device; which, there.
            places = (fixed.byte() if self.device.type == "cuda" else fixed).sort(dim=1, stable=True).indices
            candidates = self._candidates(np.array([item.masks_left for item in items]), block, places)
        sampling = self._sampling(items, candidates, block)
        self._timer.lap("commit")
        token, confidence = self._reduce(hidden, guidance, candidates, self._reduction, sampling)
        self._timer.lap("logits")

        def in_block(values: Tensor, rest: float) -> Tensor:
            """[n, B] values of the candidates, ``rest`` elsewhere."""
            values = values[: candidates.size]
            if candidates.size == block.positions.numel():
                return values.view(block.positions.shape)
            grid = torch.full((block.positions.numel(),), rest, dtype=values.dtype, device=self.device)
            return grid.index_copy_(0, candidates.cell[: candidates.size], values).view(block.positions.shape)

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
        return committed, stops, self._logit_rows(layout.num_rows, candidates.size)

    def _commits_best(self, items: list[PlanItem]) -> bool:
        """Whether every request commits its most confident masked position, no more and no other: most steps."""
        decode = self.config.decode
        if decode.quota == "origin" or decode.first_step != "ranked" or self.config.tie_policy == "parity":
            return False
        return not self._parallel and all(item.commit == 1 for item in items)

    def _candidates(self, counts: Ints, block: Block, places: Tensor | None) -> Candidates:
        """The first ``counts`` of every request's ``places`` [n, B]; None takes a block's places in order."""
        width = block.positions.shape[1]
        if places is not None and len(counts) == 1 and counts[0] >= MIN_ROWS:
            cell, item = places[0, : counts[0]], np.zeros(counts[0], dtype=np.int64)
            return Candidates(size=len(item), cell=cell, row=block.packed.take(cell), item=item)
        wanted = Places.of(counts, least=MIN_ROWS)
        start = wanted.request * width
        cell, first = self._staging.send(start + wanted.rank, start)
        if places is not None:
            cell = places.take(cell) + first
        return Candidates(size=wanted.size, cell=cell, row=block.packed.take(cell), item=wanted.request)

    @staticmethod
    def _is_every_row(places: BlockRows, packed: PackedRows) -> bool:
        row = places.packed.ravel()
        return len(row) == packed.num_rows >= MIN_ROWS and bool((row == np.arange(len(row))).all())

    def _reduce(
        self,
        hidden: Tensor,
        guidance: Guidance | None,
        candidates: Candidates,
        reduction: Reduction,
        sampling: Sampling | None,
    ) -> Reduced:
        local = self._local if sampling is None and guidance is None else None

        def project(part: Tensor | slice) -> Tensor:
            return self._project(hidden, guidance, part) if local is None else self.model.local_logits(hidden[part])

        reduction = reduction if local is None else local
        if self.config.logit_rows == "monolithic":
            return reduction(project(slice(None))[candidates.row], sampling)
        return reduce_in_chunks(project, candidates.row, self.config.max_num_logits, reduction, sampling)

    def _project(self, hidden: Tensor, guidance: Guidance | None, part: Tensor | slice) -> Tensor:
        """Logits of some packed rows, guided where the step has guidance."""
        logits = self.model.logits(hidden[part])
        if guidance is None:
            return logits
        base = self.model.logits(guidance.hidden[part])
        scale = guidance.scale[part].unsqueeze(1)
        return torch.where(scale > 0, base + (scale + 1) * (logits - base), logits)

    def _logit_rows(self, num_rows: int, wanted: int) -> int:
        """Rows the output head computed for ``wanted`` candidates."""
        return num_rows if self.config.logit_rows == "monolithic" else wanted

    def _read_back(
        self, items: list[PlanItem], block: Block, chosen: Tensor | None, known: list[int] | None
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

    def _choose(self, items: list[PlanItem], conf: Tensor, block: Block) -> tuple[Tensor, list[int] | None]:
        """Which positions to commit, and how many per item where that does not depend on the model."""
        commit = [item.commit for item in items]
        generations = [self._requests[item.request_id].generation for item in items]
        decode = self.config.decode
        if decode.quota == "origin":
            return self._choose_at_random(items, conf, block), None
        if decode.first_step != "ranked":
            first = self._ints([item.step_in_block == 0 for item in items]) != 0
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
            threshold, factor = self._floats(limits.T).to(conf.dtype)
        quota = commit[0] if len(set(commit)) == 1 else self._ints(commit)
        chosen = choose(conf, quota, threshold, factor)
        if by_library is not None:
            chosen = torch.where((self._ints(is_parallel) != 0).unsqueeze(1), chosen, by_library)
        return chosen, None if any(is_parallel) else commit

    def _choose_at_random(self, items: list[PlanItem], conf: Tensor, block: Block) -> Tensor:
        """Dream's ``origin``: each mask is committed with the schedule's probability."""
        share = self._floats(np.array([item.commit_probability for item in items])).unsqueeze(1)
        seeds = self._ints([self._requests[item.request_id].generation.seed for item in items])
        steps = self._ints([item.step_in_block for item in items])
        keys = ~row_keys(seeds.unsqueeze(1), steps.unsqueeze(1), block.positions)
        drawn = uniform(keys.flatten(), 1).view(conf.shape)
        return (drawn < share) & (conf > -torch.inf)

    def _sampling(self, items: list[PlanItem], candidates: Candidates, block: Block) -> Sampling | None:
        if not self._sampled:
            return None
        generations = [self._requests[item.request_id].generation for item in items]
        draws = [self._draws[item.request_id] for item in items]
        for item in items:
            self._draws[item.request_id] += 1
        vocabulary = self.model.config.vocab_size
        real = [[g.temperature, g.top_p, g.alg_temp, float(g.remasking == "random")] for g in generations]
        whole = [[g.seed, n, min(g.top_k or vocabulary, vocabulary)] for g, n in zip(generations, draws, strict=True)]
        temperature, top_p, alg_temp, is_random = self._floats(np.array(real)[candidates.item].T)
        seeds, counts, top_k = self._staging.send(np.array(whole, dtype=np.int64)[candidates.item].T.copy())[0]
        truncates = any(g.top_p < 1 or g.top_k is not None for g in generations)
        return Sampling(
            temperature=temperature,
            keys=row_keys(seeds, counts, block.positions.take(candidates.cell)),
            random_remasking=is_random > 0,
            top_p=top_p if truncates else None,
            top_k=top_k if truncates else None,
            alg_temp=alg_temp if any(g.alg_temp > 0 for g in generations) else None,
        )


def _is_out_of_memory(error: RuntimeError) -> bool:
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in said or "ALLOC_FAILED" in said


def _out_of_memory(plan: StepPlan, config: EngineConfig, device: torch.device) -> str:
    if device.type == "cuda":
        torch.cuda.empty_cache()
    rows = sum(item.query_tokens for item in plan.items)
    return (
        f"out of memory in a step of {len(plan.items)} requests and {rows} query tokens: lower "
        f"max_num_batched_tokens={config.max_num_batched_tokens} or max_num_logits={config.max_num_logits}, or leave "
        f"{device} to this process alone"
    )
