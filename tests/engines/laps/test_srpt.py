"""Shortest remaining prefill first: against an independent simulation, and against every other order."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prefill import LINEAR_MODEL, TokenCost, turns

from engines.laps.cluster import PrefillCluster
from engines.laps.ours import StepSize
from engines.laps.system import srpt

TOKEN = StepSize(min_step_s=1e-3, max_step_s=1e-3)
"""Steps of one token of a millisecond: preemption at any time."""


def finished(entries: list[tuple[float, int]], size: StepSize = TOKEN) -> list[float]:
    system = srpt(LINEAR_MODEL, size, graphs="none")
    cluster = PrefillCluster(system=system, cost=TokenCost(), slo_s=None)
    return cluster.simulate(turns(*entries)).requests["finished_s"]


def by_hand(entries: list[tuple[int, int]]) -> list[float]:
    """Millisecond by millisecond the one with the least left, the first of equals."""
    left: list[tuple[int, int]] = []
    done = [0.0] * len(entries)
    coming, now = sorted(range(len(entries)), key=lambda index: entries[index][0]), 0
    while coming or left:
        while coming and entries[coming[0]][0] <= now:
            index = coming.pop(0)
            heapq.heappush(left, (entries[index][1], index))
        now += 1
        if left:
            tokens, index = heapq.heappop(left)
            if tokens == 1:
                done[index] = now / 1e3
            else:
                heapq.heappush(left, (tokens - 1, index))
    return done


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 25)), min_size=1, max_size=9, unique_by=lambda each: each[0])
)
def test_it_is_srpt(entries):
    entries.sort()
    ours = finished([(arrival / 1e3, tokens) for arrival, tokens in entries])
    # Equals may finish in another order: together they take as long.
    assert sorted(ours) == pytest.approx(sorted(by_hand(entries)))


def test_a_long_prompt_waits_as_long_as_shorter_ones_come():
    """What a share for late turns is for: nothing bounds its wait."""
    shorts = [(0.01 * index, 10) for index in range(1, 200)]
    done = finished([(0.0, 500), *shorts])
    assert done[0] == pytest.approx(max(done))
    assert all(end - arrival <= 0.021 for end, (arrival, _) in zip(done[1:], shorts, strict=True))
