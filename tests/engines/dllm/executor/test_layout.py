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

from engines.attention import Sdpa, VarlenAttention, sdpa
from engines.attention.backends import SdpaPadded
from engines.dllm.config import EngineConfig, GenerationConfig, Phase, SparsityConfig
from engines.dllm.executor.attend import PackedAttend
from engines.dllm.executor.layout import Layouts, PackedLayout
from engines.dllm.executor.rows import ItemTable, PackedRows
from engines.dllm.executor.state import RequestState
from engines.dllm.executor.step import EagerRows, StepRows, TorchSelectAndPack
from engines.dllm.plan import PlanItem, Request
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
        network(GQA), step.state, timer, TorchSelectAndPack(EngineConfig(), None), attend, sends_spans=sends_spans
    )
    return Layouts(step.state, rows, step.staging, timer, shifts_logits=False, wants_every_place=every)


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


def test_the_device_holds_what_the_host_computed():
    step = step_of(MIXED)
    layout = layouts_of(step, NoAttention()).of(step.items, None)
    table = ItemTable.of(step.items, step.state.slots(step.items))
    packed = PackedRows.of(table, None, width=step.state.width, least=8)
    assert isinstance(layout.rows, EagerRows)
    rows = layout.rows.rows
    assert rows.position.tolist() == packed.position.tolist()
    assert rows.flat.tolist() == packed.flat.tolist()
    assert rows.pool_row.tolist() == packed.pool_row.tolist()
    assert (layout.num_rows, rows.num_refresh_rows) == (packed.num_rows, packed.num_refresh_rows)
    assert rows.pack is not None
    # The places of a block are those of its ids.
    ids = step.state.tokens.take(layout.block.flat)
    slots = step.state.slots(step.items)
    wanted = [
        step.state.tokens[slot, i.block_start : i.block_end].tolist() for slot, i in zip(slots, step.items, strict=True)
    ]
    assert ids.tolist() == wanted
    assert rows.position.take(layout.block.packed).tolist() == layout.block.positions.tolist()


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


def request_of(request_id: int, prompt_len: int, **generation: object) -> Request:
    settings = GenerationConfig(gen_length=6, block_length=3, steps=6, **generation)
    ids = tuple(range(1, prompt_len + 1))
    return Request(request_id=request_id, prompt_len=prompt_len, prompt_ids=ids, generation=settings)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(1, 30)), max_size=40))
def test_every_request_has_its_own_slot(events):
    """Whatever comes and goes, nobody's ids are another's; a slot is free again at once."""
    state = RequestState(GQA.config, Staging(), num_slots=3, max_len=40, device=torch.device("cpu"))
    resident: dict[int, Request] = {}
    for enters, request_id, prompt_len in events:
        if enters and request_id not in resident and len(resident) < 3:
            resident[request_id] = request_of(request_id, prompt_len)
            state.admit([resident[request_id]])
        elif not enters and request_id in resident:
            assert state.release(request_id) == (GQA.mask_id,) * 6
            del resident[request_id]
        for request in resident.values():
            row = state.tokens[state._slots[request.request_id]]
            assert tuple(row[: request.prompt_len].tolist()) == request.prompt_ids
            assert (row[request.prompt_len : request.total_len] == GQA.mask_id).all()
        assert state.is_empty == (not resident)


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


def test_an_early_end_is_filled_with_end_of_text():
    step = step_of([Resident(committed=4)])
    step.state.end_with(step.items[0])
    assert step.state.release(0) == (5, 6, 7, 8, *[GQA.config.eos_token_id] * 4)


def test_draws_are_counted_for_each_request():
    step = step_of([Resident(), Resident()])
    assert step.state.next_draws(step.items) == [0, 0]
    assert step.state.next_draws(step.items[1:]) == [1]
    assert step.state.next_draws(step.items) == [1, 2]


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
