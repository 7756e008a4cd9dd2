"""Algorithm 1 against traces by hand: as printed it dies, guarded it collapses, repaired it recovers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prefill import TokenCost, chat, h200_14b, task, turns
from support.prefill_metrics import summarise

from engines.errors import UserError
from engines.laps.batching import AdaptiveWait, ClassQueue, Wait, WaitConfig, WaitRule, window_s
from engines.laps.cluster import PrefillCluster
from engines.laps.system import LapsConfig, laps

DEPTHS = (1, 2, 4)
MS = 1e-3


class Round:
    """An idle instance: requests arrive, and the waiting policy is asked at given times."""

    def __init__(self, variant: WaitRule, **config: float) -> None:
        self.queue = ClassQueue(256)
        self.wait = AdaptiveWait(
            WaitConfig(wait=variant, **{"max_window_s": 10 * MS, **config}), DEPTHS, lambda requests, tokens: 20 * MS
        )
        self.num = 0

    def arrive(self, at_s: float, count: int = 1) -> None:
        for _ in range(count):
            self.queue.push(task(self.num, 50, ready_s=at_s))
            self.num += 1

    def ask(self, now: float) -> Wait:
        made = self.wait.next_batch(self.queue, now)
        for _ in range(made.depth):
            self.queue.take(now)
        return made

    @property
    def state(self) -> tuple[int, float]:
        """D and W."""
        return self.wait.target, self.wait.window_s


def test_windows_by_hand():
    config = WaitConfig(min_window_s=2 * MS, max_window_s=40 * MS, margin_s=10 * MS)
    cases = [
        ((0.030, 8, 3, 100.0), 20 * MS),  # deadlines are tighter: 30 - 10
        ((0.300, 8, 7, 100.0), 10 * MS),  # the batch fills before: 1 / 100
        ((0.300, 8, 3, 10.0), 40 * MS),  # neither: W_max
        ((-0.10, 8, 3, 100.0), 2 * MS),  # late already: W_min
        ((0.300, 8, 9, 100.0), 2 * MS),  # fuller than asked for: W_min
        ((0.300, 8, 3, 0.0), 40 * MS),  # nothing arrives: epsilon, then W_max
    ]
    for (slack, target, depth, rate), expected in cases:
        assert window_s(config, slack_s=slack, target=target, depth=depth, rate=rate) == pytest.approx(expected)


@given(slack=st.floats(-10, 10), target=st.integers(1, 64), depth=st.integers(0, 64), rate=st.floats(0, 1e4))
def test_the_window_stays_within_its_bounds(slack, target, depth, rate):
    config = WaitConfig(min_window_s=1 * MS, max_window_s=5 * MS)
    assert 1 * MS <= window_s(config, slack_s=slack, target=target, depth=depth, rate=rate) <= 5 * MS


def test_a_guarded_round_by_hand():
    trace = Round("guarded")
    assert trace.state == (4, 10 * MS)
    trace.arrive(0.0)
    assert trace.ask(0.0) == Wait(0, 10 * MS)
    trace.arrive(4 * MS)
    assert trace.ask(4 * MS) == Wait(0, 10 * MS)
    trace.arrive(8 * MS, 2)
    assert trace.ask(8 * MS).depth == 4  # D is reached after 8 ms: W <- tau
    assert trace.state == (4, pytest.approx(8 * MS))
    trace.arrive(20 * MS)
    assert trace.ask(20 * MS) == Wait(0, pytest.approx(28 * MS))
    assert trace.ask(28 * MS).depth == 1  # W elapses first: D <- d
    assert trace.state == (1, pytest.approx(8 * MS))
    trace.arrive(40 * MS)
    assert trace.ask(40 * MS).depth == 1  # full at once: W <- W_min, and D never grows again
    assert trace.state == (1, 0.0)
    trace.arrive(50 * MS, 4)
    assert [trace.ask(50 * MS).depth for _ in range(5)] == [1, 1, 1, 1, 0]


def test_a_near_deadline_is_dispatched_at_once():
    trace = Round("guarded", slo_s=0.1, slack_s=50 * MS)
    trace.arrive(0.0)
    # The latest start is at 0.1 - 0.02; sigma before it is 30 ms, so W = 10 ms ends the round first.
    assert trace.ask(0.0).wake_s == pytest.approx(10 * MS)
    late = Round("guarded", slo_s=0.1, slack_s=50 * MS)
    late.arrive(0.0)
    assert late.ask(31 * MS).depth == 1


def test_the_head_of_the_line_waits_t_max_at_most():
    trace = Round("repaired", max_wait_s=3 * MS, max_window_s=100 * MS)
    trace.arrive(0.0)
    assert trace.ask(0.0).wake_s == pytest.approx(3 * MS)
    assert trace.ask(3 * MS).depth == 1


def test_printed_a_round_without_requests_is_the_last():
    trace = Round("printed")
    assert trace.ask(0.0) == Wait(0, 10 * MS)
    assert trace.ask(10 * MS).depth == 0  # d = 0 < D: D <- 0
    trace.arrive(11 * MS, 64)
    assert [trace.ask(now) for now in (11 * MS, 1.0, 100.0)] == [Wait(0)] * 3
    assert trace.wait.target == 0


def test_printed_an_urgent_first_request_is_the_last_round_too():
    """Line 3 breaks before line 5 adds it, so the batch is empty."""
    trace = Round("printed", slo_s=0.05)
    trace.arrive(0.0)
    assert trace.ask(0.0).depth == 0
    assert trace.wait.target == 0
    # With time left, it is collected first and goes when it becomes urgent.
    calm = Round("printed", slo_s=0.075, slack_s=50 * MS)
    calm.arrive(0.0)
    assert calm.ask(0.0) == Wait(0, pytest.approx(5 * MS))
    assert calm.ask(5 * MS).depth == 1


def test_repaired_the_depth_grows_after_two_full_rounds():
    trace = Round("repaired")
    trace.arrive(0.0)
    trace.ask(0.0)
    assert trace.ask(10 * MS).depth == 1  # W elapsed: D <- 1
    targets = []
    for now, count in enumerate((1, 1, 2, 2, 4, 4), start=1):
        trace.arrive(float(now), count)
        assert trace.ask(float(now)).depth == count
        targets.append(trace.wait.target)
    assert targets == [1, 2, 2, 4, 4, 4]


def test_repaired_the_window_follows_the_arrival_rate():
    trace = Round("repaired", max_window_s=1.0)
    for index in range(3):
        trace.arrive(index * 2 * MS)
    # One short of D = 4 at 500 arrivals a second.
    assert trace.ask(4 * MS).wake_s == pytest.approx(4 * MS + 2 * MS)


def test_without_deadlines_the_batch_fills_by_tokens():
    trace = Round("repaired", slo_s=None, token_max=150, max_window_s=5.0, max_wait_s=10.0)
    trace.arrive(0.0, 2)
    assert trace.ask(0.0) == Wait(0, 5.0)
    trace.arrive(1.0)
    assert trace.ask(1.0).depth == 3
    trace.arrive(2.0)
    assert trace.ask(2.0) == Wait(0, 7.0)
    assert trace.ask(7.0).depth == 1


@given(
    gaps=st.lists(st.floats(0, 0.03), min_size=1, max_size=60), variant=st.sampled_from(["guarded", "repaired", "off"])
)
def test_an_idle_instance_lets_no_request_wait_longer_than_w_max(gaps, variant):
    """But for the printed form. It is asked at arrivals, at its wake times, and again after every dispatch."""
    trace = Round(variant)

    def ask_all(now: float) -> float | None:
        oldest = trace.queue.oldest_short()
        assert oldest is None or now - oldest.ready_s <= 10 * MS + 1e-9
        while (made := trace.ask(now)).depth:
            pass
        return made.wake_s

    now, wake = 0.0, None
    for gap in [*gaps, 1.0]:
        while wake is not None and wake <= now + gap:
            wake = ask_all(wake)
        now += gap
        if gap < 1:
            trace.arrive(now)
            wake = ask_all(now)
    assert not trace.queue


@pytest.mark.parametrize(("tokens", "goes"), [(8191, False), (8192, True)])
def test_without_deadlines_a_batch_is_full_with_8192_tokens(tokens, goes):
    wait = AdaptiveWait(WaitConfig(slo_s=None), (64,), lambda requests, tokens: 0.0)
    queue = ClassQueue(10_000)
    queue.push(task(0, tokens))
    assert wait.next_batch(queue, 0.0).depth == goes


def test_a_literal_run_stops_serving_short_requests():
    _, model = h200_14b()
    arrivals = turns((0.0, 50), (0.5, 50), (0.6, 1000), (1.0, 50))
    system = laps(model, LapsConfig(wait=WaitConfig(wait="printed")))
    run = PrefillCluster(system=system, cost=TokenCost()).simulate(arrivals, until_s=30.0)
    finished = run.requests["finished_s"]
    assert finished[0] is not None
    assert finished[1] is None
    assert finished[2] is not None  # long ones go on
    assert run.requests["violated"] == [False, True, True, True]


def test_guarded_waiting_collapses_where_no_waiting_serves_all():
    cost, model = h200_14b()
    arrivals = chat(100.0, 20.0, seed=4, long_share=0.0)
    rates, depths = {}, {}
    for variant in ("off", "guarded", "repaired"):
        system = laps(model, LapsConfig(wait=WaitConfig(wait=variant)))
        run = PrefillCluster(system=system, cost=cost).simulate(arrivals, until_s=20.0)
        rates[variant] = summarise(run, 2.0).violation_rate
        depths[variant] = sum(run.steps["num_short"]) / len(run.steps["num_short"])
    assert depths["guarded"] < 1.1
    assert rates["guarded"] > 0.9
    assert rates["off"] < 0.01
    assert rates["repaired"] < 0.01
    assert depths["repaired"] > 1.3


def test_waiting_needs_depths():
    with pytest.raises(UserError, match="depths"):
        AdaptiveWait(WaitConfig(), [], lambda requests, tokens: 0.0)
