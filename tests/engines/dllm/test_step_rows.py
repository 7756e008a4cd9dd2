"""Metadata of a packed step, against one written token by token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engines.dllm.executor.rows import BlockRows, BuildRows, ItemTable, PackedRows, Places
from engines.dllm.phase import Phase
from engines.dllm.plan import PlanItem

WIDTH = 41


@st.composite
def items(draw: st.DrawFn) -> list[PlanItem]:
    found = []
    for i in range(draw(st.integers(1, 5))):
        total = draw(st.integers(2, WIDTH - 1))
        start = draw(st.integers(1, total - 1))
        end = draw(st.integers(start + 1, total))
        window_end = draw(st.sampled_from((end, total)))
        phase = draw(st.sampled_from(tuple(Phase)))
        outside = total - (window_end - start)
        first = draw(st.integers(1, start)) if phase is Phase.PARTIAL else 0
        found.append(
            PlanItem(
                request_id=i,
                phase=phase,
                total_len=total,
                block_start=start,
                block_end=end,
                window_end=window_end,
                commit=1,
                masks_left=draw(st.integers(1, end - start)),
                kept_rows=outside if first else draw(st.integers(0, outside)),
                kv_start=100 * i,
                step_in_block=0,
                first_row=first,
            )
        )
    return sorted(found, key=lambda item: not item.phase.is_refresh)


def positions(item: PlanItem) -> range:
    if item.phase is Phase.REUSE:
        return range(item.block_start, item.window_end)
    return range(item.first_row, item.total_len)


def pool_rows(item: PlanItem) -> list[int]:
    """Behind the retained rows, which in a PARTIAL are all: those ahead of the window, then those behind it."""
    window = range(item.block_start, item.window_end)
    outside = [position for position in range(item.total_len) if position not in window]
    place = {position: rank for rank, position in enumerate([*outside[: item.kept_rows], *window])}
    return [item.kv_start + place[position] for position in positions(item)]


@given(items(), st.booleans())
def test_rows_are_those_of_the_tokens(found, shifts):
    slots = list(range(len(found)))[::-1]
    table = ItemTable.of(found, slots)
    packed = PackedRows.of(table, None, width=WIDTH, least=8)
    tokens = [(slot, position) for slot, item in zip(slots, found, strict=True) for position in positions(item)]
    assert packed.num_rows == len(tokens)
    assert packed.position[: len(tokens)].tolist() == [position for _, position in tokens]
    assert packed.flat[: len(tokens)].tolist() == [slot * WIDTH + position for slot, position in tokens]
    assert len(packed.position) == max(8, len(tokens))
    assert not packed.position[len(tokens) :].any()

    reuse = [item for item in found if not item.phase.is_refresh]
    assert packed.num_refresh_rows == sum(item.total_len for item in found if item.phase.is_refresh)
    assert packed.pool_row.tolist() == [row for item in reuse for row in pool_rows(item)]
    assert packed.key_len.tolist() == [item.key_tokens for item in reuse]

    row_of = {token: row for row, token in enumerate(tokens)}
    block = BlockRows.of(table, packed.base, width=WIDTH, shifts_logits=shifts)
    for i, (slot, item) in enumerate(zip(slots, found, strict=True)):
        first = positions(item)[0]
        for j in range(block.position.shape[1]):
            inside = j < item.block_len
            assert block.inside is None or block.inside[i, j] == inside
            assert inside or block.inside is not None
            position = item.block_start + j if inside else WIDTH - 1
            assert block.position[i, j] == position
            assert block.flat[i, j] == slot * WIDTH + position
            if inside:
                assert block.packed[i, j] == row_of[slot, max(first, position - shifts)]


@given(items())
def test_a_build_knows_its_block_and_context(found):
    table = ItemTable.of(found, list(range(len(found))))
    packed = PackedRows.of(table, None, width=WIDTH, least=8)
    build = BuildRows.of(table, found, packed.base)
    building = [(i, item) for i, item in enumerate(found) if item.phase is Phase.BUILD]
    assert (build is None) == (not building)
    if build is None:
        return
    block, is_block = build.block()
    context, is_context = build.context()
    for row, (i, item) in enumerate(building):
        start = int(packed.base[i])
        assert block[row][is_block[row]].tolist() == [start + p for p in range(item.block_start, item.block_end)]
        outside = [p for p in range(item.total_len) if not item.block_start <= p < item.window_end]
        assert context[row][is_context[row]].tolist() == [start + p for p in outside]
        assert build.num_context[row] == len(outside)
        assert (build.kept[row], build.kv_start[row]) == (item.kept_rows, item.kv_start)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_places_count_up_within_every_request(counts):
    places = Places.of(np.array(counts), least=8)
    assert places.size == sum(counts)
    wanted = [(i, j) for i, count in enumerate(counts) for j in range(count)]
    found = list(zip(places.request.tolist(), places.rank.tolist(), strict=True))
    assert found == wanted + [(0, 0)] * (max(8, len(wanted)) - len(wanted))
