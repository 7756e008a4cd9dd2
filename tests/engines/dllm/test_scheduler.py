"""Packing, admission and fairness of the schedulers, driven without a model.

A refresh rule reuses what it has built, and builds where it says that it caches.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_runs import free_runs, rows_of
from support.refusals import refuses
from support.schedules import Arrivals, Step, drive, in_order

from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.config import (
    DecodeConfig,
    DelayedCache,
    EngineConfig,
    GenerationConfig,
    NoCache,
    Phase,
    SparsityConfig,
    check_rule,
)
from engines.dllm.plan import PlanItem, Request
from engines.dllm.scheduling import SCHEDULERS, KvPool, PhaseScheduler, Scheduler
from engines.errors import RunError, UserError

MAX_TOTAL = 60


@dataclass(frozen=True, kw_only=True)
class Case:
    config: EngineConfig
    kv_rows: int
    arrivals: Arrivals
    salt: int

    def scheduler(self) -> Scheduler:
        config = self.config
        return SCHEDULERS[config.scheduler](
            config, KvPool(self.kv_rows), DelayedCache(delay=config.sparsity.refresh_delay)
        )

    def drive(self, arrivals: Arrivals, scheduler: Scheduler | None = None, **how: Any) -> list[Step]:
        """How many tokens pass a threshold is made up, but the same whatever else runs."""
        is_open = {request.request_id: request.generation.threshold is not None for _, request in arrivals}
        num_steps = Counter[int]()

        def committed(item: PlanItem) -> int:
            num_steps[item.request_id] += 1
            passed = 1 + hash((self.salt, item.request_id, num_steps[item.request_id])) % 4
            return max(item.commit, min(item.masks_left, passed)) if is_open[item.request_id] else item.commit

        return drive(scheduler or self.scheduler(), arrivals, committed=committed, **how)


@st.composite
def requests(draw: st.DrawFn, request_id: int, *, is_crowded: bool) -> Request:
    gen = draw(st.integers(12, 24) if is_crowded else st.integers(1, 24))
    block = draw(st.integers(2, 5) if is_crowded else st.integers(1, 10))
    generation = GenerationConfig(
        gen_length=gen,
        block_length=block,
        steps=draw(st.integers(-(-gen // block), gen + 4)),
        threshold=draw(st.sampled_from((None, None, 0.5))),
    )
    return Request(request_id=request_id, prompt_len=draw(st.integers(1, MAX_TOTAL - gen)), generation=generation)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Half of them crowded: rows and slots for all and many small blocks, so that Refreshes meet and some are held."""
    is_crowded = draw(st.booleans())
    sparsity = SparsityConfig(
        selection=draw(st.sampled_from(("head", "dense"))),
        retention_ratio=draw(st.sampled_from((0.1, 0.5, 1.0))),
        refresh_delay=draw(st.sampled_from((0, 1))),
    )
    num_requests = draw(st.integers(4, 8) if is_crowded else st.integers(1, 9))
    arrivals = [(draw(st.integers(0, 25)), draw(requests(i, is_crowded=is_crowded))) for i in range(num_requests)]
    longest = max(request.total_len for _, request in arrivals)
    config = EngineConfig(
        max_num_batched_tokens=longest + draw(st.integers(0, MAX_TOTAL if is_crowded else 3 * MAX_TOTAL)),
        max_num_seqs=9 if is_crowded else draw(st.integers(1, 3)),
        max_model_len=MAX_TOTAL,
        scheduler=draw(st.sampled_from(("phase", "request"))),
        sparsity=sparsity,
    )
    kv_rows = max(rows_of(request, sparsity) for _, request in arrivals)
    kv_rows += 9 * MAX_TOTAL if is_crowded else draw(st.integers(0, 4 * MAX_TOTAL))
    return Case(config=config, kv_rows=kv_rows, arrivals=arrivals, salt=draw(st.integers(0, 99)))


@settings(max_examples=120)
@given(cases())
def test_what_is_promised_of_every_step_and_request(case):
    scheduler = case.scheduler()

    def rows_are_disjoint_and_inside_the_pool() -> None:
        runs = sorted((s.kv_start, s.kv_start + s.kv_rows) for s in scheduler.running)
        assert all(before[1] <= after[0] for before, after in pairwise(runs))
        assert not runs or (runs[0][0] >= 0 and runs[-1][1] <= case.kv_rows)
        assert scheduler.pool.used_rows == sum(end - start for start, end in runs)

    steps = case.drive(case.arrivals, scheduler, watch=rows_are_disjoint_and_inside_the_pool)
    assert free_runs(scheduler.pool) == ((0, case.kv_rows),)
    admitted = [request.request_id for step in steps for request in step.plan.admitted]
    assert admitted == [request.request_id for _, request in in_order(case.arrivals)]
    age = {request_id: i for i, request_id in enumerate(admitted)}
    for step in steps:
        budget_and_slots_hold(step, case.config)
        (phase_policy if case.config.scheduler == "phase" else request_policy)(step)
        only_older_ones_hold(step, age, case.config)
    reserved_rows_are_used(steps, case)
    everyone_finishes_within_its_bound(steps, case)


