"""What policies that wait, look at classes of prompts or run on a timer need of the core (LAPS is built on it)."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.clusters import FIRST_PREFILL, LinearCost, serve, session, simulation

from engines.cluster.sessions import ClosedLoop
from engines.cluster.simulation import DecodeSimulation
from engines.policies.routing import Local
from engines.policies.views import IDLE, PrefillQueue, PrefillTask, Share, Situation, StepPlan


@dataclass(frozen=True)
class Gather:
    """Waits ``window_s`` from the oldest prefill on, or until ``depth`` are there; then runs all at once."""

    window_s: float
    depth: int

    def next_step(self, at: Situation, now: float) -> StepPlan:
        if not at.queue:
            return IDLE
        due_s = at.queue.peek(now).enqueued_s + self.window_s
        if len(at.queue) < self.depth and now < due_s:
            return StepPlan(wake_s=due_s)
        return StepPlan([Share(task, task.tokens) for task in [at.queue.take(now) for _ in range(len(at.queue))]])


class ShortFirst(PrefillQueue):
    """Two classes by length, the short one first."""

    def push(self, task: PrefillTask) -> None:
        place = next(
            (index for index, each in enumerate(self._tasks) if each.tokens > 100 >= task.tokens), len(self._tasks)
        )
        self._tasks.insert(place, task)
        self._count(task)


@dataclass(frozen=True)
class OneChunk:
    """The first prompt, at most ``tokens`` of it, with the decodes."""

    tokens: int

    def next_step(self, at: Situation, now: float) -> StepPlan:
        task = at.begun[0] if at.begun else at.queue.take(now)
        return StepPlan([Share(task, min(task.left, self.tokens))], decodes=True, mode="chunk")


class ModedCost(LinearCost):
    """Notes the mode of every step."""

    modes: list[object] = []

    def step_s(self, chunks: object, decoding: int, context: int, mode: object = None) -> float:
        self.modes.append(mode)
        return super().step_s(chunks, decoding, context)


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


def test_window_ends_in_the_middle_of_decoding():
    """One session decodes from 0.06 on; a prefill that waits from 0.081 to 0.131 starts at the next token."""
    run = serve(
        simulation(batching=Gather(window_s=0.05, depth=3)), session(0, 0.0, (10, 40)), session(1, 0.081, (10, 1))
    )
    assert run.tasks["started_s"] == pytest.approx([0.05, 0.14])


def test_queue_may_hold_classes():
    run = serve(
        simulation(make_queue=ShortFirst),
        *(session(index, 0.001 * index, (tokens, 1)) for index, tokens in enumerate((200, 200, 50, 60))),
    )
    assert sorted(range(4), key=lambda index: run.tasks["started_s"][index]) == [0, 2, 3, 1]


def test_step_may_ask_the_cost_model_for_a_mode():
    cost = ModedCost()
    run = serve(simulation(cost=cost, batching=OneChunk(tokens=40)), session(0, 0.0, (100, 3)))
    assert cost.modes == ["chunk"] * 3
    assert run.rounds["first_token_s"] == pytest.approx([0.1])


def test_timer_of_a_controller_runs_beside_the_sessions():
    """A tick a second, which ends with the last session and does not keep the run alive."""
    built = simulation()
    ticks: list[float] = []

    def tick() -> None:
        ticks.append(built.loop.now)
        built.loop.at(built.loop.now + 1.0, tick)

    built.loop.at(1.0, tick)
    run = built.run(ClosedLoop(sessions=[session(index, 0.0, (900, 1)) for index in range(4)], num_clients=1))
    assert ticks == [1.0, 2.0, 3.0]
    assert run.facts["end_s"] == pytest.approx(3.6)
