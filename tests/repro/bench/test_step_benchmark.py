"""The step benchmark times what the engine runs."""

from dataclasses import replace

import pytest
from support.tiny_models import GQA, network

from engines.cost.roofline import L40S, Roofline, StepWork
from engines.dllm.config import DelayedCache, EngineConfig, Phase
from engines.dllm.executor.compose import packed_executor
from engines.dllm.plan import StepPlan
from engines.dllm.scheduling import KvPool, PhaseScheduler
from engines.dllm.simulated import step_work
from engines.models.shape import ModelShape
from engines.runtime.step_timer import STEP_PARTS
from repro.bench import step
from repro.bench.common import table
from repro.bench.step import KINDS, StepBatch, run_round, time_steps

BATCH = StepBatch(
    size=3, total_len=20, block_length=6, config=EngineConfig(max_num_batched_tokens=60, max_model_len=20)
)
SHAPE = ModelShape.from_config(GQA.config, name=GQA.name, dtype_bytes=4)


def scheduled(batch: StepBatch) -> list[StepPlan]:
    scheduler = PhaseScheduler(batch.config, KvPool(batch.kv_rows), DelayedCache())
    for request in batch.requests(GQA.vocab, GQA.mask_id):
        scheduler.submit(request)
    plans = []
    while (plan := scheduler.schedule()) is not None:
        plans.append(plan)
        scheduler.complete(plan, tuple(item.commit for item in plan.items), {})
    return plans


def test_a_block_is_what_the_scheduler_makes_of_it():
    requests = BATCH.requests(GQA.vocab, GQA.mask_id)
    assert BATCH.prologue(requests) + BATCH.timed_plans("reuse") == scheduled(BATCH)


def test_the_kinds_are_what_they_say():
    batch = replace(BATCH, block_length=12)
    phases = {kind: [tuple(item.phase for item in plan.items) for plan in batch.timed_plans(kind)] for kind in KINDS}
    assert set(phases["reuse"]) == {(Phase.REUSE,) * 3}
    assert len(phases["reuse"]) == 10
    assert all(phase.is_refresh for row in phases["refresh"] for phase in row)
    assert all(len({phase.is_refresh for phase in row}) == 2 for row in phases["mixed"])
    # No two steps in a row compute the same rows but of Reuse: their metadata is made anew, as when serving.
    for kind in ("refresh", "mixed"):
        assert len(phases[kind]) == step.NUM_REFRESH_STEPS
        assert all(one != other for one, other in zip(phases[kind], phases[kind][1:], strict=False))


@pytest.mark.parametrize("kind", KINDS)
def test_every_round_is_the_same_work(kind):
    requests = BATCH.requests(GQA.vocab, GQA.mask_id)
    executor = packed_executor(network(GQA), BATCH.config, BATCH.kv_rows, num_slots=3, profile_every=1)
    rounds = [run_round(executor, BATCH, kind, requests) for _ in range(2)]
    for own in rounds:
        assert [outcome.committed for outcome in own.outcomes] == [(1, 1, 1)] * len(BATCH.timed_plans(kind))
        assert len(own.parts) == len(own.outcomes)
        assert own.seconds >= sum(parts[part] for parts in own.parts for part in STEP_PARTS) > own.forward_s > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_the_table(kind):
    row = time_steps(GQA.name, network(GQA), BATCH, kind, L40S, repeats=2, warmup=0)
    plans = BATCH.timed_plans(kind)
    bounds = [Roofline(SHAPE, L40S).lower_bound_s(step_work(plan, BATCH.config)) for plan in plans]
    assert row["bound_ms"] == pytest.approx(1e3 * sum(bounds) / len(plans))
    assert row["steps"] == 2 * len(plans)
    assert sum(n for n, _ in row["works"]) == len(plans)
    assert {StepWork(**work) for _, work in row["works"]} == {step_work(plan, BATCH.config) for plan in plans}
    assert row["tokens_s"] == pytest.approx(3e3 / row["ms"])
    assert 0 < row["host"] < 1
    assert 0 < row["outside"] < 1
    assert row["graph"] == 0
    assert kind in table([row])


@pytest.mark.gpu
def test_a_device_tells_its_own_share_of_the_host():
    model = network(GQA).to("cuda")
    try:
        row = time_steps(GQA.name, model, BATCH, "reuse", L40S, repeats=2, warmup=1)
        assert 0 < row["host"] < 1
        assert 0 < row["outside"] < 1
    finally:
        model.to("cpu")
