"""Simulated steps: the schedule of a real device, the work of its rows, a model's experts and a pool that fits a card.

SGLang's schedules: the same answers as mixed steps give, by its number of forwards, prompts and blocks in steps apart.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.block_models import FAMILIES, LLADA2_MINI, MASK, SDAR_8B, block_model
from support.block_runs import alone, engine_for, finished, is_whole, recorder, request, submitted
from support.refusals import refuses

from engines.blockdiffusion.engine import BlockEngine
from engines.blockdiffusion.executor import step_rows
from engines.blockdiffusion.rules import Dynamic, JointThreshold, LowConfidence, Sequential, Static, SubBlocks
from engines.blockdiffusion.scheduler import BlockEngineConfig
from engines.blockdiffusion.sequence import BlockSampling, BlockStepPlan, Denoised, Outcome, SharedTables, Work
from engines.blockdiffusion.simulated import HostCost, PoissonSure, SimulatedExecutor, pool_tokens, step_work
from engines.cluster.hardware import PHYSICAL, WorkerCost
from engines.cost.kernels import FRAMEWORKS, price_on
from engines.cost.roofline import H20, H200, Calibration, Roofline
from engines.models.llada2 import ExpertRouter
from engines.models.shape import LLADA2_FLASH, ModelShape
from engines.models.shape import LLADA2_MINI as MINI
from engines.models.shape import SDAR_8B as SDAR
from repro.checks.blocks import masked_logits, plain_run

B = 8
SIZES = {"num_slots": 5, "max_len": 160, "num_tokens": 30 * B}


def simulated(family, sure, batching="mixed", rows=64, block=B, **host):
    shape = ModelShape.from_block_config(block_model(family).config, name=family)
    tables = SharedTables(
        num_slots=SIZES["num_slots"],
        num_blocks=SIZES["num_tokens"] // B,
        block_size=B,
        max_len=SIZES["max_len"],
        diffusion_block=block,
    )
    shifts = block_model(family).config.shifts_logits
    executor = Planned(Roofline(shape, H200), sure, block=block, shifts=shifts, tables=tables, host=HostCost(**host))
    return BlockEngine(executor, BlockEngineConfig(max_num_batched_tokens=rows, batching=batching))


class Planned(SimulatedExecutor):
    """Remembers its plans."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.plans: list[BlockStepPlan] = []

    def run(self, plan: BlockStepPlan, denoised: Denoised) -> Outcome:
        self.plans.append(plan)
        return super().run(plan, denoised)


def asked(rules):
    return [
        request(i, length, (5, B, 17)[i % 3], rules[i % len(rules)]) for i, length in enumerate((3, B, 20, 41, 17, 33))
    ]


@pytest.mark.parametrize(
    ("family", "batching"),
    [*((family, "mixed") for family in FAMILIES), ("llada2", "first-done"), ("sdar", "synchronous")],
)
def test_a_simulation_runs_the_schedule_of_a_real_device(family, batching):
    """Rules that say how many tokens a step takes need nothing of a model: plans, preemptions and records are the same."""
    requests = asked((Static(steps=3), Sequential(steps=5), Static(steps=8)))
    real = engine_for(family, rows=64, batching=batching, **SIZES)
    virtual = simulated(family, PoissonSure(3.0, 0), batching)
    assert finished(submitted(real, requests)) == finished(submitted(virtual, requests))
    assert [plan for plan, _ in recorder(real).steps] == virtual.executor.plans
    for each in requests:
        mine, theirs = virtual.take(each.request_id), real.take(each.request_id)
        assert (mine.denoised, mine.committed, mine.rows) == (theirs.denoised, theirs.committed, theirs.rows)


@pytest.mark.parametrize("rule", [LowConfidence(threshold=0.4), Dynamic(steps=8, threshold=0.3), LowConfidence()])
def test_as_sure_as_a_model_it_runs_the_model_s_schedule(rule):
    requests = asked((rule,))
    real = engine_for("sdar", rows=64, **SIZES)
    records = finished(submitted(real, requests))
    counts = {
        request_id: [sum(level > rule.threshold for level in levels) for _, levels in trace]
        for request_id, trace in recorder(real).traces.items()
    }
    virtual = simulated("sdar", lambda request_id, draw: counts[request_id][draw])
    assert finished(submitted(virtual, requests)) == records
    assert [plan for plan, _ in recorder(real).steps] == virtual.executor.plans


def test_draws_are_a_request_s_own():
    sure, other = PoissonSure(4.0, 7), PoissonSure(4.0, 7)
    late = [other(1, draw) for draw in range(999, -1, -1)]
    assert [sure(1, draw) for draw in range(1000)] == late[::-1]
    assert [sure(2, draw) for draw in range(1000)] != late[::-1]
    assert np.mean(late) == pytest.approx(4.0, rel=0.05)
    assert min(late) == 1
    assert {PoissonSure(1.0, 0)(0, draw) for draw in range(300)} == {1}


