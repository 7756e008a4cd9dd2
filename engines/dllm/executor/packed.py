"""dLLM-Serve's torch executor: packed steps, logits in chunks, the sparse cache's pool (dLLM-Serve §4)."""

from __future__ import annotations

from collections.abc import Collection

from engines.dllm.config import EngineConfig
from engines.dllm.executor.attend import PackedAttend
from engines.dllm.executor.compose import Shared
from engines.dllm.executor.forward import PackedForward
from engines.dllm.executor.graphs import StepGraphs
from engines.dllm.executor.head import PackedHead
from engines.dllm.executor.layout import PackedLayout
from engines.dllm.executor.torch import TorchExecutor
from engines.models.protocol import DiffusionModel
from engines.runtime.recorder import Recorder


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
        PackedAttend(pool, kernels.attention, kernels.store, timer),
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
