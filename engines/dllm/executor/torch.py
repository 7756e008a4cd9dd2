"""Runs step plans on a torch model, CPU or CUDA, and measures them.

Request state (token ids) lives on the device in slots. Array arithmetic over plan items builds a step's metadata once and sends it in one
transfer; the model then runs one forward. Refresh rows come first among the packed rows, so both kinds of attention read plain slices. The
host waits for the device only for data it cannot know (``Commit``, ``release``), and never runs more than a step ahead (``step_timer``).

If several ranks share a model, rank 0 schedules, and every rank runs each plan on its own part of the model. They need not exchange tokens:
all ranks decide them from the same numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from traceback import clear_frames
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from engines.attention.backends import VarlenAttention
from engines.attention.flash import FlashVarlen
from engines.attention.registry import attention_backend, availability
from engines.dllm.config import EngineConfig, Phase, SparsityConfig
from engines.dllm.denoise import FusedReduction, Reduction, VocabularyReduction, vocabulary_reduction
from engines.dllm.executor.graphs import StepGraphs, mixed_keys, reuse_keys
from engines.dllm.executor.layout import Layouts, SelectingLayers
from engines.dllm.executor.output import CandidateChoice, Commit, Rollout
from engines.dllm.executor.state import RequestState
from engines.dllm.executor.step import Forward, GraphRows, Head, SelectAndPack, TorchSelectAndPack, TritonSelectAndPack
from engines.dllm.plan import DelegatingExecutor, Executor, ExecutorError, Request, StepOutcome, StepPlan
from engines.errors import is_out_of_memory
from engines.kernels.probe import HostKernels, TritonKernels
from engines.models.layers import FusedOps, fuse, products_by
from engines.models.protocol import DiffusionModel, Ranks
from engines.parallel.group import TensorParallel
from engines.runtime.device import PoolTensors
from engines.runtime.graphs import CudaRecorder, Recorder
from engines.runtime.step_timer import DeviceTimes, StepTimer


class KernelChoice:
    """The kernels that serve one model and configuration. ``attention`` is the backend of a system without a choice of one."""

    def __init__(
        self, model: DiffusionModel, config: EngineConfig, *, attention: VarlenAttention | None = None
    ) -> None:
        weight, shape, kv_heads = next(model.parameters()), model.config, model.kv_heads_here
        self._config = config
        assert isinstance(model, nn.Module)
        self._model = model
        self._device, self._dtype = weight.device, weight.dtype
        self.triton = TritonKernels(device=self._device, dtype=self._dtype, is_wanted=config.fused_kernels)
        self._host = HostKernels(device=self._device, dtype=self._dtype)
        self._heads = shape.head_dim, shape.n_heads * kv_heads // shape.n_kv_heads, kv_heads
        self.attention = attention or attention_backend(
            config.attention_backend, self._device, self._dtype, *self._heads
        )
        decode, kind = config.decode, FusedReduction if self.triton.serve("confidence") else Reduction
        self.reduction = kind(
            confidence=decode.confidence,
            confidence_of=decode.confidence_of,
            dtype=decode.confidence_dtype,
            suppress_id=shape.mask_token_id if config.suppress_mask_token else None,
        )
        self.local: VocabularyReduction | None = vocabulary_reduction(
            self.reduction, model, is_fused=self.triton.serve("partial")
        )
        """Reduces this rank's vocabulary shard; None without tensor parallelism."""
        sparsity, ranks = config.sparsity, model.tensor_parallel
        self.selection = self._select_and_pack(config, ranks)
        self.selecting: SelectingLayers | None = None
        """How the other layers select if one keeps every row; ``selection`` then packs that one's."""
        if sparsity.whole_layer is not None:
            self.selecting = SelectingLayers(sparsity, self.selection)
            dense = SparsityConfig(selection="dense", refresh_delay=sparsity.refresh_delay)
            self.selection = self._select_and_pack(replace(config, sparsity=dense), ranks)
        self.store = self._host.store(self.triton.store)

    def _select_and_pack(self, config: EngineConfig, ranks: Ranks | None) -> SelectAndPack:
        # Kernels sum in another order, and only a rank's own heads; none scores attention probabilities.
        selection = config.sparsity.selection
        needs_torch = config.tie_policy == "parity" or selection == "attended" or (ranks and selection == "uniform")
        if not needs_torch and self.triton.serve("pack", "scores"):
            return TritonSelectAndPack(config)
        return TorchSelectAndPack(config, ranks)

    def fuse_layers(self, *, host_norms: bool = True) -> None:
        """Have the model's layers use the kernels that serve; an earlier executor may have set others. ``host_norms``: whether a CPU's
        kernels may normalise."""
        # A CPU's copies of weights, for its products, hold one layer each.
        ops = self._host.ops(FusedOps())._replace(joins=False)
        fuse(self._model, self.triton.ops(ops if host_norms else ops._replace(rms_norm=None)))

    def recorder(self) -> Recorder | None:
        """Return the recorder of forwards, None if they are not captured: in a graph, all layers must read the same runs."""
        if self.selecting is not None:
            return None
        if self._device.type != "cuda" or not self._config.cuda_graphs or not isinstance(self.attention, FlashVarlen):
            return None
        return CudaRecorder(self._device)

    def report(self) -> dict[str, Any]:
        """Report, as JSON, which kernels serve, and which were passed over and why."""
        if self._device.type == "cpu":
            return {
                "attention_backend": self.attention.name,
                "host_kernels_unavailable": self._host.fault,
                "products": products_by(self._model),
            }
        reasons = availability(self._device, self._dtype, *self._heads)
        return {
            "attention_backend": self.attention.name,
            "attention_unavailable": {name: reason for name, reason in reasons.items() if reason is not None},
            "fused_kernels": self.triton.serve(),
            "kernel_faults": dict(self.triton.faults()),
        }


