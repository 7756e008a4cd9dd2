"""Requests that are cancelled at any moment hold nothing afterwards, and change nothing for those before them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_runs import engine_for, run_together
from support.tiny_models import GQA, prompt_of

from engines.dllm.cache.kv_pool import KvPool
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.request import Request
from engines.dllm.scheduling.lookahead import LookaheadScheduler
from engines.dllm.scheduling.phase import DelayedCache
from engines.dllm.scheduling.registry import SCHEDULERS
from engines.dllm.scheduling.scheduler import Scheduler
from engines.server.dllm.cancel import cancelling
from engines.server.dllm.engine import ServedDllm
from engines.server.protocol import Admitted, Failed, Finished, Submission, Tokens

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
def test_no_row_and_no_demand_is_left(name: str, moves: list[tuple[str, int]]) -> None:
    made, canceller = cancelling(scheduler_of(name))
    driven, submitted, live = Driven(made), 0, set[int]()
    for what, value in moves:
        if what == "submit":
            made.submit(request(submitted, value))
            live.add(submitted)
            submitted += 1
        elif what == "cancel":
            canceller.cancel(value)
            live.discard(value)
            assert canceller.find(value) is None
        else:
            driven.step()
        held = sum(sequence.kv_rows for sequence in made.running)
        assert made.pool.used_rows == held
    while made.has_work:
        driven.step()
    assert made.pool.free_runs == ((0, 60),)
    if isinstance(made, LookaheadScheduler):
        assert not made._demand.ahead(200).any()
        assert (made._trajectories, made._entered_at) == ({}, {})


@pytest.mark.parametrize("name", SCHEDULERS)
@settings(max_examples=15)
@given(cancelled_at=st.integers(0, 12), order=st.permutations(range(5)))
def test_requests_before_it_run_as_if_it_had_never_been(name: str, cancelled_at: int, order: list[int]) -> None:
    """First come, first served: who came before never depends on who came after."""
    victim = order[0]
    both = []
    for is_cancelled in (False, True):
        made, canceller = cancelling(scheduler_of(name))
        driven = Driven(made)
        for request_id in range(5):
            made.submit(request(request_id, 5 + 3 * request_id))
        for _ in range(cancelled_at):
            driven.step()
        if is_cancelled:
            canceller.cancel(victim)
        while made.has_work:
            driven.step()
        both.append([[part for part in plan if part[0] < victim] for plan in driven.plans])
    length = max(i for i, plan in enumerate(both[0]) if plan) + 1 if any(both[0]) else 0
    assert both[0][:length] == both[1][:length]


def test_cancelling_twice_or_nobody_does_nothing() -> None:
    made, canceller = cancelling(scheduler_of("phase"))
    assert not canceller.cancel(3)
    made.submit(request(3))
    assert not canceller.cancel(3)
    assert not canceller.cancel(3)
    assert not made.has_work


# -- with a model -----------------------------------------------------------------------------------------------


def served(scheduler: str = "phase") -> ServedDllm:
    config = EngineConfig(max_num_batched_tokens=80, max_num_seqs=4, max_model_len=60, scheduler=scheduler)
    return ServedDllm(engine_for(GQA, config, 120))


def submission(request_id: int, *, wants_tokens: bool) -> Submission:
    return Submission(request_id, prompt_of(GQA, request_id, 9 + request_id), GENERATION, wants_tokens)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_blocks_are_told_in_order_and_are_the_whole_answer(scheduler: str) -> None:
    config = EngineConfig(max_num_batched_tokens=80, max_num_seqs=4, max_model_len=60, scheduler=scheduler)
    asked = [submission(i, wants_tokens=i % 2 == 0) for i in range(5)]
    wanted = run_together(
        engine_for(GQA, config, 120),
        [
            (
                0,
                Request(
                    request_id=s.request_id,
                    prompt_len=len(s.prompt_ids),
                    prompt_ids=s.prompt_ids,
                    generation=GENERATION,
                ),
            )
            for s in asked
        ],
    )
    engine = served(scheduler)
    for each in asked:
        engine.submit(each)
    told: dict[int, list[tuple[int, ...]]] = {}
    admitted = []
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Admitted):
                admitted.append(event.request_id)
            elif isinstance(event, Tokens | Finished):
                told.setdefault(event.request_id, []).append(event.token_ids)
    assert admitted == [0, 1, 2, 3, 4]
    for request_id, parts in told.items():
        assert tuple(i for part in parts for i in part) == wanted[request_id]
        assert [len(part) for part in parts] == ([4, 4, 4] if request_id % 2 == 0 else [12])


def test_rows_and_slots_are_free_again_after_a_cancellation() -> None:
    engine = served()
    for round_ in range(3):
        for i in range(6):
            engine.submit(submission(10 * round_ + i, wants_tokens=True))
        for _ in range(2 + round_):
            engine.step()
        assert engine.status().pool_used > 0
        for i in range(6):
            engine.cancel(10 * round_ + i)
        status = engine.status()
        assert (status.waiting, status.running, status.pool_used, status.phases) == (
            0,
            0,
            0,
            {"refresh": 0, "reuse": 0},
        )
    engine.submit(submission(30, wants_tokens=False))
    ends = [
        event for _ in iter(lambda: engine.has_work, False) for event in engine.step() if isinstance(event, Finished)
    ]
    assert [end.request_id for end in ends] == [30]


def test_giving_up_costs_what_runs_and_leaves_what_waits() -> None:
    engine = served()
    for i in range(6):
        engine.submit(submission(i, wants_tokens=False))
    engine.step()
    running = engine.status().running
    assert 0 < running < 6
    lost = engine.give_up("a fault")
    assert lost == [Failed(i, "a fault") for i in range(running)]
    finished = [
        e.request_id for _ in iter(lambda: engine.has_work, False) for e in engine.step() if isinstance(e, Finished)
    ]
    assert finished == list(range(running, 6))
    assert engine.status().pool_used == 0
