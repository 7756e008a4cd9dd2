"""The grid, what a budget keeps of it, and which graph a step replays."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from support.prefill import ask, h200_14b, task

from engines.laps.batching import GRID, LADDER, Ladder, Nearest, WithGraphs, graph_bytes, graph_choice, shapes_of
from engines.policies.batching import Chunked
from engines.policies.views import FALLBACK, Bucket, Chunk, PrefillQueue, Rung, StepMode, padded_tokens

_, MODEL = h200_14b()
lengths = st.lists(st.integers(1, 300), min_size=1, max_size=70)


def holds(mode: Bucket | Rung, chunks: Sequence[Chunk]) -> bool:
    """Whether the chunks fit the captured shape."""
    if isinstance(mode, Bucket):
        return len(chunks) <= mode.batch and all(chunk.tokens <= mode.length for chunk in chunks)
    return sum(chunk.tokens for chunk in chunks) <= mode.tokens


def chunks_of(tokens: list[int]) -> list[Chunk]:
    return [Chunk(0, each) for each in tokens]


def test_the_grid_has_42_shapes_up_to_16384_tokens():
    assert len(set(GRID)) == 42
    assert max(shape.tokens for shape in GRID) == 16384


def test_the_whole_grid_takes_ten_gigabytes():
    assert 42 * graph_bytes("Qwen2.5-14B", 48) == 10_080_000_000
    assert graph_bytes("another", 48) == 255_280_000


def test_a_budget_keeps_the_smallest_steps():
    kept = shapes_of("nearest", 10 * 240_000_000, 240_000_000)
    assert len(kept) == 10
    assert max(shape.tokens for shape in kept) <= min(shape.tokens for shape in set(GRID) - set(kept))
    assert shapes_of("nearest", 10 * 240_000_000) == kept
    assert shapes_of("nearest", 0, 1) == ()
    assert len(shapes_of("cheapest")) == 42
    assert len(shapes_of("ladder", 3, 1)) == 3
    assert shapes_of("none") == ()


def test_of_shapes_of_equal_size_a_budget_keeps_the_deeper():
    """It serves shorter batches of its length too."""
    assert shapes_of("nearest", 5, 1) == (Bucket(8, 1), Bucket(8, 2), Bucket(16, 1), Bucket(8, 4), Bucket(16, 2))


@given(tokens=lengths, kept=st.sets(st.sampled_from(GRID)))
def test_nearest_is_the_smallest_shape_that_covers(tokens, kept):
    chunks = chunks_of(tokens)
    found = Nearest(kept).choose(chunks)
    covering = [shape for shape in kept if holds(shape, chunks)]
    if not covering:
        assert found == FALLBACK
    else:
        assert isinstance(found, Bucket)
        assert found in covering
        assert found.tokens == min(shape.tokens for shape in covering)


@given(tokens=lengths)
def test_by_cost_a_graph_is_replayed_only_where_it_is_predicted_faster(tokens):
    chunks = chunks_of(tokens)
    eager_s = MODEL.step_s(chunks, 0, 0, FALLBACK)
    for choice in (Nearest(GRID, MODEL), Ladder(LADDER, MODEL)):
        mode = choice.choose(chunks)
        assert MODEL.step_s(chunks, 0, 0, mode) <= eager_s
        if mode != FALLBACK:
            assert holds(mode, chunks)


def test_graphs_pay_for_small_steps_and_not_for_large_ones():
    choice = Nearest(GRID, MODEL)
    assert choice.choose(chunks_of([60])) == Bucket(64, 1)
    assert choice.choose(chunks_of([33] * 33)) == FALLBACK  # 64 x 64 would compute four times the tokens
    assert Nearest(GRID).choose(chunks_of([33] * 33)) == Bucket(64, 64)
    assert Ladder(LADDER, MODEL).choose(chunks_of([33] * 10)) == Rung(384)
    assert Ladder(LADDER, MODEL).choose(chunks_of([3000])) == FALLBACK


def test_padding_is_counted():
    assert [padded_tokens(12, mode) for mode in (None, FALLBACK, Bucket(8, 2), Rung(16))] == [12, 12, 16, 16]


def test_graphs_change_the_mode_of_a_plan_and_nothing_else():
    plans = []
    for batching in (Chunked(), WithGraphs(Chunked(), Nearest(GRID))):
        queue = PrefillQueue()
        for index in range(3):
            queue.push(task(index, 20 + index))
        plans.append(ask(batching, queue, 0.0))
        assert not ask(batching, queue, 0.0).shares
    plain, graphed = plans
    assert [(each.task.task_id, each.tokens) for each in plain.shares] == [
        (each.task.task_id, each.tokens) for each in graphed.shares
    ]
    assert (plain.mode, graphed.mode) == (None, Bucket(32, 4))


def test_a_graph_is_chosen_by_what_a_step_reads_and_computes():
    """What of a prompt an earlier step computed is read as its history is."""

    class Asked:
        def choose(self, chunks: Sequence[Chunk]) -> StepMode:
            asked.append(list(chunks))
            return FALLBACK

    asked: list[list[Chunk]] = []
    begun = task(0, 100, history=1000)
    begun.computed = 40
    queue = PrefillQueue()
    queue.push(task(1, 7, history=500))
    plan = ask(WithGraphs(Chunked(), Asked()), queue, 0.0, [begun])
    assert (asked, plan.mode) == ([[Chunk(1040, 60), Chunk(500, 7)]], FALLBACK)


def test_no_graphs_are_no_choice():
    assert graph_choice("none", MODEL, ()) is None
