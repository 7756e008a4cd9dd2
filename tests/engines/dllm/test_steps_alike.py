"""Steps that a simulation runs without a whole plan of their own are those that it runs plan by plan."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.dllm.dllm_cache.method import FeatureCacheRooflineExecutor
from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.cost.kernels import price_on
from engines.cost.roofline import RTX4090, Calibration, CardCalibration
from engines.dllm.config import (
    DecodeConfig,
    DelayedCache,
    EngineConfig,
    GenerationConfig,
    NoCache,
    Settling,
    SparsityConfig,
)
from engines.dllm.engine import Engine
from engines.dllm.plan import Request
from engines.dllm.scheduling import KvPool, PhaseScheduler, RequestScheduler
from engines.dllm.simulated import RooflineExecutor
from engines.models.shape import LLADA_8B
from repro.families.dllm.record import drive_engine
from repro.runs.step_driver import VirtualClock

PLAIN = Calibration.datasheet(RTX4090)
NOTING = CardCalibration(**{**PLAIN.__dict__, "layout_s": 1.0, "build_s": 2.0})


class Phases(PhaseScheduler):
    """As its parent, but nobody says that it can be followed."""


class Requests(RequestScheduler):
    pass


class Static(StaticBatchScheduler):
    pass


@settings(max_examples=60)
@given(st.data())
def test_records_are_those_of_plans_made_step_by_step(data):
    ask = data.draw
    lengths, block = ask(st.lists(st.integers(1, 40), min_size=1, max_size=9)), ask(st.integers(1, 12))
    own, base = ask(st.sampled_from([(Phases, PhaseScheduler), (Requests, RequestScheduler), (Static, None)]))
    num_blocks = ask(st.integers(1, 3))
    generation = GenerationConfig(
        gen_length=block * num_blocks, block_length=block, steps=num_blocks * ask(st.integers(1, block))
    )
    longer = replace(generation, gen_length=2 * generation.gen_length, steps=2 * generation.steps)
    config = EngineConfig(
        max_num_batched_tokens=ask(st.sampled_from([80, 200])),
        max_num_seqs=ask(st.integers(1, 4)),
        max_num_logits=ask(st.sampled_from([1, 2048])),
        max_model_len=80,
        logit_rows=ask(st.sampled_from(["decomposed", "monolithic"])),
        suppress_mask_token=ask(st.booleans()),
        decode=DecodeConfig(quota=ask(st.sampled_from(["even", "timestep"]))),
        sparsity=SparsityConfig(selection="dense"),
    )
    rule = ask(
        st.sampled_from([NoCache(), DelayedCache(delay=0), DelayedCache(delay=1), DelayedCache(window="suffix")])
    )
    if base is not None and rule.caches and rule.window == "block" and config.suppress_mask_token:
        settling = Settling(settle_after=ask(st.sampled_from([None, 1, 2])), full_every=ask(st.integers(1, 3)))
        config = replace(config, settling=settling)
    price = price_on(LLADA_8B, RTX4090, None, ask(st.sampled_from([PLAIN, NOTING])))
    exact, counts = ask(st.booleans()), base is None and ask(st.booleans())
    requests = [
        Request(
            request_id=i,
            prompt_len=n,
            generation=longer if base is not None and n % 3 == 0 and n < 8 else generation,
            arrival_s=ask(st.floats(0, 3)),
        )
        for i, n in enumerate(lengths)
    ]

    def record(kind, **more):
        executor = RooflineExecutor(price, config)
        if counts:
            executor = FeatureCacheRooflineExecutor(price, config, FeatureCacheConfig(gen_interval=3))
        engine = Engine(kind(config, KvPool(400), rule, exact_steps=exact, **more), executor)
        return drive_engine(engine, requests, VirtualClock())

    more = {"batch_size": min(3, config.max_num_seqs)} if base is None else {}
    assert record(base or StaticBatchScheduler, **more).tables == record(own, **more).tables


@pytest.mark.parametrize("after", range(1, 9))
def test_a_cancelled_request_leaves_the_others_as_they_were(after):
    config = EngineConfig(max_num_batched_tokens=100, max_model_len=80)
    generation = GenerationConfig(gen_length=8, block_length=8, steps=8)
    price = price_on(LLADA_8B, RTX4090, None, PLAIN)
    found = []
    for kind in (PhaseScheduler, Phases):
        engine = Engine(kind(config, KvPool(400), NoCache()), RooflineExecutor(price, config))
        for i in range(2):
            engine.submit(Request(request_id=i, prompt_len=9 + i, generation=replace(generation, seed=i)))
        steps = [engine.step() for _ in range(after)]
        engine.cancel(0)
        found.append((steps, engine.run()))
    assert found[0] == found[1]


@pytest.mark.parametrize("full_every", [1, 2])
def test_settled_rows_are_left_out_as_step_by_step(full_every):
    settling = Settling(settle_after=1, full_every=full_every)
    sparsity = SparsityConfig(selection="dense")
    config = EngineConfig(max_num_batched_tokens=60, max_model_len=80, settling=settling, sparsity=sparsity)
    price, found = price_on(LLADA_8B, RTX4090, None, PLAIN), []
    for kind in (PhaseScheduler, Phases):
        engine = Engine(kind(config, KvPool(400), DelayedCache(delay=0)), RooflineExecutor(price, config))
        for i in range(4):
            generation = GenerationConfig(gen_length=24, block_length=8, steps=24)
            engine.submit(Request(request_id=i, prompt_len=9 + i, generation=generation))
        found.append(engine.run())
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", [PhaseScheduler, RequestScheduler, StaticBatchScheduler])
def test_one_whole_plan_serves_all_steps_of_a_request(kind, monkeypatch):
    config, plans = EngineConfig(max_num_batched_tokens=100, max_model_len=80), []
    make_plan = kind.schedule
    monkeypatch.setattr(kind, "schedule", lambda scheduler: plans.append(make_plan(scheduler)) or plans[-1])
    more = {"batch_size": 1} if kind is StaticBatchScheduler else {}
    executor = RooflineExecutor(price_on(LLADA_8B, RTX4090, None, PLAIN), config)
    engine = Engine(kind(config, KvPool(400), NoCache(), **more), executor)
    generation = GenerationConfig(gen_length=24, block_length=8, steps=24)
    engine.submit(Request(request_id=0, prompt_len=9, generation=generation))
    assert len(engine.run()) == 24
    assert plans[1:] == [None]
