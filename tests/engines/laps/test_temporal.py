"""Classes never share a step, and long requests do not starve."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prefill import TokenCost, ask, execute, given_tokens, h200_14b, task, turns

from engines.errors import UserError
from engines.laps.batching import AdaptiveWait, ClassQueue, TemporalConfig, TemporalDisaggregation, WaitConfig, WaitRule
from engines.laps.cluster import PrefillCluster
from engines.laps.system import LapsConfig, PrefillSystem, laps
from engines.policies.views import PrefillQueue, StepPlan

BOUNDARY = 256
_, MODEL = h200_14b()


def temporal(variant: WaitRule = "off", **config: object) -> TemporalDisaggregation:
    wait = AdaptiveWait(WaitConfig(wait=variant), (1, 2, 4, 8, 16, 32, 64), lambda requests, tokens: 0.02)
    return TemporalDisaggregation(wait, TemporalConfig(**config))


def kinds(plan: StepPlan) -> set[str]:
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
    queue = ClassQueue(BOUNDARY)
    for index, tokens in enumerate(data.draw(st.lists(st.integers(1, 3000), min_size=1, max_size=20))):
        queue.push(task(index, tokens))
    queue.push(task(99, 256))
    assert ask(batching, queue, data.draw(st.floats(0, 5))).shares


def test_a_long_chunk_runs_while_short_requests_wait_for_company():
    batching, queue = temporal("guarded"), ClassQueue(BOUNDARY)
    queue.push(task(0, 50))
    queue.push(task(1, 5000))
    plan = ask(batching, queue, 0.0)
    assert kinds(plan) == {"long"}
    assert plan.shares[0].tokens == 2048
    assert kinds(ask(batching, queue, 0.09, execute(plan))) == {"short"}


@pytest.mark.parametrize("variant", ["guarded", "repaired"])
def test_an_instance_that_idles_in_the_window_begins_no_long_chunk(variant):
    batching, queue = temporal(variant, while_waiting="idle"), ClassQueue(BOUNDARY)
    queue.push(task(0, 50))
    queue.push(task(1, 5000))
    plan = ask(batching, queue, 0.0)
    assert not plan.shares
    assert plan.wake_s == pytest.approx(0.005)
    assert kinds(ask(batching, queue, 0.005)) == {"short"}
    # No window is open where no short one waits.
    assert kinds(ask(batching, queue, 0.01)) == {"long"}


def test_one_long_request_a_step_as_printed_or_several_packed():
    for long_dispatch, expected in (("single", [(0, 300)]), ("pack", [(0, 300), (1, 400), (2, 300)])):
        queue = ClassQueue(BOUNDARY)
        for index, tokens in enumerate((300, 400, 700)):
            queue.push(task(index, tokens))
        plan = ask(temporal(long_dispatch=long_dispatch, chunk_tokens=1000), queue, 0.0)
        assert [(share.task.task_id, share.tokens) for share in plan.shares] == expected


@pytest.mark.parametrize(
    ("room", "expected"), [(299, []), (300, [(0, 300)]), (699, [(0, 300)]), (700, [(0, 300), (1, 400)])]
)
def test_long_requests_begin_while_their_kv_fits(room, expected):
    queue = ClassQueue(BOUNDARY)
    for index, tokens in enumerate((300, 400, 700)):
        queue.push(task(index, tokens))
    assert given_tokens(ask(temporal(), queue, 0.0, room=room)) == expected
    assert len(queue) == 3 - len(expected)


def test_a_long_request_that_is_begun_needs_no_room():
    queue, begun = ClassQueue(BOUNDARY), task(0, 900)
    begun.computed = 500
    queue.push(task(1, 400))
    assert given_tokens(ask(temporal(), queue, 0.0, [begun], room=399)) == [(0, 400)]
    assert given_tokens(ask(temporal(), queue, 0.0, [begun], room=400)) == [(0, 400), (1, 400)]
    assert not queue


def test_short_requests_are_grouped_by_length():
    """The oldest one's bucket first, then shorter, then longer ones."""
    queue = ClassQueue(BOUNDARY)
    for index, tokens in enumerate((50, 200, 10, 60, 100, 30)):
        queue.push(task(index, tokens))
    assert [each.task_id for each in queue.shorts_by_bucket()] == [0, 3, 5, 2, 4, 1]
    for joins, expected in (("same", [0, 3]), ("shorter", [0, 3, 5, 2]), ("all", [0, 3, 5, 2, 4, 1])):
        queue = ClassQueue(BOUNDARY)
        for index, tokens in enumerate((50, 200, 10, 60, 100, 30)):
            queue.push(task(index, tokens))
        plan = ask(temporal(joins=joins), queue, 0.0)
        assert [share.task.task_id for share in plan.shares] == expected


def test_the_nearer_deadline_goes_first_by_urgency():
    for long_ready, short_ready, now, expected in (
        (0.00, 0.01, 0.36, "long"),
        (0.01, 0.00, 0.36, "short"),
        (0.00, 0.01, 0.10, "long"),  # neither is near: 2000 of 2048 tokens against 50 of 8192
    ):
        queue = ClassQueue(BOUNDARY)
        queue.push(task(0, 2000, ready_s=long_ready))
        queue.push(task(1, 50, ready_s=short_ready))
        assert kinds(ask(temporal(class_rule="urgency"), queue, now)) == {expected}
    queue = ClassQueue(BOUNDARY)
    queue.push(task(0, 300))
    for index in range(1, 30):
        queue.push(task(index, 255))
    assert kinds(ask(temporal(class_rule="urgency", short_tokens=1000), queue, 0.0)) == {"short"}


@pytest.mark.parametrize("limit_s", [0.0, 0.25, 1.0])
def test_a_long_request_gets_every_other_step_once_it_has_waited_its_limit(limit_s):
    """By default a second."""
    given_limit = {} if limit_s == 1.0 else {"max_long_wait_s": limit_s}
    batching, queue = temporal(chunk_tokens=100, **given_limit), ClassQueue(BOUNDARY)
    queue.push(task(99, 5000, ready_s=2.0))
    found = []
    begun: list = []
    for index, now in enumerate((1.999, 2.0, 2.001, 2.002)):
        queue.push(task(index, 50, ready_s=now + limit_s))
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
    assert [
        tokens
        for tokens, end in zip(run.requests["tokens"], run.requests["finished_s"], strict=True)
        if end and tokens > 255
    ] == []


def test_a_queue_of_one_kind_is_refused():
    system = PrefillSystem(name="wrong", make_queue=PrefillQueue, make_batching=temporal)
    with pytest.raises(UserError, match="give a ClassQueue"):
        PrefillCluster(system=system, cost=TokenCost()).simulate(turns((0.0, 10)))
