"""What policies that wait, look at classes of prompts or run on a timer need of the core (LAPS is built on it)."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.clusters import FIRST_PREFILL, links, serve, session, simulation

from engines.cluster.simulation import DecodeSimulation
from engines.policies.batching import Chunked
from engines.policies.routing import Local
from engines.policies.views import IDLE, NextStep, Share, Situation


@dataclass(frozen=True)
class Gather:
    """Waits ``window_s`` from the oldest prefill on, or until ``depth`` are there; then runs all at once."""

    window_s: float
    depth: int

    def next_step(self, at: Situation, now: float) -> NextStep:
        if not at.queue:
            return IDLE
        due_s = at.queue.peek(now).enqueued_s + self.window_s
        if len(at.queue) < self.depth and now < due_s:
            return NextStep(wake_s=due_s)
        return NextStep([Share(task, task.tokens) for task in [at.queue.take(now) for _ in range(len(at.queue))]])


@pytest.fixture(params=["prefill worker", "instance"])
def gathering(request: pytest.FixtureRequest) -> Iterator[DecodeSimulation]:
    gather = Gather(window_s=0.05, depth=3)
    if request.param == "instance":
        yield simulation(router=Local(), batching=gather)
    else:
        yield simulation(prefills=1, router=FIRST_PREFILL, prefill_batching=gather, overlaps=False)


def test_window_ends_by_time_or_by_depth(gathering):
    """Two wait 50 ms for a third in vain; the next three do not wait for the window to end."""
    run = serve(
        gathering,
        session(0, 0.0, (10, 1)),
        session(1, 0.02, (10, 1)),
        *(session(2 + index, 1.0 + 0.01 * index, (10, 1)) for index in range(3)),
    )
    assert run.tasks["started_s"] == pytest.approx([0.05, 0.05, 1.02, 1.02, 1.02])
    assert run.tasks["finished_s"] == pytest.approx([0.07, 0.07, 1.05, 1.05, 1.05])


def test_a_step_that_waits_for_its_history_goes_on_with_what_has_begun_alone():
    """From 0.828 s on 36 tokens of session 2 wait with 20 that need a history; session 3 comes meanwhile."""
    chunked = Chunked(max_num_batched_tokens=64, max_num_seqs=8)
    run = serve(
        simulation(prefills=1, prefill_batching=chunked, kv_links=links(1e-2)),
        session(0, 0.0, (50, 1, 0.2), (20, 1)),
        session(1, 0.7, (64, 1)),
        session(2, 0.71, (100, 1)),
        session(3, 1.0, (10, 1)),
    )
    assert run.tasks["started_s"] == pytest.approx([0.0, 0.7, 0.764, 1.274, 1.33])
    assert run.tasks["computed_tokens"] == run.tasks["tokens"] == [50, 64, 100, 20, 10]