P = ParamSpec("P")
R = TypeVar("R")


def _on_its_device(method: Callable[P, R]) -> Callable[P, R]:
    """Run the method with the executor's device as the current one, whatever the caller's is."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        executor: Any = args[0]
        with executor.scope():
            return method(*args, **kwargs)

    return run


@dataclass(kw_only=True, eq=False)
class TorchExecutor:
    """Runs one step after another, with the parts it is given; ``packed_executor`` and the baselines' like it compose them."""

    config: EngineConfig
    kernels: KernelChoice
    state: RequestState
    pool: PoolTensors
    layouts: Layouts
    forward: Forward
    candidates: CandidateChoice
    head: Head
    commit: Commit
    timer: StepTimer
    scope: Callable[[], AbstractContextManager[object]]
    """Makes the device of its tensors the current one."""
    checks: Sequence[Callable[[Request], None]]
    """Each refuses requests that the model or the method cannot run."""
    graphs: StepGraphs | None = None
    rollout: Rollout | None = None
    """Tracks attention, if a rule needs it."""
    profile_every: int = 0
    """Every this many steps, one step is timed by parts (``STEP_PARTS``); 0 for none."""
    _num_steps: int = field(default=0, init=False)
    _is_closed: bool = field(default=False, init=False)

    @property
    def device(self) -> torch.device:
        return self.state.tokens.device

    @_on_its_device
    def paths(self) -> dict[str, Any]:
        """Report, as JSON, which kernels its steps run on, and which were passed over and why."""
        report = self.kernels.report()
        if self.device.type != "cpu":
            report["cuda_graph_sizes"] = 0 if self.graphs is None else len(self.graphs.keys)
        return report

    @_on_its_device
    def close(self) -> None:
        """Free what it holds on the device: layout, graphs and pool. It runs nothing afterwards; may be called twice.

        If ranks share a model, each closes its executor before it leaves the group: a communicator waits for the graphs that hold its
        collectives.
        """
        self._is_closed = True
        self.layouts.forget()
        self.forward.rest()
        if self.graphs is not None:
            self.graphs.close()
        self.pool.close()

    @_on_its_device
    def prepare(self, block_length: int) -> None:
        """Capture the graphs for steps with blocks of that length, before anything is timed."""
        if self.graphs is None:
            return
        with torch.inference_mode():
            # Capture the largest first: the others then fit into its memory.
            slots = self.config.max_num_seqs
            keys = reuse_keys(slots, block_length, settles=self.state.settles)
            for key in sorted({*keys, *mixed_keys(slots)}, reverse=True):
                self.graphs.capture(key)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def validate(self, request: Request) -> None:
        """Raise UserError for a request that cannot run, before it is queued."""
        for check in self.checks:
            check(request)

    @_on_its_device
    def release(self, request_id: int) -> tuple[int, ...]:
        token_ids = self.state.release(request_id)
        if self.state.is_empty:
            self.forward.rest()
        return token_ids

    @_on_its_device
    def wait(self) -> None:
        self.timer.wait()

    @_on_its_device
    def times(self) -> Mapping[int, DeviceTimes]:
        return self.timer.times()

    @_on_its_device
    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutcome:
        assert not self._is_closed, "a closed executor has no pool"
        if self.state.is_empty:
            self.timer.rest()
        self.timer.begin(detailed=self.profile_every > 0 and self._num_steps % self.profile_every == 0)
        try:
            return self._run(plan)
        except RuntimeError as error:  # torch.OutOfMemoryError is a RuntimeError
            if not is_out_of_memory(error):
                raise
            self.timer.abandon()
            self.layouts.forget()
            # The frames of the failed call hold the step's tensors.
            clear_frames(error.__traceback__)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            rows, config = sum(item.query_tokens for item in plan.items), self.config
            raise ExecutorError(
                f"out of memory in a step of {len(plan.items)} requests and {rows} query tokens: lower "
                f"max_num_batched_tokens={config.max_num_batched_tokens} or max_num_logits={config.max_num_logits}, or leave "
                f"{self.device} to this process alone"
            ) from error
        finally:
            self._num_steps += 1

    def _run(self, plan: StepPlan) -> StepOutcome:
        timer = self.timer
        self.state.admit(plan.admitted)
        indices = range(len(plan.items))  # Refreshes first, settled rows last
        order = sorted(indices, key=lambda i: _PLACE[plan.items[i].phase] + (plan.items[i].settled_rows > 0))
        items = [plan.items[i] for i in order]
        layout = self.layouts.of(items, plan.pad_to)
        timer.lap("metadata")
        hidden, guidance, query_rows = self.forward(plan, items, layout)
        timer.lap("gemm")
        tokens = self.state.block_tokens(layout.block)
        candidates = self.candidates.of(items, layout, tokens)
        sampling = self.candidates.sampling(items, candidates, layout.block)
        timer.lap("commit")
        reduced = self.head(hidden, guidance, candidates, sampling)
        timer.lap("logits")
        counts, stops, scores, facts = self.commit(items, layout.block, tokens, candidates, reduced)
        timer.lap("commit")
        times = timer.end()
        committed = [0] * len(items)
        confidences: list[tuple[float, ...]] = [()] * len(items)
        learned = None
        if facts is not None:
            if self.rollout is not None:
                facts = [
                    k._replace(importance=row) for k, row in zip(facts, self.rollout.importance(items), strict=True)
                ]
            learned = tuple([facts[order.index(i)] for i in indices])
        for index, i in enumerate(order):
            committed[i] = counts[index]
            if scores is not None:
                confidences[i] = scores[index]
        return StepOutcome(
            committed=tuple(committed),
            query_rows=query_rows,
            logit_rows=self.head.logit_rows(layout.num_rows, candidates.size),
            forward_s=None if times is None else times.forward_s,
            duration_s=None,
            stops=stops,
            graph=isinstance(layout.rows, GraphRows),
            parts=None if times is None else times.parts,
            confidences=None if scores is None else tuple(confidences),
            learned=learned,
        )