works = st.builds(
    lambda start, blocks, rows, first: Work(0, 0, start * B, blocks * B, rows, first and blocks > 0),
    st.integers(0, 4),
    st.integers(0, 3),
    st.sampled_from([None, (0, B), (4, 8)]),
    st.booleans(),
).filter(lambda work: work.tokens or work.rows)


@given(works=st.lists(works, min_size=1, max_size=5), chunk=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_the_work_is_that_of_the_rows_an_executor_lays_out(works, chunk):
    tables = SharedTables(num_slots=5, num_blocks=100, block_size=B, max_len=160, diffusion_block=B)
    works = [work._replace(request_id=i, slot=tables.open()) for i, work in enumerate(works)]
    for work in works:
        tables.grow(np.array([work.slot]), np.array([work.start + work.tokens + B]))
    denoised = [work for work in works if work.rows]
    wanted = np.zeros((len(denoised), B), dtype=bool)
    for row, work in zip(wanted, denoised, strict=True):
        row[slice(*work.rows)] = True
    rows = step_rows(works, tables, B, least=0)
    found = step_work(BlockStepPlan(tuple(works), (), (), 0), wanted, B, max_num_logits=chunk)
    assert found.query_rows == len(rows.slot)
    assert found.attention_pairs == (rows.q_len * rows.k_len).sum()
    assert found.kv_read_rows == len(rows.keys)
    assert found.logit_rows == wanted.sum() + len(rows.last_final)
    assert (found.logit_chunks - 1) * chunk < max(1, found.logit_rows) <= found.logit_chunks * chunk
    everything = step_work(BlockStepPlan(tuple(works), (), (), 0), wanted, B, head_rows="all")
    assert everything.logit_rows == found.query_rows


def test_the_host_s_time_counts_steps_requests_and_what_stands_before_them():
    plan = BlockStepPlan((Work(0, 0, 500, 0, (0, B), False), Work(1, 1, 1500, B, None, False)), (), (), 0)
    host = HostCost(step_overhead_s=1.0, request_overhead_s=0.25, prefix_overhead_s=0.5)
    assert host.of(plan) == 1 + 2 * 0.25 + 2.0 * 0.5


@pytest.mark.parametrize("rule", [JointThreshold(max_post_steps=3), LowConfidence(), SubBlocks(length=4)])
def test_every_rule_comes_to_an_end(rule):
    engine = simulated("llada2", PoissonSure(2.0, 0))
    finished(submitted(engine, asked((rule,))))
    assert engine.executor.tables.room == engine.executor.tables.num_blocks


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_one_token_that_the_one_before_predicts_are_an_autoregressive_model(family):
    """Greedy: each token is the likeliest behind all before it, in any company, a prompt's K/V made once."""
    requests = [request(i, length, 6, LowConfidence()) for i, length in enumerate((1, 5, 20, 33))]
    engine = engine_for(family, block=1, shifts=True, rows=16, block_size=4)
    answers = engine.run(requests)
    for each in requests:
        ids = list(each.prompt_ids)
        for _ in range(6):
            row = masked_logits(block_model(family), ids, 1)[-1].clone()
            row[MASK] = -torch.inf
            ids.append(int(row.argmax()))
        assert list(answers[each.request_id].ids) == ids[len(each.prompt_ids) :]
        counts = answers[each.request_id]
        assert (counts.denoised, counts.committed, counts.prefilled) == (0, 5, len(each.prompt_ids))


# ---- shapes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 8, 32, 256])
def test_experts_that_are_read_are_those_that_routed_rows_hit(rows):
    """Choosing by groups changes which experts a row gets together, not how often each is got: by symmetry k of E rows get any of
    them, and rows choose by themselves. Counted of the real router over random rows."""
    assert LLADA2_MINI.experts is not None
    torch.manual_seed(0)
    router = ExpertRouter(64, LLADA2_MINI.experts)
    counted = []
    for _ in range(40):
        torch.nn.init.normal_(router.weight)
        chosen, _ = router(torch.randn(rows, 64))
        counted.append(len(chosen.unique()))
    streamed = [MINI.streamed_weight_bytes_layers(n) for n in (rows, 0)]
    expected = (streamed[0] - streamed[1]) / (19 * MINI.expert_weights * 2)
    assert expected == pytest.approx(256 * (1 - (1 - 8 / 256) ** rows), rel=1e-6)
    assert np.mean(counted) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("shape", "card", "requests", "block", "context", "memory_ms", "compute_ms"),
    [
        (MINI, H200, 1, 32, 4096, 4.4, 0.07),
        (MINI, H200, 32, 32, 4096, 7.8, 2.3),
        (MINI, H20, 32, 32, 4096, 9.3, 15.4),
        (MINI, H20, 128, 32, 4096, 13.3, 61.5),
        (SDAR, H200, 32, 4, 2048, 5.2, 2.1),
        (SDAR, H20, 128, 4, 2048, 13.5, 56.5),
    ],
)
def test_a_step_s_floors_are_those_of_arithmetic_by_hand(shape, card, requests, block, context, memory_ms, compute_ms):
    """Weights touched and K/V of the context, and FLOP of the rows' matrices without attention, over the datasheet's peaks."""
    plan = BlockStepPlan(tuple(Work(i, i, context, 0, (0, block), False) for i in range(requests)), (), (), 0)
    work = step_work(plan, np.ones((requests, block), dtype=bool), block, max_num_logits=10**9)
    floors = Roofline(shape, card).floors(work)
    assert 1e3 * (floors[0][0] + floors[2][0]) == pytest.approx(compute_ms, rel=0.08)
    # There neither logits nor what a step writes are moved.
    moved = floors[0][1] + shape.kv_bytes_per_token * requests * context / card.bandwidth
    assert 1e3 * (moved + shape.streamed_weight_bytes_head / card.bandwidth) == pytest.approx(memory_ms, rel=0.05)


