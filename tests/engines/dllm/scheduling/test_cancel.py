"""Requests that are cancelled at any moment hold nothing afterwards, and change nothing for those before them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_runs import free_runs

from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.config import DelayedCache, EngineConfig, GenerationConfig
from engines.dllm.plan import Request
from engines.dllm.scheduling import SCHEDULERS, KvPool, LookaheadScheduler, Scheduler
from engines.errors import UserError

GENERATION = GenerationConfig(gen_length=12, block_length=4, steps=12)


def scheduler_of(name: str, budget: int = 60, rows: int = 60) -> Scheduler:
    config = EngineConfig(max_num_batched_tokens=budget, max_num_seqs=4, max_model_len=60, scheduler=name)
    return SCHEDULERS[name](config, KvPool(rows), DelayedCache(delay=1))


def request(request_id: int, prompt_len: int = 8) -> Request:
    return Request(request_id=request_id, prompt_len=prompt_len, generation=GENERATION)


class Driven:
    """A scheduler without an executor: every step commits what its plan says."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.plans: list[tuple[tuple[int, int], ...]] = []

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is None:
            self.plans.append(())
            return
        assert plan.scheduled_tokens <= self.scheduler.config.max_num_batched_tokens
        assert sum(item.query_tokens for item in plan.items) <= self.scheduler.config.max_num_batched_tokens
        self.plans.append(tuple((item.request_id, item.query_tokens) for item in plan.items))
        self.scheduler.complete(plan, [item.commit for item in plan.items])


Moves = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("step"), st.just(0)),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", SCHEDULERS)
@settings(max_examples=25)
@given(moves=Moves)
def test_no_row_and_no_demand_is_left(name, moves):
    made = scheduler_of(name)
    driven, submitted, live = Driven(made), 0, set[int]()
    for what, value in moves:
        if what == "submit":
            made.submit(request(submitted, value))
            live.add(submitted)
            submitted += 1
        elif what == "cancel":
            made.cancel(value)
            live.discard(value)
            assert made.find(value) is None
        else:
            driven.step()
        held = sum(sequence.kv_rows for sequence in made.running)
        assert made.pool.used_rows == held
    while made.has_work:
        driven.step()
    assert free_runs(made.pool) == ((0, 60),)
    if isinstance(made, LookaheadScheduler):
        assert not made._demand.any()
        assert (made._trajectories, made._entered_at) == ({}, {})


@pytest.mark.parametrize("name", SCHEDULERS)
@settings(max_examples=15)
@given(cancelled_at=st.integers(0, 12), order=st.permutations(range(5)))
def test_requests_before_it_run_as_if_it_had_never_been(name, cancelled_at, order):
    """First come, first served: who came before never depends on who came after."""
    victim = order[0]
    both = []
    for is_cancelled in (False, True):
        made = scheduler_of(name)
        driven = Driven(made)
        for request_id in range(5):
            made.submit(request(request_id, 5 + 3 * request_id))
        for _ in range(cancelled_at):
            driven.step()
        if is_cancelled:
            made.cancel(victim)
        while made.has_work:
            driven.step()
        both.append([[part for part in plan if part[0] < victim] for plan in driven.plans])
    length = max(i for i, plan in enumerate(both[0]) if plan) + 1 if any(both[0]) else 0
    assert both[0][:length] == both[1][:length]


def test_cancelling_twice_or_nobody_does_nothing():
    made = scheduler_of("phase")
    assert not made.cancel(3)
    made.submit(request(3))
    assert not made.cancel(3)
    assert not made.cancel(3)
    assert not made.has_work


def test_members_of_a_running_static_batch_end_together():
    config = EngineConfig(max_num_batched_tokens=60, max_num_seqs=4, max_model_len=60)
    made = StaticBatchScheduler(config, KvPool(60), DelayedCache(delay=1), batch_size=2)
    driven = Driven(made)
    for request_id in range(4):
        made.submit(request(request_id))
    driven.step()
    with pytest.raises(UserError, match="request 1 runs in a static batch"):
        made.cancel(1)
    assert not made.cancel(2)
    while made.has_work:
        driven.step()
    assert {part[0] for plan in driven.plans for part in plan} == {0, 1, 3}
    assert free_runs(made.pool) == ((0, 60),)
