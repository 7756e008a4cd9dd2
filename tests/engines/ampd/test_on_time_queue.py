"""The on-time queue: its order by hand, and its bound on the longest wait for any arrivals."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.policies.batching import LateShare, OnTimeQueue
from engines.policies.views import PrefillTask

TTFT_S = 1.0


def task(task_id: int, estimate_s: float, ready_s: float = 0.0) -> PrefillTask:
    return PrefillTask(task_id, task_id, task_id, 0, "initial", 0, 10, ready_s, ready_s, estimate_s)


def queue_of(*entries: tuple[float, float], **late: float) -> OnTimeQueue:
    """(estimate_s, ready_s)."""
    queue = OnTimeQueue(ttft_s=TTFT_S, late=LateShare(**late))
    for index, (estimate_s, ready_s) in enumerate(entries):
        queue.push(task(index, estimate_s, ready_s))
    return queue


def order(queue: OnTimeQueue, now: float) -> list[int]:
    """One after the other."""
    taken = []
    while queue:
        first = queue.peek(now)
        assert queue.take(now) is first
        taken.append(first.task_id)
        now += first.estimate_s
    return taken


def test_first_come_first_served_while_all_are_on_time():
    assert order(queue_of((0.5, 0.0), (0.1, 0.0), (0.3, 0.0)), 0.0) == [0, 1, 2]


def test_the_longest_is_given_up_and_runs_last():
    queue = queue_of((0.5, 0.0), (0.2, 0.0), (0.2, 0.0), (0.3, 0.0))
    tasks = list(queue)
    assert order(queue, 0.1) == [1, 2, 3, 0]
    assert [each.postponed for each in tasks] == [3, 0, 0, 0]


def test_those_given_up_are_owed_their_share_of_the_work():
    """Two late ones of 0.3 s, and shorts of 0.1 s: with a share of a half 0.3 s of shorts run between them."""
    late = [(0.3, -10.0), (0.3, -9.0)]
    shorts = [(0.1, 0.0)] * 5
    assert order(queue_of(*late, *shorts, share=0.5), 0.0) == [0, 2, 3, 4, 1, 5, 6]
    assert order(queue_of(*late, *shorts, share=0.0), 0.0) == [2, 3, 4, 5, 6, 0, 1]
    assert order(queue_of(*late, *shorts, share=1.0, patience=0.0), 0.0) == [0, 1, 2, 3, 4, 5, 6]
    # They have not waited long enough.
    assert order(queue_of(*late, *shorts, share=0.5, patience=20.0), 0.0) == [2, 3, 4, 5, 6, 0, 1]


@pytest.mark.parametrize(
    ("estimate_s", "came_s", "first"), [(3.0, -6.0, 0), (3.1, -6.0, 1), (0.4, -2.0, 0), (0.4, -1.9, 1)]
)
def test_patience_is_counted_in_the_work_that_waited_and_at_least_in_objectives(estimate_s, came_s, first):
    assert queue_of((estimate_s, came_s), (0.1, 0.0), share=0.5, patience=2.0).peek(0.0).task_id == first


def test_who_waits_for_one_that_is_more_patient_brings_its_turn():
    """The second found 4 s of work and has waited 6.5; the third found 1.2 s, and has waited 2.4 at -0.6."""
    queue = queue_of((3.0, -8.0), (1.0, -7.0), share=0.5, patience=2.0)
    queue.pull(next(iter(queue)))
    queue.push(task(2, 0.2, -3.0))
    queue.push(task(3, 0.1, -0.7))
    assert queue.peek(-0.7).task_id == 3
    assert queue.peek(-0.5).task_id == 1


def test_what_is_owed_is_no_credit_for_later():
    """Shorts that ran while none was owed do not count."""
    queue = queue_of(*[(0.1, 0.0)] * 5, share=0.5)
    order(queue, 0.0)
    late = [task(10, 0.3, -10.0), task(11, 0.3, -9.0)]
    for each in (*late, *(task(20 + index, 0.1, 0.5) for index in range(3))):
        queue.push(each)
    assert order(queue, 0.5) == [10, 20, 21, 22, 11]


@settings(max_examples=40, deadline=None)
@given(
    gaps=st.lists(st.tuples(st.sampled_from([0.0, 0.01, 0.2, 1.0]), st.floats(0.01, 0.8)), min_size=1, max_size=30),
    siege_s=st.sampled_from([0.1, 0.4]),
    share=st.sampled_from([0.1, 0.3, 0.8]),
    patience=st.sampled_from([0.0, 2.0, 5.0]),
)
def test_nobody_waits_longer_than_the_bound(gaps, siege_s, share, patience):
    """Any backlog, behind it prompts that can be on time and come faster than they are served."""
    queue, came, arrivals = OnTimeQueue(ttft_s=TTFT_S, late=LateShare(share=share, patience=patience)), 0.0, []
    for gap_s, estimate_s in gaps:
        came += gap_s
        arrivals.append(task(len(arrivals), estimate_s, came))
    for index in range(int(20 / siege_s)):
        arrivals.append(task(len(arrivals), siege_s, 0.9 * siege_s * index))
    arrivals.sort(key=lambda each: (each.ready_s, each.task_id))
    ends, ahead, now, coming = {}, {}, 0.0, iter(arrivals)
    due = next(coming, None)
    longest_s = max(each.estimate_s for each in arrivals)
    while due is not None or queue:
        while due is not None and due.ready_s <= now:
            queue.push(due)
            ahead[due.task_id] = queue.backlog_s
            due = next(coming, None)
        if not queue:
            now = due.ready_s
            continue
        taken = queue.take(now)
        now += taken.estimate_s
        ends[taken.task_id] = now
    for each in arrivals:
        from_s = max(TTFT_S, patience * max(TTFT_S, ahead[each.task_id]))
        most_s = from_s + ahead[each.task_id] / share + 3 / share * longest_s
        assert ends[each.task_id] - each.ready_s <= most_s + 1e-9


class Forgetful(OnTimeQueue):
    """Chooses anew whenever it is asked."""

    def peek(self, now: float) -> PrefillTask:
        self._peeked = None
        return super().peek(now)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_what_was_peeked_is_no_choice_of_another_time_or_queue(share):
    """Tasks come, and the last that was taken comes back, between a peek and a take of the same moment."""
    draw, late = random.Random(0), LateShare(share=share, patience=1.0 if share else 2.0)
    for _ in range(200):
        queues = [kind(ttft_s=TTFT_S, late=late) for kind in (OnTimeQueue, Forgetful)]
        now, num, taken = 2.0, 0, list[PrefillTask]()
        for _ in range(40):
            now += draw.choice((0.0, 0.0, 0.3))
            what = draw.choice(("push", "peek", "take", "back"))
            if what in ("peek", "take") and queues[0]:
                found = [getattr(queue, what)(now) for queue in queues]
                assert found[0] is found[1]
                taken = found[:1] if what == "take" else taken
                continue
            num += 1
            coming = taken if what == "back" else [task(num, draw.uniform(0.01, 0.8), now - draw.uniform(0, 3))]
            for each in coming:
                for queue in queues:
                    queue.push(each)
            taken = []
