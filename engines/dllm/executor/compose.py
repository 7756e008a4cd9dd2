"""Composes a torch executor of the parts that all systems share and dLLM-Serve's own (§4): packed steps, chunked logits, the sparse cache's
pool.

It also measures what the worst packed step allocates, with ``max_num_logits`` enforced (§4.2). That dummy step consists of Refresh requests
that fill the token budget to the last token and build their caches. It runs on the model and device that will serve.
"""

import gc
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from engines.attention.backends import Run, Spans, VarlenAttention, varlen_attention
from engines.dllm.config import DelayedCache, EngineConfig, GenerationConfig, NoCache
from engines.dllm.denoise import reduce_in_chunks
from engines.dllm.engine import Engine
from engines.dllm.executor.graphs import GraphForward, PackedForward, StepGraphs
from engines.dllm.executor.layout import Layouts, PackedLayout, RowLayout
from engines.dllm.executor.output import CandidateChoice, Commit, PackedHead, RankedSpan, Rollout, forwarded_span
from engines.dllm.executor.state import RequestState
from engines.dllm.executor.step import AttendFactory, Forward, Head, StepRows
from engines.dllm.executor.torch import KernelChoice, TorchExecutor
from engines.dllm.memory import cache_rows, logit_rows_at_once
from engines.dllm.plan import PlanItem, Request, check_request
from engines.dllm.scheduling import KvPool, PhaseScheduler
from engines.errors import require
from engines.machine import without_collection
from engines.models.protocol import Attend, DiffusionModel
from engines.runtime.device import PoolTensors, Store, on, staging_to
from engines.runtime.graphs import Recorder
from engines.runtime.step_timer import StepTimer, timer_of

Part = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Attends the Refresh or the Reuse rows of q to k and v; writes into the given output or its own, and returns which."""


@dataclass(frozen=True, kw_only=True)
class PackedAttend:
    """Attention of packed steps. It writes to the pool the rows of Reuse requests, and the retained rows of requests that build their
    cache. ``whole_layer`` keeps every row while the other layers select."""

    pool: PoolTensors
    attention: VarlenAttention
    store: Store
    timer: StepTimer
    whole_layer: int | None = None

    def __call__(self, items: Sequence[PlanItem], rows: StepRows, pad_to: int | None) -> Attend:
        whole = self._layers(rows)
        if rows.selecting is None:
            return whole
        selecting, whole_layer = self._layers(rows.selecting), self.whole_layer
        return lambda layer, q, k, v: (whole if layer == whole_layer else selecting)(layer, q, k, v)

    def _layers(self, rows: StepRows) -> Attend:
        pool, timer, store = self.pool, self.timer, self.store
        reuse_rows = slice(rows.num_refresh_rows, rows.num_rows)
        refresh, reuse = self._by_runs(rows) if rows.spans is None else self._by_spans(rows, rows.spans)
        joins = rows.spans is None or bool(rows.refresh_runs and rows.reuse_q_runs)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            timer.lap_inside("gemm")
            out = torch.empty_like(q) if joins else q
            if joins and rows.num_rows < out.shape[0]:
                out[rows.num_rows :] = 0
            if rows.refresh_runs:
                out = refresh(q, k, v, out)
            if rows.pack is not None:
                timer.lap_inside("attention")
                rows.pack(pool.k[layer], pool.v[layer], q, k, v)
                timer.lap_inside("selection")
            if rows.reuse_q_runs:
                pool_k, pool_v = pool.k[layer], pool.v[layer]
                # The block's fresh rows go right behind the retained ones: one run, no concatenation.
                store(pool_k, pool_v, rows.pool_row, k[reuse_rows], v[reuse_rows])
                if rows.key_rows is not None:
                    pool_k, pool_v = pool_k.index_select(0, rows.key_rows), pool_v.index_select(0, rows.key_rows)
                out = reuse(q, pool_k, pool_v, out)
            timer.lap_inside("attention")
            return out

        return attend

    def _by_runs(self, rows: StepRows) -> tuple[Part, Part]:
        def over(q_runs: Sequence[Run], k_runs: Sequence[Run]) -> Part:
            def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
                varlen_attention(out, q, k, v, q_runs, k_runs)
                return out

            return attend

        return over(rows.refresh_runs, rows.refresh_runs), over(rows.reuse_q_runs, rows.reuse_k_runs)

    def _by_spans(self, rows: StepRows, spans: tuple[Spans, Spans]) -> tuple[Part, Part]:
        """Attend a step with only Refresh or only Reuse rows as a whole, into the backend's own output."""
        attention, is_mixed = self.attention, bool(rows.refresh_runs and rows.reuse_q_runs)
        refresh_rows, reuse_rows = slice(0, rows.num_refresh_rows), slice(rows.num_refresh_rows, rows.num_rows)

        def over(queries: slice, keys: slice, spans: Spans) -> Part:
            def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
                if not is_mixed:
                    return attention(q, k, v, spans)
                attention(q[queries], k[keys], v[keys], spans, out[queries])
                return out

            return attend

        return over(refresh_rows, refresh_rows, spans[0]), over(reuse_rows, slice(None), spans[1])