_PLACE = {phase: 0 if phase.is_refresh else 1 for phase in Phase}


class LeadingExecutor(DelegatingExecutor):
    """Rank 0's executor, each of whose steps the other ranks run too (``follow``). Call ``stop`` at the end.

    Requests are validated only here: a refused one is never sent to the others.
    """

    def __init__(self, executor: Executor, group: TensorParallel) -> None:
        super().__init__(executor)
        self._group = group

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Run a step on all ranks. An ExecutorError becomes a RuntimeError: other ranks may wait for data not sent."""
        self._group.from_leader(("execute", plan))
        try:
            return self.executor.execute(plan)
        except ExecutorError as error:
            raise RuntimeError(f"rank {self._group.rank} could not run a step and the others did: {error}") from error

    def release(self, request_id: int) -> tuple[int, ...] | None:
        self._group.from_leader(("release", request_id))
        return super().release(request_id)

    def stop(self) -> None:
        """Let the other ranks close their executors and return from ``follow``, then close this rank's executor."""
        self._group.from_leader(("stop", None))
        # Close before leaving the group, after an error too: collectives captured in graphs keep a communicator from ending.
        self.close()


def follow(executor: Executor, group: TensorParallel) -> None:
    """Do what rank 0's ``LeadingExecutor`` does until it stops, then close the executor. All other ranks call this."""
    try:
        while True:
            command: tuple[str, Any] = group.from_leader()
            name, argument = command
            if name == "stop":
                break
            if name == "execute":
                executor.execute(argument)
            else:
                with suppress(ExecutorError):  # rank 0 fails too, and reports it
                    executor.release(argument)
    finally:
        executor.close()
