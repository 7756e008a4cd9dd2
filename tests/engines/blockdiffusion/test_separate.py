"""SGLang's schedules: the same answers as mixed steps give, by its number of forwards, prompts and blocks in steps apart."""

import pytest
from support.block_models import block_model
from support.block_runs import alone, engine_for, is_whole, recorder, request
from support.refusals import refuses

from engines.blockdiffusion.rules import Dynamic, JointThreshold, LowConfidence, Static, SubBlocks
from engines.blockdiffusion.sequence import BlockSampling
from repro.checks.plain_blocks import plain_run

B = 8
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
        assert len({(work.blocks > 0, work.rows is not None) for work in plan.works}) == 1
        assert all((work.blocks > 0) != (work.rows is not None) for work in plan.works)


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
        engine = engine_for("llada2", batching=batching)
        for each in asked:
            engine.submit(each)
        for _ in range(step):
            if engine.has_work:
                engine.step()
        if victim not in engine.sequences:
            continue  # it has ended
        engine.scheduler.preempt(engine.sequences[victim])
        while engine.has_work:
            assert engine.step() is not None
        assert [engine.take(i).ids for i in range(2)] == expected


@pytest.mark.parametrize("batching", BATCHING)
def test_a_request_may_be_aborted_at_every_step(batching):
    for steps in range(0, 30, 3):
        engine = engine_for("sdar", batching=batching)
        for each in several()[:4]:
            engine.submit(each)
        for _ in range(steps):
            if engine.has_work:
                engine.step()
        for victim in list(engine.sequences)[:1]:
            engine.abort(victim)
        while engine.has_work:
            assert engine.step() is not None
        assert is_whole(engine)


def test_a_model_whose_blocks_begin_with_a_token_of_the_one_before_is_refused():
    with refuses("batching='first-done'"):
        engine_for("fast-dllm-v2", batching="first-done")