def budget_and_slots_hold(step: Step, config: EngineConfig) -> None:
    items = step.plan.items
    assert step.plan.scheduled_tokens <= config.max_num_batched_tokens
    assert 0 < len(items) <= config.max_num_seqs
    assert step.num_running_before + len(step.plan.admitted) <= config.max_num_seqs
    assert len({item.request_id for item in items}) == len(items)


def phase_policy(step: Step) -> None:
    """It charges the rows of the phase."""
    assert step.plan.scheduled_tokens == sum(item.query_tokens for item in step.plan.items)
    for item in step.plan.items:
        expected = item.block_end - item.block_start if item.phase is Phase.REUSE else item.total_len
        assert item.query_tokens == expected


def request_policy(step: Step) -> None:
    """It charges the whole length for life, so what was admitted is never held."""
    assert step.plan.scheduled_tokens == sum(item.total_len for item in step.plan.items)
    assert sum(item.query_tokens for item in step.plan.items) <= step.plan.scheduled_tokens
    assert len(step.plan.items) == step.num_running_before + len(step.plan.admitted)


def only_older_ones_hold(step: Step, age: dict[int, int], config: EngineConfig) -> None:
    """Who is held did not fit behind the older requests that run; a younger one that runs may use the room it could not, but
    nobody enters."""
    chosen = {item.request_id for item in step.plan.items}
    assert len(chosen) - len(step.plan.admitted) == step.num_running_before or not step.plan.admitted
    for held in step.charges.keys() - chosen:
        older = sum(step.charges[other] for other in chosen if age[other] < age[held])
        assert older + step.charges[held] > config.max_num_batched_tokens


def reserved_rows_are_used(steps: Sequence[Step], case: Case) -> None:
    most: dict[int, int] = {}
    for item in (item for step in steps for item in step.plan.items):
        needed = item.kept_rows + item.block_len
        assert item.kv_start + needed <= case.kv_rows
        most[item.request_id] = max(most.get(item.request_id, 0), needed)
    assert most == {r.request_id: rows_of(r, case.config.sparsity) for _, r in case.arrivals}


def everyone_finishes_within_its_bound(steps: Sequence[Step], case: Case) -> None:
    """At every step the oldest open request runs, so request i ends within its arrival plus the steps of all up to i."""
    end = {request_id: step.index for step in steps for request_id in step.finished}
    num_steps = Counter(item.request_id for step in steps for item in step.plan.items)
    before = 0
    assert len(end) == len(case.arrivals)
    for arrival, request in in_order(case.arrivals):
        before += num_steps[request.request_id]
        assert end[request.request_id] < arrival + before
        if request.generation.threshold is None:
            assert num_steps[request.request_id] <= request.generation.steps


@given(cases(), st.data())
def test_later_requests_never_change_an_earlier_ones_schedule(case, data):
    ordered = in_order(case.arrivals)
    first = ordered[: data.draw(st.integers(1, len(ordered)))]

    def schedule_of(arrivals: Arrivals) -> dict[int, list[tuple[int, object]]]:
        found: dict[int, list[tuple[int, object]]] = {}
        for step in case.drive(arrivals):
            for item in step.plan.items:
                found.setdefault(item.request_id, []).append((step.index, item))
        return found

    alone, together = schedule_of(first), schedule_of(ordered)
    assert {request_id: together[request_id] for request_id in alone} == alone


# ---- refusals -----------------------------------------------------------------------------------

SMALL = GenerationConfig(gen_length=8, block_length=4, steps=8)


def request_of(prompt_len: int, request_id: int = 7, **generation: int) -> Request:
    return Request(request_id=request_id, prompt_len=prompt_len, generation=replace(SMALL, **generation))


def scheduler_of(kind: type[Scheduler], **config: int) -> Scheduler:
    limits = {"max_num_batched_tokens": 100, "max_model_len": 80, **config}
    return kind(EngineConfig(**limits), KvPool(40), DelayedCache())


@pytest.mark.parametrize("kind", list(SCHEDULERS.values()))
@pytest.mark.parametrize(
    ("limits", "request_", "says"),
    [
        ({}, request_of(73), "prompt_len=73"),
        ({"max_num_batched_tokens": 60}, request_of(53), r"61 tokens exceeds max_num_batched_tokens=60: raise"),
        ({}, request_of(72), r"needs 42 KV rows and the pool has 40: raise .* or lower retention_ratio"),
        ({}, request_of(0), r"prompt of request 7 is empty: give at least one token"),
        ({}, request_of(3, request_id=1), "request_id=1"),
        ({}, request_of(3, request_id=2), "request_id=2"),
    ],
)
def test_what_could_never_run_is_refused_at_once(kind, limits, request_, says):
    scheduler = scheduler_of(kind, max_num_seqs=1, **limits)
    running, waiting = request_of(10, request_id=1), request_of(10, request_id=2)
    scheduler.submit(running)
    scheduler.schedule()
    scheduler.submit(waiting)
    with pytest.raises(UserError, match=says) as refused:
        scheduler.submit(request_)
    assert "\n" not in str(refused.value)
    assert [s.request for s in scheduler.running] == [running]
    assert [s.request for s in scheduler.waiting] == [waiting]
    assert scheduler.pool.used_rows == rows_of(running, SparsityConfig())


