"""A step's metadata: one transfer, shared by the steps that compute the same rows.

Slots and token ids of resident requests.

Attention of a packed step against every request's own, over plain copies of its rows.
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.step_cases import Resident, Step, step_of
from support.tiny_models import GQA, network

from engines.attention.backends import Sdpa, SdpaPadded, VarlenAttention, sdpa
from engines.dllm.config import EngineConfig, Phase, SparsityConfig
from engines.dllm.executor.compose import PackedAttend
from engines.dllm.executor.layout import Layouts, PackedLayout
from engines.dllm.executor.state import RequestState
from engines.dllm.executor.step import EagerRows, StepRows, TorchSelectAndPack
from engines.dllm.plan import PlanItem
from engines.models.protocol import Attend
from engines.runtime.device import PoolTensors, Staging, store_by_index
from engines.runtime.step_timer import StepTimer

MIXED = (Resident(), Resident(phase=Phase.BUILD, prompt_len=9), Resident(phase=Phase.REUSE, prompt_len=7))


class NoAttention:
    """Keeps the rows it was asked for."""

    def __init__(self) -> None:
        self.asked: list[StepRows] = []

    def __call__(self, items: Sequence[PlanItem], rows: StepRows, pad_to: int | None) -> Attend:
        self.asked.append(rows)
        return lambda layer, q, k, v: q


def layouts_of(step: Step, attend: NoAttention, *, every: bool = False, sends_spans: bool = False) -> Layouts:
    timer = StepTimer()
    rows = PackedLayout(
        model=network(GQA),
        state=step.state,
        timer=timer,
        selection=TorchSelectAndPack(EngineConfig(), None),
        attend=attend,
        sends_spans=sends_spans,
    )
    return Layouts(
        state=step.state, rows=rows, staging=step.staging, timer=timer, shifts_logits=False, wants_every_place=every
    )


def test_steps_of_the_same_rows_share_a_layout():
    step, attend = step_of(MIXED), NoAttention()
    layouts = layouts_of(step, attend)
    first = layouts.of(step.items, None)
    again = [item._replace(commit=2, masks_left=1, step_in_block=3) for item in step.items]
    assert layouts.of(again, None) is first
    for change in ({"phase": Phase.BUILD}, {"kept_rows": 2}, {"kv_start": 50}, {"block_end": 12, "window_end": 12}):
        other = [step.items[0]._replace(**change), *step.items[1:]]
        assert layouts.of(other, None) is not first
        first = layouts.of(step.items, None)
    layouts.forget()
    assert layouts.of(step.items, None) is not first


@pytest.mark.parametrize("sends_spans", [False, True])
def test_all_metadata_goes_in_one_transfer(sends_spans):
    step, attend = step_of(MIXED), NoAttention()
    before = step.staging.num_sends
    layouts_of(step, attend, sends_spans=sends_spans).of(step.items, None)
    assert step.staging.num_sends == before + 1
    (rows,) = attend.asked
    assert (rows.spans is not None) == sends_spans
    if rows.spans is not None:
        refresh, reuse = rows.spans
        assert refresh.cu_q.tolist() == [0, *(end for _, end in rows.refresh_runs)]
        assert reuse.k_start.tolist()[:-1] == [start for start, _ in rows.reuse_k_runs]
        assert reuse.k_len.tolist() == [end - start for start, end in rows.reuse_k_runs]


def test_every_place_is_a_candidate_where_committed_ones_count():
    step = step_of([Resident(phase=Phase.REUSE), Resident(phase=Phase.REUSE, committed=2)])
    layout = layouts_of(step, NoAttention(), every=True).of(step.items, None)
    assert layout.every is not None
    assert layout.every.is_every_row
    assert layout.every.row.tolist() == list(range(8))
    step.items[1] = step.items[1]._replace(window_end=step.items[1].window_end + 2)
    longer = layouts_of(step, NoAttention(), every=True).of(step.items, None)
    assert longer.num_rows == 10
    assert longer.every is not None
    assert not longer.every.is_every_row
    assert longer.every.row.tolist() == list(range(8))
    alone = layouts_of(step_of(MIXED), NoAttention()).of(step_of(MIXED).items, None)
    assert alone.every is None


def test_a_request_that_was_never_admitted_has_no_ids():
    state = RequestState(GQA.config, Staging(), num_slots=1, max_len=40, device=torch.device("cpu"))
    assert state.release(4) == ()


def test_special_requests_are_known_while_they_live():
    asked = {
        "guided": {"cfg_scale": 1.0},
        "sampled": {"temperature": 0.5},
        "parallel": {"threshold": 0.9},
        "stopping": {"stop_at_eos": True},
    }
    step = step_of([Resident(generation=generation) for generation in asked.values()])
    for i, name in enumerate(asked):
        assert getattr(step.state, name) == {i}
        step.state.release(i)
        assert getattr(step.state, name) == set()
    also_sampled = [{"alg_temp": 0.5}, {"remasking": "random"}]
    assert step_of([Resident(generation=generation) for generation in also_sampled]).state.sampled == {0, 1}


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
        model=network(GQA),
        state=step.state,
        timer=timer,
        selection=TorchSelectAndPack(EngineConfig(sparsity=SparsityConfig(selection="dense")), None),
        attend=PackedAttend(pool=pool, attention=attention, store=store_by_index, timer=timer),
        sends_spans=not attention.needs_host_runs,
    )
    layouts = Layouts(
        state=step.state, rows=rows, staging=step.staging, timer=timer, shifts_logits=False, wants_every_place=False
    )
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
        model=network(GQA),
        state=step.state,
        timer=timer,
        selection=selection,
        attend=PackedAttend(pool=pool, attention=Sdpa(), store=store_by_index, timer=timer),
        sends_spans=False,
    )
    layouts = Layouts(
        state=step.state, rows=rows, staging=step.staging, timer=timer, shifts_logits=False, wants_every_place=False
    )
    eager = layouts.of(step.items, None).rows
    assert isinstance(eager, EagerRows)
    q, kv = torch.zeros(17, GQA.heads, HEAD_DIM), torch.zeros(17, GQA.kv_heads, HEAD_DIM)
    eager.attend(0, q, kv, kv)
    assert laps == ["gemm", "attention", "selection", "attention"]
