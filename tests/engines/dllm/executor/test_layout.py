"""A step's metadata: one transfer, shared by the steps that compute the same rows."""

from collections.abc import Sequence

import pytest
from support.step_cases import Resident, Step, step_of
from support.tiny_models import GQA, network

from engines.dllm.config import EngineConfig
from engines.dllm.executor.layout import Layouts, PackedLayout
from engines.dllm.executor.rows import ItemTable, PackedRows
from engines.dllm.executor.step import EagerRows, StepRows, TorchSelectAndPack
from engines.dllm.phase import Phase
from engines.dllm.plan import PlanItem
from engines.models.protocol import Attend
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