def test_the_largest_request_that_fits_is_taken():
    scheduler = scheduler_of(PhaseScheduler, max_num_batched_tokens=76)
    largest = request_of(68)
    assert rows_of(largest, SparsityConfig()) == 40
    assert len(drive(scheduler, [(0, largest)])) == 8


# ---- static batches -----------------------------------------------------------------------------


def static(batch_size: int, kv_rows: int = 1000, **config: int) -> StaticBatchScheduler:
    limits = {"max_num_batched_tokens": 10_000, "max_model_len": 100, **config}
    return StaticBatchScheduler(EngineConfig(**limits), KvPool(kv_rows), DelayedCache(), batch_size=batch_size)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 200))
def test_a_static_batch_starts_and_ends_together(prompts, batch_size, spare):
    arrivals = [(i, request_of(n, request_id=i)) for i, n in enumerate(prompts)]
    largest = max(rows_of(request, SparsityConfig()) for _, request in arrivals)
    scheduler = static(batch_size, kv_rows=largest + spare)
    started = []
    for step in drive(scheduler, arrivals):
        items = step.plan.items
        assert len(items) <= batch_size
        assert step.plan.pad_to == max(item.total_len for item in items)
        assert len({item.phase for item in items}) == 1
        rows = step.plan.pad_to if items[0].phase.is_refresh else 4
        assert step.plan.scheduled_tokens == rows * len(items)
        if step.plan.admitted:
            assert step.num_running_before == 0
            assert len(step.plan.admitted) == len(items)
        assert step.finished in ((), tuple(item.request_id for item in items))
        started += [request.request_id for request in step.plan.admitted]
    assert started == list(range(len(prompts)))
    assert scheduler.pool.used_rows == 0


def test_a_static_batch_refuses_thresholds():
    scheduler = static(2)
    request = replace(request_of(9), generation=replace(SMALL, threshold=0.9))
    for parallel in (request, replace(request_of(9), generation=replace(SMALL, factor=1.0))):
        # Of one request there is nothing to stay in step with.
        says = "its members must stay in step: add --batch-size 1"
        with pytest.raises(UserError, match=says):
            scheduler.submit(parallel)
        assert not scheduler.has_work
        static(1).submit(parallel)
    by_chance = EngineConfig(max_num_batched_tokens=100, max_model_len=80, decode=DecodeConfig(quota="origin"))
    with pytest.raises(UserError, match="add --batch-size 1"):
        StaticBatchScheduler(by_chance, KvPool(100), NoCache(), batch_size=2).submit(request_of(9))
    with refuses("batch_size=0"):
        static(0)


@dataclass(frozen=True)
class Rule:
    phases: Callable[[int], Any]
    caches: Any = True
    window: Any = "block"

    def phase(self, step_in_block: int) -> Any:
        return self.phases(step_in_block)


def built(step: int) -> Phase:
    return Phase.REUSE if step else Phase.BUILD


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Rule(lambda step: Phase.REUSE), "Rule reuses a cache in step 0 of a block, before one was built"),
        (Rule(lambda step: Phase.REUSE if step else Phase.FULL), "reuses a cache in step 1 of a block, before"),
        (Rule(built, caches=False), "builds a cache in step 0 of a block, and says that it has none"),
        (Rule(built, caches=None), "caches=None"),
        (Rule(built, window="nothing"), "window='nothing'"),
        (Rule(lambda step: "build"), "answers 'build' in step 0 of a block, which is no Phase"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(rule, said):
    with pytest.raises(UserError, match=said):
        check_rule(rule, 8)


def test_what_it_raises_is_said_of_it():
    with pytest.raises(RunError, match=r"policy Rule\.phase fails \(KeyError: 1\): correct it"):
        check_rule(Rule({0: Phase.BUILD}.__getitem__), 8)


class Counts:
    caches, window, num = True, "block", 0

    def phase(self, step_in_block: int) -> Phase:
        self.num += 1
        return built(step_in_block)


class Doubts(Counts):
    needs = frozenset({"confidences"})

    def phase(self, step_in_block: int) -> Phase:
        raise LookupError("there are none yet")


def test_one_that_keeps_state_is_left_as_it_is():
    rule = Counts()
    check_rule(rule, 8)
    assert rule.num == 0
    check_rule(Doubts(), 8)


@pytest.mark.parametrize("rule", [DelayedCache(), DelayedCache(delay=0, window="suffix"), NoCache(), Rule(built)])
def test_a_rule_that_builds_first_is_taken(rule):
    check_rule(rule, 8)