@pytest.mark.parametrize("shape", [MINI, SDAR], ids=lambda shape: shape.name)
@pytest.mark.parametrize("card", [H200, H20], ids=str)
def test_an_autoregressive_step_takes_what_the_cost_of_autoregressive_engines_says(shape, card):
    """There attention of a decode is on the line of measured decodes, here it has the pairs of a prompt or its bytes."""
    free = replace(PHYSICAL, layer_launch_s=0.0, step_overhead_s=0.0)
    ratios = []
    for framework in FRAMEWORKS:
        theirs = WorkerCost(shape, card, 1, free, kernels=framework)
        ours = price_on(shape, card, framework, Calibration.datasheet(card))
        for requests in (1, 8, 32, 128):
            for context in (512, 1024, 4096):
                plan = BlockStepPlan(
                    tuple(Work(i, i, context - 1, 1, None, True) for i in range(requests)), (), (), requests
                )
                seconds = ours.step_time(step_work(plan, np.zeros((0, 0), dtype=bool), 1)).total_s
                ratios.append(seconds / theirs.step_s((), requests, requests * context))
    assert 0.87 < min(ratios) < max(ratios) < 1.25
    assert np.median(ratios) == pytest.approx(1.0, abs=0.03)


def test_what_a_card_holds_beside_weights_and_a_step():
    held = pool_tokens(SDAR, H200.memory_bytes, rows=8192, logit_rows=2048)
    assert held * SDAR.kv_bytes_per_token + SDAR.weight_bytes < 0.95 * H200.memory_bytes
    assert 0.7e6 < held < 0.8e6
    assert pool_tokens(SDAR, H200.memory_bytes, rows=4096, logit_rows=2048) > held
    mixture = ModelShape.from_block_config(LLADA2_MINI, name="mini")
    assert mixture.weight_bytes == 2 * 16_255_643_392
    assert ModelShape.from_block_config(SDAR_8B, name="sdar").weight_bytes == 2 * 8_190_735_360
    with refuses("memory_limit=141000000000"):
        pool_tokens(LLADA2_FLASH, H200.memory_bytes, rows=8192, logit_rows=2048)


RULES = (
    LowConfidence(threshold=0.4),
    LowConfidence(threshold=0.95),
    JointThreshold(threshold=0.5, edit_threshold=0.0, max_post_steps=3),
    Static(steps=3),
    Dynamic(steps=8, threshold=0.35),
)
LENGTHS = (3, B, 20, 41, 17, 33, 1)
BATCHING = ("first-done", "synchronous")


def several():
    return [request(i, length, (5, B, 17)[i % 3], RULES[i % len(RULES)]) for i, length in enumerate(LENGTHS)]


def separate(family, batching, **options):
    engine = engine_for(family, batching=batching, num_slots=len(LENGTHS), **options)
    return engine, engine.run(several())


@pytest.mark.parametrize("family", ["llada2", "sdar"])
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_answers_are_those_of_mixed_steps(family, batching, prefix_cache):
    engine, answers = separate(family, batching, prefix_cache=prefix_cache)
    for each in several():
        assert answers[each.request_id].ids == alone(family, each)[0].ids
        assert answers[each.request_id].committed == 0
    assert is_whole(engine)
    for plan, _ in recorder(engine).steps:
        assert len({(work.tokens > 0, work.rows is not None) for work in plan.works}) == 1
        assert all((work.tokens > 0) != (work.rows is not None) for work in plan.works)