class Shared:
    """The parts that every system's executor has, for one model and configuration."""

    def __init__(
        self,
        model: DiffusionModel,
        config: EngineConfig,
        *,
        num_slots: int | None = None,
        attention: VarlenAttention | None = None,
        recorder: Recorder | None = None,
        host_norms: bool = True,
    ) -> None:
        """At most ``num_slots`` requests are resident, by default ``max_num_seqs``. ``attention`` is the backend of a system without a
        choice of one. ``recorder`` captures forwards instead of the device's own; ``host_norms`` is as in ``KernelChoice.fuse_layers``."""
        shape, self.device = model.config, next(model.parameters()).device
        self.model, self.config = model, config
        with on(self.device):
            self.kernels, self.staging = KernelChoice(model, config, attention=attention), staging_to(self.device)
            self.kernels.fuse_layers(host_norms=host_norms)
            self.recorder = recorder or self.kernels.recorder()
            """Captures forwards; None if they are not captured."""
        self.state = RequestState(
            shape,
            self.staging,
            num_slots=num_slots or config.max_num_seqs,
            max_len=min(config.max_model_len, shape.max_sequence_length),
            device=self.device,
            spare=int(self.recorder is not None),
            settles=config.settling.settles,
        )
        self.timer = timer_of(self.device)

    def pool(self, kv_rows: int) -> PoolTensors:
        """A pool of ``kv_rows`` rows, and one more for the padding of captured graphs."""
        return PoolTensors.of(self.model, kv_rows + (self.recorder is not None))

    def executor(
        self,
        *,
        pool: PoolTensors,
        rows: RowLayout,
        forward: Forward,
        head: Head,
        graphs: StepGraphs | None = None,
        rollout: Rollout | None = None,
        ranked_span: RankedSpan = forwarded_span,
        also_validate: Callable[[Request], None] | None = None,
        stop_ids: Collection[int] | None = None,
        profile_every: int = 0,
    ) -> TorchExecutor:
        """Make the executor. ``stop_ids`` end requests with ``stop_at_eos``, by default only the model's end of text. ``also_validate``
        refuses requests that the method cannot run."""
        shape, config, state, staging = self.model.config, self.config, self.state, self.staging
        layouts = Layouts(
            state=state,
            rows=rows,
            staging=staging,
            timer=self.timer,
            shifts_logits=shape.shifts_logits,
            wants_every_place=not config.suppress_mask_token and config.decode.learns == "nothing",
        )
        return TorchExecutor(
            config=config,
            kernels=self.kernels,
            state=state,
            pool=pool,
            layouts=layouts,
            forward=forward,
            candidates=CandidateChoice(state, staging, vocab_size=shape.vocab_size),
            head=head,
            commit=Commit(config, state, staging, stop_ids or {shape.eos_token_id}, ranked_span=ranked_span),
            timer=self.timer,
            scope=partial(on, self.device),
            checks=(partial(check_request, model=shape), *([also_validate] if also_validate else [])),
            graphs=graphs,
            rollout=rollout,
            profile_every=profile_every,
        )


def packed_executor(
    model: DiffusionModel,
    config: EngineConfig,
    kv_rows: int,
    *,
    num_slots: int | None = None,
    stop_ids: Collection[int] | None = None,
    profile_every: int = 0,
    recorder: Recorder | None = None,
) -> TorchExecutor:
    """Make dLLM-Serve's executor, with a pool of ``kv_rows`` rows; see ``Shared`` for the rest."""
    config.sparsity.check_layers(model.config.n_layers)
    shared = Shared(model, config, num_slots=num_slots, recorder=recorder)
    kernels, state, staging, timer = shared.kernels, shared.state, shared.staging, shared.timer
    pool = shared.pool(kv_rows)
    graphs = None
    if shared.recorder is not None and config.decode.learns != "attention":
        forward = GraphForward(model, kernels.attention, kernels.store, state.tokens, pool)
        graphs = StepGraphs(forward, staging, shared.recorder)
    attend: AttendFactory = PackedAttend(
        pool=pool,
        attention=kernels.attention,
        store=kernels.store,
        timer=timer,
        whole_layer=config.sparsity.whole_layer,
    )
    rollout = Rollout(attend, pool) if config.decode.learns == "attention" else None
    require(
        rollout is None or model.tensor_parallel is None,
        "tensor_parallel divides the heads, and this rule rests on the mean of all: leave it out",
    )
    rows = PackedLayout(
        model=model,
        state=state,
        timer=timer,
        selection=kernels.selection,
        attend=rollout or attend,
        selecting=kernels.selecting,
        sends_spans=not kernels.attention.needs_host_runs,
        graphs=graphs,
    )
    return shared.executor(
        pool=pool,
        rows=rows,
        forward=PackedForward(model, state, staging, graphs),
        head=PackedHead(model, config, kernels.reduction, kernels.local),
        graphs=graphs,
        rollout=rollout,
        stop_ids=stop_ids,
        profile_every=profile_every,
    )


