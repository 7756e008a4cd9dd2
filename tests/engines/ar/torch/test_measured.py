"""Measured steps are steps that were run: their number, their sizes, and what they leave behind."""

from itertools import accumulate, count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.causal import executor, small_model
from support.refusals import refuses

from engines.ar.torch.executor import MeasuredSteps, split_context
from engines.policies.views import Bucket, Chunk, Rung


@pytest.fixture(scope="module")
def worker():
    return executor(small_model())


def test_the_shortest_of_the_repeats_counts(worker):
    clock = accumulate(count())
    steps = MeasuredSteps(worker, repeats=3, warmup=2, timer=lambda: next(clock))
    # Readings 0 1 3 6 10 15: the three repeats take 1, 3 and 5.
    assert steps.step_s([Chunk(0, 4)], 0, 0) == 1.0
    assert worker.tables.num_free == worker.tables.num_blocks


def test_what_is_run_is_what_was_asked(worker, monkeypatch):
    seen = []
    run = worker.run

    def spy(work, mode=None):
        ran = run(work, mode)
        seen.append((work.start.tolist(), work.tokens.tolist(), ran.size, ran.num_rows))
        return ran

    monkeypatch.setattr(worker, "run", spy)
    steps = MeasuredSteps(worker)
    steps.step_s([Chunk(40, 7), Chunk(0, 12)], 3, 50, None)
    steps.step_s([Chunk(5, 7), Chunk(0, 12)], 0, 0, Bucket(16, 4))
    steps.step_s([Chunk(0, 12)], 0, 0, Rung(64))
    steps.step_s([Chunk(9, 3)], 0, 0)
    assert seen == [
        ([40, 0, 15, 16, 16], [7, 12, 1, 1, 1], None, 22),
        ([5, 0], [7, 12], Bucket(16, 4), 64),
        ([0], [12], Rung(64), 64),
        ([9], [3], None, 4),
    ]
    assert worker.tables.num_free_slots == worker.tables.num_slots


@given(st.integers(1, 40), st.integers(0, 2000))
def test_contexts_are_dealt_evenly(decoding, extra):
    context = decoding + extra
    histories = split_context(context, decoding)
    assert len(histories) == decoding
    assert sum(histories) == context - decoding
    assert max(histories) - min(histories) <= 1
    assert split_context(0, 0) == []


def test_a_decode_line_has_no_negative_part(worker):
    base, slope, floor = MeasuredSteps(worker).decode_line(2)
    assert base >= 0
    assert slope >= 0
    assert floor == 0


def test_nothing_is_measured_without_a_repeat(worker):
    with refuses("repeats=0"):
        MeasuredSteps(worker, repeats=0)