@pytest.mark.parametrize("family", ["llada2", "sdar"])
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("length", [1, 2, 4])
def test_the_forward_that_ends_a_block_computes_all_of_it(family, batching, length):
    """With a dual cache too, whose other forwards leave stale K/V of other parts."""
    rule = SubBlocks(length=length, threshold=0.3, dual_cache=True)
    for tokens in (3, 2 * B):
        asked = request(tokens, tokens, 3 * B, rule)
        assert alone(family, asked, batching=batching)[0].ids == alone(family, asked)[0].ids


@pytest.mark.parametrize("family", ["llada2", "sdar"])
@pytest.mark.parametrize("rule", RULES)
def test_first_done_runs_as_many_forwards_as_sglang_s_loop(family, rule):
    """By the plain loop, which counts what SGLang's makes of each block; alone, synchronous is the same."""
    for tokens in (5, 2 * B, 3 * B + 3):
        asked = request(tokens, tokens, 2 * B, rule)
        plain = plain_run(block_model(family), list(asked.prompt_ids), asked.gen_length, rule, B)
        for batching in BATCHING:
            answer, _ = alone(family, asked, batching=batching)
            assert answer.denoised == plain.sglang_forwards


@pytest.mark.parametrize("family", ["llada2", "sdar"])
def test_synchronous_ends_the_blocks_of_a_batch_together_and_takes_nobody_in_between(family):
    engine, answers = separate(family, "synchronous")
    steps = [(plan, {w.request_id for w in plan.works if w.rows}) for plan, _ in recorder(engine).steps]
    first_done, _ = separate(family, "first-done")
    assert len(steps) >= len(recorder(first_done).steps)
    started: dict[int, int] = {}
    for plan, members in steps:
        moved = {w.request_id for w in plan.works if w.rows and started.get(w.request_id) != w.start}
        # A batch is of blocks that begin together, and all of them go on together.
        assert moved in (set(), members)
        started |= {w.request_id: w.start for w in plan.works if w.rows}
    total = sum(answer.denoised for answer in answers.values())
    assert total > sum(alone(family, each, batching="first-done")[0].denoised for each in several())


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_little_memory_and_few_slots_end_all_the_same(batching, prefix_cache):
    for options in ({"num_slots": 2}, {"num_tokens": 8 * B}, {"rows": 2 * B}):
        sizes = {"num_slots": len(LENGTHS), **options}
        engine = engine_for("sdar", batching=batching, prefix_cache=prefix_cache, **sizes)
        answers = engine.run(several())
        assert is_whole(engine)
        for each in several():
            assert answers[each.request_id].ids == alone("sdar", each)[0].ids


@pytest.mark.parametrize("batching", BATCHING)
def test_forwards_of_a_block_that_is_done_draw_nothing(batching):
    """They would move the draws of the blocks behind it, by as many as the company makes of them."""
    requests = [
        request(i, length, 2 * B, RULES[i % len(RULES)], sampling=BlockSampling(temperature=0.9, top_k=20, seed=i))
        for i, length in enumerate(LENGTHS)
    ]
    engine = engine_for("sdar", batching=batching)
    answers = engine.run(requests)
    for each in requests:
        assert answers[each.request_id].ids == alone("sdar", each)[0].ids


@pytest.mark.parametrize(
    ("batching", "sampling"), [("first-done", BlockSampling()), ("synchronous", BlockSampling(temperature=0.9, seed=1))]
)
def test_a_rule_is_not_asked_again_of_a_block_that_it_had_done_with(batching, sampling):
    """After a preemption; where the limit of edits ended the block, it would edit once more."""
    rule = JointThreshold(threshold=0.05, edit_threshold=0.1, max_post_steps=0)
    asked = [request(i, tokens, 2 * B, rule, sampling=sampling) for i, tokens in enumerate((B + 3, 2 * B))]
    expected = [alone("llada2", each)[0].ids for each in asked]
    for step in range(1, 20):
        victim = step % 2
        engine = submitted(engine_for("llada2", batching=batching), asked, step)
        if not engine.sequences:
            break
        if victim not in engine.sequences:
            continue  # it has ended
        engine.scheduler.preempt(engine.sequences[victim])
        finished(engine)
        assert [engine.take(i).ids for i in range(2)] == expected


def test_a_model_whose_blocks_begin_with_a_token_of_the_one_before_is_refused():
    with refuses("batching='first-done'"):
        engine_for("fast-dllm-v2", batching="first-done")
