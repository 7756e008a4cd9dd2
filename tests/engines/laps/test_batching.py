"""LAPS's waiting by hand and in closed form, the graph a step replays, and classes that never share a step or starve."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prefill import TokenCost, ask, chat, execute, given_tokens, h200_14b, summarise, task, turns, waiting
from support.tables import data_beside

from engines.errors import UserError
from engines.laps.batching import (
    GRID,
    LADDER,
    AdaptiveWait,
    ClassQueue,
    Ladder,
    Nearest,
    TemporalConfig,
    TemporalDisaggregation,
    Wait,
    WaitConfig,
    WaitRule,
    WithGraphs,
    graph_bytes,
    shapes_of,
    window_s,
)
from engines.laps.cluster import PrefillCluster, PrefillRun
from engines.laps.latency import TwoClasses, waits_s
from engines.laps.system import LapsConfig, PrefillSystem, laps
from engines.policies.batching import ONE_BY_ONE, Chunked
from engines.policies.views import FALLBACK, Bucket, Chunk, NextStep, PrefillQueue, PrefillTask, Rung, StepMode

MS = 1e-3


class Round:
    """An idle instance: requests arrive, and the waiting policy is asked at given times."""

    def __init__(self, variant: WaitRule, **config: float) -> None:
        self.queue = ClassQueue(256)
        self.wait = AdaptiveWait(
            WaitConfig(wait=variant, **{"max_window_s": 10 * MS, **config}), (1, 2, 4), lambda requests, tokens: 20 * MS
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


ROUNDS = data_beside(__file__, "rounds")


@pytest.mark.parametrize("name", ROUNDS)
def test_rounds_by_hand(name):
    trace = Round(ROUNDS[name]["wait"], **ROUNDS[name].get("with", {}))
    for now, arrivals, *expected in ROUNDS[name]["asked"]:
        trace.arrive(now * MS, arrivals)
        made = trace.ask(now * MS)
        wakes = made.wake_s if made.wake_s is None else made.wake_s / MS
        found = [made.depth, wakes, trace.wait.target, trace.wait.window_s / MS]
        assert found[: len(expected)] == pytest.approx(expected), now


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


_, MODEL = h200_14b()
lengths = st.lists(st.integers(1, 300), min_size=1, max_size=70)


def holds(mode: Bucket | Rung, chunks: Sequence[Chunk]) -> bool:
    """Whether the chunks fit the captured shape."""
    if isinstance(mode, Bucket):
        return len(chunks) <= mode.batch and all(chunk.tokens <= mode.length for chunk in chunks)
    return sum(chunk.tokens for chunk in chunks) <= mode.tokens


def chunks_of(tokens: list[int]) -> list[Chunk]:
    return [Chunk(0, each) for each in tokens]


def test_a_graph_takes_what_the_paper_prints_or_is_on_a_line():
    assert 42 * graph_bytes("Qwen2.5-14B", 48) == 10_080_000_000
    assert graph_bytes("another", 48) == 255_280_000
    # A budget keeps shapes of fewest tokens; of equal ones the deeper serves shorter batches of its length too.
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


def test_a_graph_is_chosen_by_what_a_step_reads_and_computes():
    """What of a prompt an earlier step computed is read as its history is."""

    class Asked:
        def choose(self, chunks: Sequence[Chunk]) -> StepMode:
            asked.append(list(chunks))
            return FALLBACK

    asked: list[list[Chunk]] = []
    begun = task(0, 100, history=1000)
    begun.computed = 40
    queue = waiting(PrefillQueue(), task(1, 7, history=500))
    plan = ask(WithGraphs(Chunked(), Asked()), queue, 0.0, [begun])
    assert (asked, plan.mode) == ([[Chunk(1040, 60), Chunk(500, 7)]], FALLBACK)


MIXED = TwoClasses(rate=8.0, short_share=0.7, short_s=0.02, long_s=0.2)
UNIFORM_WAIT_S = MIXED.rate * MIXED.mean_s**2 / (2 * (1 - MIXED.load))
"""The wait if every request took the mean time: M/D/1 at the same load."""


def priority_waits_s(queue: TwoClasses) -> tuple[float, float]:
    """Mean waits of short and long where short ones go first, without preemption (Cobham)."""
    residual_s = queue.rate * (queue.short_share * queue.short_s**2 + (1 - queue.short_share) * queue.long_s**2) / 2
    short_wait_s = residual_s / (1 - queue.rate * queue.short_share * queue.short_s)
    return short_wait_s, short_wait_s / (1 - queue.load)


def simulate(system: PrefillSystem, gaps: np.ndarray, service: np.ndarray) -> PrefillRun:
    arrivals = np.cumsum(gaps).tolist()
    tokens = np.rint(service * 1e3).astype(int).tolist()
    return PrefillCluster(system=system, cost=TokenCost(), slo_s=None, boundary=100).simulate(
        turns(*zip(arrivals, tokens, strict=True))
    )


def waits_of(run: PrefillRun) -> np.ndarray:
    return np.array(run.requests["started_s"]) - np.array(run.requests["arrival_s"])


def test_the_penalty_is_what_the_spread_of_lengths_adds():
    assert MIXED.wait_s == pytest.approx(UNIFORM_WAIT_S + MIXED.hol_penalty_s)
    second_moment = 0.7 * 0.02**2 + 0.3 * 0.2**2
    assert MIXED.wait_s == pytest.approx(8 * second_moment / (2 * (1 - MIXED.load)))
    assert TwoClasses(rate=8.0, short_share=0.7, short_s=0.1, long_s=0.1).hol_penalty_s == 0


def test_the_simulated_instance_is_the_recursion():
    gaps, service = MIXED.draw(4000, seed=1)
    run = simulate(PrefillSystem(make_batching=lambda: ONE_BY_ONE), gaps, service)
    np.testing.assert_allclose(waits_of(run), waits_s(gaps, service), atol=1e-9)


def test_the_recursion_is_the_formula_within_two_percent():
    """Pollaczek-Khinchine, and the penalty against the same arrivals with the mean service time."""
    gaps, service = MIXED.draw(4_000_000, seed=2)
    wait_s = waits_s(gaps, service).mean()
    uniform_s = waits_s(gaps, np.full_like(service, MIXED.mean_s)).mean()
    assert wait_s == pytest.approx(MIXED.wait_s, rel=0.02)
    assert uniform_s == pytest.approx(UNIFORM_WAIT_S, rel=0.02)
    assert wait_s - uniform_s == pytest.approx(MIXED.hol_penalty_s, rel=0.02)


def test_short_first_waits_as_two_priorities_do():
    """One request a step, no window: Cobham's formula, which the mean over both classes obeys for any order too."""
    gaps, service = MIXED.draw(20_000, seed=3)
    wait = AdaptiveWait(WaitConfig(wait="off", slo_s=None), [1], lambda requests, tokens: 0.0)
    config = TemporalConfig(long_dispatch="single", max_long_wait_s=1e6)
    system = PrefillSystem(
        make_queue=lambda: ClassQueue(100), make_batching=lambda: TemporalDisaggregation(wait, config)
    )
    waits = waits_of(simulate(system, gaps, service))
    is_short = service < 0.1
    # Kleinrock: work is conserved, so the waits weighted by load equal those of first come, first served.
    fcfs = waits_s(gaps, service)
    assert (waits * service).sum() == pytest.approx((fcfs * service).sum(), rel=2e-3)
    short_s, long_s = priority_waits_s(MIXED)
    assert waits[is_short].mean() == pytest.approx(short_s, rel=0.05)
    assert waits[~is_short].mean() == pytest.approx(long_s, rel=0.05)