@dataclass(frozen=True, kw_only=True)
class MeasuredPeak:
    """Measured peaks, in bytes above what was allocated before (weights, KV pool, request state)."""

    activation_bytes: int
    """Peak of a whole worst-case step; its few logit rows are included."""
    logits_bytes: int
    """Peak of the output head on a full budget of rows: in chunks of max_num_logits, or all at once if monolithic."""


def measure_worst_step(model: DiffusionModel, config: EngineConfig, generation: GenerationConfig) -> MeasuredPeak:
    # No step is longer than all requests that may run together.
    longest = min(config.max_model_len, model.config.max_sequence_length)
    num_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * longest)
    config = replace(config, max_num_batched_tokens=num_tokens)
    executor_config = replace(
        config,
        max_num_seqs=config.max_num_batched_tokens,
        logit_rows="decomposed",
        scheduler="phase",
        tie_policy="stable",
        decode=replace(config.decode, learns="nothing"),  # no rule chooses the rows of its Refreshes
    )
    requests = _filling_requests(model, executor_config, generation)
    rows = sum(cache_rows(request.total_len, request.generation, config.sparsity) for request in requests)
    # Delay 0 builds the cache in the very first step, so that one step holds all temporaries. Guided requests have none.
    rule = NoCache() if generation.cfg_scale else DelayedCache(delay=0)
    engine = Engine(
        PhaseScheduler(executor_config, KvPool(rows), rule),
        packed_executor(model, executor_config, rows, num_slots=len(requests)),
    )
    for request in requests:
        engine.submit(request)
    device = next(model.parameters()).device
    activation_bytes = peak_bytes(engine.step, device)
    engine.close()

    hidden = torch.zeros(
        (config.max_num_batched_tokens, model.config.d_model), dtype=next(model.parameters()).dtype, device=device
    )
    reduction = KernelChoice(model, config).reduction  # the reduction that will serve

    @torch.inference_mode()
    def head() -> None:
        reduce_in_chunks(model.logits, hidden, logit_rows_at_once(config, config.logit_rows), reduction, None)

    return MeasuredPeak(activation_bytes=activation_bytes, logits_bytes=peak_bytes(head, device))


def _filling_requests(model: DiffusionModel, config: EngineConfig, generation: GenerationConfig) -> list[Request]:
    """Requests of the longest length, and one of the remaining length, that together fill the budget."""
    longest = min(config.max_model_len, model.config.max_sequence_length, config.max_num_batched_tokens)
    num_longest, remainder = divmod(config.max_num_batched_tokens, longest)
    lengths = [longest] * num_longest + ([remainder] if remainder > generation.gen_length else [])
    token = 0 if model.config.mask_token_id else 1
    return [
        Request(
            request_id=i,
            prompt_len=length - generation.gen_length,
            prompt_ids=(token,) * (length - generation.gen_length),
            generation=generation,
        )
        for i, length in enumerate(lengths)
    ]


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the largest number of bytes that ``run`` held at once, beyond those allocated when it began."""
    # Garbage collection in the middle of a run depends on earlier runs; without it a peak is the same each time.
    with without_collection():
        return _cuda_peak(run, device) if device.type == "cuda" else _cpu_peak(run)


def _cuda_peak(run: Callable[[], object], device: torch.device) -> int:
    gc.collect()  # garbage of earlier runs, freed later, would hide as many bytes
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    bytes_before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - bytes_before


def _cpu_peak(run: Callable[[], object]) -> int:
    """Peak from the allocator's own events: exact, including the kernels' internal temporaries."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr otherwise
    # torch.profiler wraps this profiler with schedules and traces, and loads the compiler with them.
    with profile(profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    live_bytes = peak = 0
    for event in events:
        live_bytes += event.nbytes()
        peak = max(peak, live_bytes)
    return peak
