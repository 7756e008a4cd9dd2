"""Algorithm 2 against an independent search over all orderings; eqs. (3) and (4) by hand."""

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st
from support.clusters import task

from engines.ampd.policies import ReorderingQueue, best_ordering
from engines.policies.views import PrefillTask

windows = st.lists(
    st.builds(
        lambda index, enqueued, estimate, postponed: task(
            index, enqueued_s=enqueued, estimate_s=estimate, postponed=postponed
        ),
        st.integers(0, 99),
        st.floats(0, 3),
        st.floats(0.01, 2),
        st.integers(0, 5),
    ),
    max_size=5,
)


def completions(window: list[PrefillTask], ordering: tuple[int, ...]) -> list[float]:
    """C of eq. (3): each the sum of all estimates up to and including its own."""
    return [sum(window[each].estimate_s for each in ordering[: place + 1]) for place in range(len(ordering))]


@given(windows, st.floats(3, 6), st.floats(0.1, 5), st.integers(1, 5))
def test_best_ordering_against_all_orderings(window, now, ttft_s, w):
    def satisfied(ordering: tuple[int, ...]) -> int:
        done = completions(window, ordering)
        return sum(now - window[each].enqueued_s + done[place] <= ttft_s for place, each in enumerate(ordering))

    allowed = [
        ordering
        for ordering in permutations(range(len(window)))
        if not any(window[each].postponed >= w and ordering.index(each) > each for each in ordering)
    ]
    chosen = best_ordering(window, now, ttft_s, w)
    assert chosen in allowed
    most = max(map(satisfied, allowed))
    # Sums in another order may differ in the last bit, and a task may stand on the edge.
    edges = [
        now - window[each].enqueued_s + done
        for ordering in allowed
        for each, done in zip(ordering, completions(window, ordering), strict=True)
    ]
    if all(abs(edge - ttft_s) > 1e-9 for edge in edges):
        assert satisfied(chosen) == most
        assert chosen == next(ordering for ordering in allowed if satisfied(ordering) == most)


def test_equations_3_and_4_by_hand():
    """Waited 1.0, 0.2, 0.1 s; estimates 0.5, 0.3, 0.3 s; limit 1.21 s. The first is late whatever happens.

    In queue order the others end after 0.8 and 1.1 s, 1.0 and 1.2 s of TTFT: two meet it. 20 ms later the third would
    have 1.22 s; only before the first, both meet it.
    """
    window = [
        task(0, enqueued_s=0.0, estimate_s=0.5),
        task(1, enqueued_s=0.8, estimate_s=0.3),
        task(2, enqueued_s=0.9, estimate_s=0.3),
    ]
    assert best_ordering(window, 1.0, 1.21, 3) == (0, 1, 2)
    assert best_ordering(window, 1.02, 1.21, 3) == (1, 2, 0)


@given(
    st.lists(st.tuples(st.floats(0.01, 0.6), st.floats(0, 0.4)), min_size=1, max_size=40),
    st.integers(1, 5),
    st.floats(0.2, 2.0),
)
def test_nothing_is_postponed_more_than_w_times(entries, w, ttft_s):
    """Tasks arrive while others run, each as long as estimated; all leave, each once."""
    queue = ReorderingQueue(ttft_s=ttft_s, w=w)
    arrivals = []
    now = 0.0
    for index, (estimate, gap) in enumerate(entries):
        now += gap
        arrivals.append(task(index, enqueued_s=now, ready_s=now, estimate_s=estimate))
    left, now, served = list(arrivals), 0.0, []
    while left or len(queue):
        while left and left[0].enqueued_s <= now:
            queue.push(left.pop(0))
        if not len(queue):
            now = left[0].enqueued_s
            continue
        peeked = queue.peek(now)
        taken = queue.take(now)
        assert taken is peeked
        assert all(each.postponed <= w for each in arrivals)
        served.append(taken.task_id)
        now += taken.estimate_s
    assert sorted(served) == list(range(len(entries)))
    assert queue.backlog_s == 0.0