def test_an_overload_has_no_mean_wait():
    with pytest.raises(UserError, match="lower the rate"):
        TwoClasses(rate=20.0, short_share=0.7, short_s=0.02, long_s=0.2)
    with pytest.raises(UserError, match="short_s="):
        TwoClasses(rate=1.0, short_share=0.7, short_s=0.3, long_s=0.2)


BOUNDARY = 256


def temporal(variant: WaitRule = "off", **config: object) -> TemporalDisaggregation:
    wait = AdaptiveWait(WaitConfig(wait=variant), (1, 2, 4, 8, 16, 32, 64), lambda requests, tokens: 0.02)
    return TemporalDisaggregation(wait, TemporalConfig(**config))


def class_queue(*tokens: int) -> ClassQueue:
    return waiting(ClassQueue(BOUNDARY), *(task(index, each) for index, each in enumerate(tokens)))


def kinds(plan: NextStep) -> set[str]:
    return {"short" if share.task.tokens < BOUNDARY else "long" for share in plan.shares}


@given(
    arrivals=st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 4000)), min_size=1, max_size=50),
    variant=st.sampled_from(["off", "printed", "guarded", "repaired"]),
    long_dispatch=st.sampled_from(["single", "pack"]),
    class_rule=st.sampled_from(["short-first", "urgency"]),
)
def test_a_step_is_of_one_class_within_its_budget(arrivals, variant, long_dispatch, class_rule):
    batching = temporal(variant, long_dispatch=long_dispatch, class_rule=class_rule, chunk_tokens=700, short_tokens=900)
    queue = ClassQueue(BOUNDARY)
    begun = []
    now = 0.0
    served: dict[int, int] = {}
    for index, (gap, tokens) in enumerate(arrivals):
        now += gap
        queue.push(task(index, tokens, ready_s=now))
        plan = ask(batching, queue, now, begun)
        assert len(kinds(plan)) <= 1
        total = sum(share.tokens for share in plan.shares)
        if kinds(plan) == {"long"}:
            assert total <= 700
            assert long_dispatch == "pack" or len(plan.shares) == 1
        elif plan.shares:
            assert total <= 900
            assert all(share.tokens == share.task.tokens for share in plan.shares)
        begun = execute(plan, begun)
        for each, share in plan.shares:
            served[each.task_id] = served.get(each.task_id, 0) + share
    assert all(amount <= arrivals[index][1] for index, amount in served.items())
    waiting = sum(tokens for _, tokens in arrivals) - sum(served.values())
    assert waiting == queue.backlog_tokens + sum(each.left for each in begun)


