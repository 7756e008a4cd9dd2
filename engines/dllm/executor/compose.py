"""Makes a torch executor of its parts: those all systems share, and the ones that are a system's own; and dLLM-Serve's own
executor of packed steps, logits in chunks and the sparse cache's pool (dLLM-Serve §4)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch

from engines.attention import VarlenAttention
from engines.dllm.config import EngineConfig
from engines.dllm.executor.attend import PackedAttend
from engines.dllm.executor.candidates import CandidateChoice
from engines.dllm.executor.commit import Commit, RankedSpan, forwarded_span
from engines.dllm.executor.forward import PackedForward
from engines.dllm.executor.graphs import StepGraphs
from engines.dllm.executor.head import PackedHead
from engines.dllm.executor.kernel_choice import KernelChoice
from engines.dllm.executor.layout import Layouts, PackedLayout, RowLayout
from engines.dllm.executor.state import RequestState
from engines.dllm.executor.step import Forward, Head
from engines.dllm.executor.torch import TorchExecutor
from engines.dllm.plan import Request, check_request
from engines.models.protocol import DiffusionModel
from engines.runtime.device import on
from engines.runtime.graphs import Recorder
from engines.runtime.pool import PoolTensors
from engines.runtime.staging import Staging, staging_to
from engines.runtime.step_timer import StepTimer, timer_of


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The parts that every system's executor has alike, for one model and configuration."""

    model: DiffusionModel
    config: EngineConfig
    device: torch.device
    kernels: KernelChoice
    recorder: Recorder | None
    """How forwards are captured; None where they are not."""
    state: RequestState
    staging: Staging
    timer: StepTimer

    @classmethod
    def of(
        cls,
        model: DiffusionModel,
        config: EngineConfig,
        *,
        num_slots: int | None = None,
        attention: VarlenAttention | None = None,
        recorder: Recorder | None = None,
        host_norms: bool = True,
    ) -> Shared:
        """``num_slots`` requests at most are resident, by default ``max_num_seqs``. ``attention`` is the backend of a
        system without a choice of one; ``recorder`` captures forwards in place of the device's own; ``host_norms`` as for
        ``KernelChoice.fuse_layers``."""
        shape, device = model.config, next(model.parameters()).device
        with on(device):
            kernels, staging = KernelChoice(model, config, attention=attention), staging_to(device)
            kernels.fuse_layers(model, host_norms=host_norms)
            recorder = recorder or kernels.recorder()
        state = RequestState(
            shape,
            staging,
            num_slots=num_slots or config.max_num_seqs,
            max_len=min(config.max_model_len, shape.max_sequence_length),
            device=device,
            spare=int(recorder is not None),
            settles=config.settling.settles,
        )
        return cls(
            model=model,
            config=config,
            device=device,
            kernels=kernels,
            recorder=recorder,
            state=state,
            staging=staging,
            timer=timer_of(device),
        )

    def pool(self, kv_rows: int) -> PoolTensors:
        """``kv_rows`` rows, and one more for the padding of captured graphs."""
        return PoolTensors.of(self.model, kv_rows + (self.recorder is not None))

    def executor(
        self,
        *,
        pool: PoolTensors,
        rows: RowLayout,
        forward: Forward,
        head: Head,
        graphs: StepGraphs | None = None,
        ranked_span: RankedSpan = forwarded_span,
        also_validate: Callable[[Request], None] | None = None,
        stop_ids: Collection[int] | None = None,
        profile_every: int = 0,
    ) -> TorchExecutor:
        """``stop_ids`` end requests with ``stop_at_eos``; the default is the model's end of text alone.
        ``also_validate`` refuses what the method cannot run."""
        shape, config, state, staging = self.model.config, self.config, self.state, self.staging
        layouts = Layouts(
            state,
            rows,
            staging,
            self.timer,
            shifts_logits=shape.shifts_logits,
            wants_every_place=not config.suppress_mask_token,
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
    """See ``Shared``; the pool holds ``kv_rows`` rows."""
    config.sparsity.check_layers(model.config.n_layers)
    shared = Shared.of(model, config, num_slots=num_slots, recorder=recorder)
    kernels, state, staging, timer = shared.kernels, shared.state, shared.staging, shared.timer
    pool = shared.pool(kv_rows)
    graphs = None
    if shared.recorder is not None:
        graphs = StepGraphs(model, kernels.attention, kernels.store, state.tokens, pool, staging, shared.recorder)
    rows = PackedLayout(
        model,
        state,
        timer,
        kernels.selection,
        PackedAttend(pool, kernels.attention, kernels.store, timer, config.sparsity.whole_layer),
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
        stop_ids=stop_ids,
        profile_every=profile_every,
    )
