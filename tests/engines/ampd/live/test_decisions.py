"""A live queue's choices are those of one object that is told of every push and take, whatever the policy keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.ampd.live.decisions import choose
from engines.ampd.policies import ReorderingQueue
from engines.errors import RunError
from engines.policies.on_time import LateShare, OnTimeQueue
from engines.policies.views import OpenQueue, PrefillQueue, PrefillTask


def task(task_id: int, estimate_s: float = 0.1, ready_s: float = 0.0) -> PrefillTask:
    return PrefillTask(task_id, task_id, task_id, 0, "initial", 0, 8, ready_s, ready_s, estimate_s)


class Turns(PrefillQueue):
    """The newest now and then, by counts of what came and what left."""

    num_taken = num_pushed = 0

    def push(self, task: PrefillTask) -> None:
        self.num_pushed += 1
        super().push(task)

    def take(self, now: float) -> PrefillTask:
        self.num_taken += 1
        if (self.num_taken + self.num_pushed) % 3 == 0:
            self._tasks.rotate(1)
        return super().take(now)


class OpenTurns(OpenQueue):
    """The oldest and the newest in turn."""

    num_taken = 0

    def peek(self, now: float) -> PrefillTask:
        return list(self)[-(self.num_taken % 2)]

    def take(self, now: float) -> PrefillTask:
        found = super().take(now)
        self.num_taken += 1
        return found


QUEUES: dict[str, Callable[[], PrefillQueue]] = {
    "fcfs": PrefillQueue,
    "window": partial(ReorderingQueue, ttft_s=0.3),
    "on-time": partial(OnTimeQueue, ttft_s=0.3, late=LateShare(share=0.4, patience=1.0)),
    "own": Turns,
    "own, open": OpenTurns,
}


@pytest.mark.parametrize("name", QUEUES)
@settings(max_examples=30, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.floats(0.0, 0.3), st.floats(0.01, 0.5)), min_size=1, max_size=25),
    too_late=st.sets(st.integers(0, 24)),
)
def test_choices_are_those_of_one_object(name, jobs, too_late):
    """(gap, work) of each; choices ``too_late`` were made before the last of those that waited came, and are made again."""
    make = QUEUES[name]
    simulated, last, waiting = make(), None, list[PrefillTask]()
    came, now, coming = 0.0, 0.0, list[PrefillTask]()
    for index, (gap_s, work_s) in enumerate(jobs):
        came += gap_s
        coming.append(task(index, work_s, came))
    for number in range(len(jobs)):
        now = max(now, coming[0].ready_s) if not waiting and coming else now
        while coming and coming[0].ready_s <= now:
            simulated.push(replace(coming[0]))
            waiting.append(coming.pop(0))
        if number in too_late and len(waiting) > 1:
            choose(make, last, [replace(each) for each in waiting[:-1]], now)
        choice = choose(make, last, [replace(each) for each in waiting], now)
        taken = simulated.take(now)
        assert choice.taken == taken
        assert choice.rest == list(simulated)
        last, waiting, now = choice.queue, choice.rest, now + taken.estimate_s


def test_what_was_withdrawn_is_gone_and_an_open_queue_keeps_what_it_kept():
    tasks = [task(index) for index in range(5)]
    first = choose(OpenTurns, None, tasks, 0.0)
    assert (first.taken, first.rest) == (tasks[0], tasks[1:])
    again = replace(tasks[2], enqueued_s=1.0)
    second = choose(OpenTurns, first.queue, [tasks[1], tasks[4], again], 1.0)
    assert (second.taken, second.rest) == (again, [tasks[1], tasks[4]]), "the newest's turn"
    assert second.queue.backlog_s == pytest.approx(0.2)
    assert list(first.queue) == tasks[1:], "another choice may be made of it"


def test_where_a_task_was_withdrawn_any_other_queue_begins_anew():
    tasks = [task(index) for index in range(5)]
    first = choose(Turns, None, tasks[:4], 0.0)
    assert (first.taken, first.rest) == (tasks[0], tasks[1:4])
    left = [tasks[1], tasks[4]]
    assert choose(Turns, first.queue, left, 0.0)[:2] == (tasks[4], [tasks[1]]), "the first choice of three"


def test_a_queue_that_loses_a_task_is_told_of():
    class Loses(PrefillQueue):
        def take(self, now: float) -> PrefillTask:
            self._tasks.pop()
            return super().take(now)

    with pytest.raises(RunError, match="queue Loses gives back other tasks than it was given: correct it"):
        choose(Loses, None, [task(0), task(1)], 0.0)


def test_a_queue_that_cannot_be_copied_is_told_of():
    class Locked(PrefillQueue):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    first = choose(Locked, None, [task(0), task(1)], 0.0)
    with pytest.raises(RunError, match=r"queue Locked cannot be copied \(TypeError: .*lock.*\): keep plain data"):
        choose(Locked, first.queue, first.rest, 0.0)
