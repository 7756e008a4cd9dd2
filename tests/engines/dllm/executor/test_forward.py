"""One forward over packed rows, guided or not, or a graph's."""

import torch
from support.graph_recorders import EagerRecorder
from support.step_cases import Resident, Step, step_of
from support.tiny_models import GQA, network

from engines.attention import Sdpa, sdpa
from engines.attention.padded import SdpaPadded
from engines.dllm.cache.selection import TorchSelectAndPack
from engines.dllm.config import EngineConfig
from engines.dllm.executor.attend import PackedAttend
from engines.dllm.executor.forward import PackedForward
from engines.dllm.executor.graphs import StepGraphs, graph_key
from engines.dllm.executor.layout import Layouts, PackedLayout
from engines.dllm.executor.step import Forwarded, GraphRows
from engines.dllm.plan import StepPlan
from engines.dllm.scheduling.phase import Phase
from engines.runtime.pool import PoolTensors, store_by_index
from engines.runtime.step_timer import StepTimer


def forward(step: Step, pool: PoolTensors, graphs: StepGraphs | None = None) -> tuple[Forwarded, bool]:
    timer = StepTimer()
    timer.begin(detailed=False)
    rows = PackedLayout(
        network(GQA),
        step.state,
        timer,
        TorchSelectAndPack(EngineConfig(), None),
        PackedAttend(pool, Sdpa(), store_by_index, timer),
        sends_spans=False,
        graphs=graphs,
    )
    layouts = Layouts(step.state, rows, step.staging, timer, shifts_logits=False, wants_every_place=False)
    layout = layouts.of(step.items, None)
    plan = StepPlan(items=tuple(step.items), admitted=(), scheduled_tokens=0)
    with torch.inference_mode():
        found = PackedForward(network(GQA), step.state, step.staging, graphs)(plan, step.items, layout)
    return found, isinstance(layout.rows, GraphRows)


def alone(step: Step, i: int, *, blind: bool = False) -> torch.Tensor:
    """Hidden states of one request that attends to itself."""
    item, request = step.items[i], step.requests[i]
    (slot,) = step.state.slots([item])
    ids = step.state.tokens[slot, : item.total_len].clone()
    if blind:
        ids[: request.prompt_len] = GQA.mask_id

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q[None], k[None], v[None])[0]

    return network(GQA)(ids, torch.arange(item.total_len), attend)


def test_guidance_is_a_forward_without_the_prompts():
    step = step_of([Resident(generation={"cfg_scale": 2.0}), Resident(prompt_len=11)])
    (hidden, guidance, query_rows), is_graph = forward(step, PoolTensors.of(network(GQA), 1))
    lengths = [item.total_len for item in step.items]
    assert (query_rows, is_graph) == (sum(lengths), False)
    assert guidance is not None
    assert guidance.scale.tolist() == [2.0] * lengths[0] + [0.0] * lengths[1]
    for i, (own, blind) in enumerate(zip(hidden.split(lengths), guidance.hidden.split(lengths), strict=True)):
        torch.testing.assert_close(own, alone(step, i), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(blind, alone(step, i, blind=True), rtol=1e-4, atol=1e-4)


def test_a_step_that_a_graph_holds_is_replayed():
    residents = [Resident(), Resident(phase=Phase.REUSE, prompt_len=7), Resident(phase=Phase.REUSE, kept_rows=5)]
    step = step_of(residents, num_slots=4)  # the last slot is the padding's
    pool = PoolTensors.of(network(GQA), step.num_pool_rows)
    pool.k.normal_(generator=torch.Generator().manual_seed(1))
    pool.v.normal_(generator=torch.Generator().manual_seed(2))
    (plain, _, _), is_graph = forward(step, pool)
    assert not is_graph
    graphs = StepGraphs(
        network(GQA), SdpaPadded(), store_by_index, step.state.tokens, pool, step.staging, EagerRecorder()
    )
    with torch.inference_mode():
        graphs.capture(graph_key(32, 3, 13, has_refresh=True))
    (hidden, _, query_rows), is_graph = forward(step, pool, graphs)
    assert is_graph
    assert query_rows == 13 + 4 + 4
    assert len(hidden) == 32
    torch.testing.assert_close(hidden[:query_rows], plain[:query_rows], rtol=1e-4, atol=1e-4)