@given(data=st.data())
def test_an_idle_instance_with_a_long_request_always_works(data):
    batching = temporal(data.draw(st.sampled_from(["off", "guarded", "repaired"])))
    queue = class_queue(*data.draw(st.lists(st.integers(1, 3000), min_size=1, max_size=20)), 256)
    assert ask(batching, queue, data.draw(st.floats(0, 5))).shares


@pytest.mark.parametrize(("config", "tokens", "room", "step"), data_beside(__file__, "class_steps"))
def test_what_a_step_takes_by_hand(config, tokens, room, step):
    plan = ask(temporal(**{"chunk_tokens": 1000, **config}), class_queue(*tokens), 0.0, room=room)
    assert given_tokens(plan) == list(map(tuple, step))


def test_a_long_request_that_is_begun_needs_no_room():
    begun = task(9, 900)
    begun.computed = 500
    assert given_tokens(ask(temporal(), class_queue(400), 0.0, [begun], room=399)) == [(9, 400)]


@pytest.mark.parametrize(("long_s", "short_s", "goes"), [(0.0, 0.01, "long"), (0.01, 0.0, "short")])
def test_the_nearer_deadline_goes_first_by_urgency(long_s, short_s, goes):
    queue = waiting(ClassQueue(BOUNDARY), task(0, 2000, long_s), task(1, 50, short_s))
    assert kinds(ask(temporal(class_rule="urgency"), queue, 0.36)) == {goes}


def test_a_window_is_spent_on_long_chunks_or_idle():
    assert kinds(ask(temporal("guarded"), class_queue(50, 5000), 0.0)) == {"long"}
    assert ask(temporal("guarded", while_waiting="idle"), class_queue(50, 5000), 0.0) == NextStep(wake_s=5 * MS)
    assert kinds(ask(temporal("guarded", while_waiting="idle"), class_queue(5000), 0.0)) == {"long"}


@pytest.mark.parametrize("limit_s", [0.0, 0.25])
def test_a_long_request_gets_every_other_step_once_it_has_waited_its_limit(limit_s):
    batching, begun, found = (
        temporal(chunk_tokens=100, short_tokens=50, max_long_wait_s=limit_s),
        list[PrefillTask](),
        [],
    )
    queue = waiting(ClassQueue(BOUNDARY), task(99, 5000, 2.0), *(task(index, 50, 2.0) for index in range(4)))
    for now in (1.999, 2.0, 2.001, 2.002):
        plan = ask(batching, queue, now + limit_s, begun)
        begun = execute(plan, begun)
        found.append(*kinds(plan))
    assert found == ["short", "long", "short", "long"]


@pytest.mark.parametrize("long_dispatch", ["single", "pack"])
def test_a_flood_of_short_requests_does_not_starve_long_ones(long_dispatch):
    """Three times more short work than the instance can do. A long request starts once it has waited a second, after
    one short batch and one long step for each long step ahead of it, and the step that runs."""
    rng = random.Random(5)
    shorts = [(index / 60, 50) for index in range(1800)]
    longs = [(rng.uniform(0, 25), rng.choice([400, 900, 2500])) for _ in range(8)]
    temporal_config = TemporalConfig(long_dispatch=long_dispatch, chunk_tokens=500, short_tokens=640)
    system = laps(MODEL, LapsConfig(graphs="none", wait=WaitConfig(wait="off"), temporal=temporal_config))
    run = PrefillCluster(system=system, cost=TokenCost()).simulate(turns(*sorted(shorts + longs)), until_s=120.0)
    requests = run.requests
    found = 0
    for index, tokens in enumerate(requests["tokens"]):
        if tokens < BOUNDARY:
            continue
        arrival, started = requests["arrival_s"][index], requests["started_s"][index]
        ahead = [
            other
            for other in range(index)
            if requests["tokens"][other] >= BOUNDARY and requests["finished_s"][other] > arrival
        ]
        steps = sum(-(-requests["tokens"][other] // 500) for other in ahead) + 1
        assert started - arrival <= 1.0 + 0.64 + steps * (0.64 + 0.5) + 1e-9
        found += 1
    assert found == 8
    # It binds: short requests alone would have kept the instance busy all the time.
    unbounded = laps(
        MODEL, LapsConfig(graphs="none", wait=WaitConfig(wait="off"), temporal=TemporalConfig(max_long_wait_s=1e6))
    )
    run = PrefillCluster(system=unbounded, cost=TokenCost()).simulate(turns(*sorted(shorts + longs)), until_s=30.0)
    done = zip(run.requests["tokens"], run.requests["finished_s"], strict=True)
    assert not [tokens for tokens, end in done if end and tokens >= BOUNDARY]


def test_a_queue_of_one_kind_is_refused():
    system = PrefillSystem(make_queue=PrefillQueue, make_batching=temporal)
    with pytest.raises(UserError, match="give a ClassQueue"):
        PrefillCluster(system=system, cost=TokenCost()).simulate(turns((0.0, 10)))
