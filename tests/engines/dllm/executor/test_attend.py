"""Attention of a packed step against every request's own, over plain copies of its rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.step_cases import Resident, Step, step_of
from support.tiny_models import GQA, network

from engines.attention import Sdpa, VarlenAttention, sdpa
from engines.attention.backends import SdpaPadded
from engines.dllm.config import EngineConfig, SparsityConfig
from engines.dllm.executor.attend import PackedAttend
from engines.dllm.executor.layout import Layouts, PackedLayout
from engines.dllm.executor.step import EagerRows, TorchSelectAndPack
from engines.dllm.phase import Phase
from engines.runtime.device import PoolTensors, store_by_index
from engines.runtime.step_timer import StepTimer

HEAD_DIM = GQA.config.head_dim

residents = st.builds(
    Resident,
    prompt_len=st.integers(1, 9),
    block_length=st.integers(1, 5),
    phase=st.sampled_from((Phase.FULL, Phase.BUILD, Phase.REUSE)),
    kept_rows=st.just(1),
)


def attended(step: Step, pool: PoolTensors, attention: VarlenAttention) -> EagerRows:
    timer = StepTimer()
    timer.begin(detailed=False)
    rows = PackedLayout(
        network(GQA),
        step.state,
        timer,
        TorchSelectAndPack(EngineConfig(sparsity=SparsityConfig(selection="dense")), None),
        PackedAttend(pool, attention, store_by_index, timer),
        sends_spans=not attention.needs_host_runs,
    )
    layouts = Layouts(step.state, rows, step.staging, timer, shifts_logits=False, wants_every_place=False)
    found = layouts.of(step.items, None).rows
    assert isinstance(found, EagerRows)
    return found


@settings(max_examples=40)
@given(st.lists(residents, min_size=1, max_size=4), st.sampled_from((Sdpa(), SdpaPadded())), st.integers(0, 99))
def test_every_request_attends_to_its_own(found, attention, seed):
    step = step_of(sorted(found, key=lambda resident: not resident.phase.is_refresh))
    random = torch.Generator().manual_seed(seed)
    pool = PoolTensors.of(network(GQA), step.num_pool_rows)
    pool.k.copy_(torch.randn(pool.k.shape, generator=random))
    pool.v.copy_(torch.randn(pool.v.shape, generator=random))
    before = pool.k.clone(), pool.v.clone()
    eager = attended(step, pool, attention)
    num = max(8, eager.rows.num_rows)
    q = torch.randn(num, GQA.heads, HEAD_DIM, generator=random)
    k, v = (torch.randn(num, GQA.kv_heads, HEAD_DIM, generator=random) for _ in "kv")
    out = eager.attend(1, q, k, v)
    assert out.shape == q.shape
    first, written = 0, torch.zeros(step.num_pool_rows, dtype=torch.bool)
    for item in step.items:
        own = slice(first, first + item.query_tokens)
        if item.phase.is_refresh:
            keys, values = k[own], v[own]
            kept = slice(item.kv_start, item.kv_start + item.kept_rows * (item.phase is Phase.BUILD))
        else:
            run = slice(item.kv_start, item.kv_start + item.kept_rows)
            keys, values = torch.cat((before[0][1, run], k[own])), torch.cat((before[1][1, run], v[own]))
            kept = slice(run.stop, run.stop + item.window_len)
            assert torch.equal(pool.k[1, kept], k[own])
            assert torch.equal(pool.v[1, kept], v[own])
        written[kept] = True
        wanted = sdpa(q[None, own], keys[None], values[None])[0]
        torch.testing.assert_close(out[own], wanted, rtol=1e-5, atol=1e-6)
        first = own.stop
    # Nothing else of the pool is touched, and padding is finite.
    assert torch.equal(pool.k[1, ~written], before[0][1, ~written])
    assert torch.equal(pool.k[[0]], before[0][[0]])
    assert out.isfinite().all()


def test_parts_of_a_profiled_step_are_told_apart():
    step = step_of([Resident(phase=Phase.BUILD), Resident(phase=Phase.REUSE)])
    pool = PoolTensors.of(network(GQA), step.num_pool_rows)
    laps: list[str] = []

    class Noting(StepTimer):
        def lap(self, part: str) -> None:
            laps.append(part)

    timer = Noting()
    timer.begin(detailed=True)
    selection = TorchSelectAndPack(EngineConfig(sparsity=SparsityConfig(selection="dense")), None)
    rows = PackedLayout(
        network(GQA), step.state, timer, selection, PackedAttend(pool, Sdpa(), store_by_index, timer), sends_spans=False
    )
    layouts = Layouts(step.state, rows, step.staging, timer, shifts_logits=False, wants_every_place=False)
    eager = layouts.of(step.items, None).rows
    assert isinstance(eager, EagerRows)
    q, kv = torch.zeros(17, GQA.heads, HEAD_DIM), torch.zeros(17, GQA.kv_heads, HEAD_DIM)
    eager.attend(0, q, kv, kv)
    assert laps == ["gemm", "attention", "selection", "attention"]


@pytest.mark.parametrize("rows", [1, 8])
def test_a_pool_is_of_the_model(rows):
    pool = PoolTensors.of(network(GQA), rows)
    assert pool.num_rows == rows
    assert pool.k.shape == pool.v.shape == (GQA.layers, rows, GQA.kv_heads, HEAD_DIM)
    pool.fill_with_zeros()
    assert not pool.k.any()
    assert not pool.v.any()
