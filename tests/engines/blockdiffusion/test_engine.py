"""A request's answer is that of the whole sequence computed anew at every step, alone and in any company.

T1 to T11 name properties that a server of block-diffusion models has to have.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.block_models import END, FAMILIES, MASK, block_model, plain_logits
from support.block_runs import alone, engine_for, finished, is_whole, prompt, recorder, request, submitted

from engines.blockdiffusion.engine import BlockEngine
from engines.blockdiffusion.executor import BlockDraws, TorchBlockExecutor
from engines.blockdiffusion.rules import Dynamic, JointThreshold, LowConfidence, Sequential, Static, SubBlocks
from engines.blockdiffusion.sequence import BlockRequest, BlockSampling
from engines.dllm.denoise import Reduction
from engines.errors import UserError
from repro.checks.blocks import plain_run

B = 8
RULES = (
    LowConfidence(threshold=0.4),
    LowConfidence(threshold=0.95),
    JointThreshold(threshold=0.5, edit_threshold=0.0, max_post_steps=3),
    JointThreshold(threshold=0.7, edit_threshold=0.5, max_post_steps=5),
    Static(steps=3),
    Dynamic(steps=8, threshold=0.35),
    Sequential(steps=5),
    SubBlocks(length=4, threshold=0.5),
)
DUAL = SubBlocks(length=4, threshold=0.5, dual_cache=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [3, B, B + 1, 2 * B - 1, 3 * B, 3 * B + 5])
def test_t1_cached_blocks_are_the_whole_sequence_computed_anew(family, tokens):
    for rule in (RULES[tokens % len(RULES)], RULES[(tokens + 2) % len(RULES)]):
        asked = request(tokens, tokens, 2 * B + 3, rule)
        plain = plain_run(block_model(family), list(asked.prompt_ids), asked.gen_length, rule, B)
        answer, trace = alone(family, asked)
        assert list(answer.ids) == plain.ids[: asked.gen_length]
        assert answer.denoised == plain.denoised  # T11
        for (_, mine), (_, theirs) in zip(trace, plain.trace, strict=True):
            assert all(min(abs(a - b) for b in theirs) < 1e-4 for a in mine)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_head_of_keys_serves_all_queries(family):
    """Its rows lie apart in the product of queries, keys and values."""
    model = block_model(family, num_key_value_heads=1)
    executor = TorchBlockExecutor(model, num_slots=1, max_len=64, num_tokens=64, block=B)
    asked = request(0, B + 3, 2 * B, RULES[0])
    plain = plain_run(model, list(asked.prompt_ids), asked.gen_length, RULES[0], B, plain_logits)
    assert list(BlockEngine(executor).run([asked])[0].ids) == plain.ids[: asked.gen_length]


def mixed(family):
    """Requests of every rule and length, some that draw."""
    rules = (*RULES, DUAL) if family == "fast-dllm-v2" else RULES
    lengths = (3, B, 20, 41, 17, 33, 1, 24, 9)
    sampled = BlockSampling(temperature=0.8, top_k=20, top_p=0.9, seed=7)
    return [
        request(i, length, (5, B, 17, 30)[i % 4], rule, sampling=sampled if i % 3 == 1 else BlockSampling())
        for i, (rule, length) in enumerate(zip(rules, lengths, strict=False))
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_t3_company_changes_nothing(family):
    """Bit for bit, with the phases of many requests in one packed step."""
    asked = mixed(family)
    engine = engine_for(family, rows=64, num_slots=len(asked))
    answers = engine.run(asked)
    phases = {
        (bool(work.rows), work.start >= len(asked[work.request_id].prompt_ids) // B * B, work.tokens > 0)
        for plan, _ in recorder(engine).steps
        for work in plan.works
    }
    assert len(phases) >= 4
    assert max(len(plan.works) for plan, _ in recorder(engine).steps) > 3
    for each in asked:
        answer, trace = alone(family, each)
        assert answers[each.request_id].ids == answer.ids
        assert recorder(engine).traces[each.request_id] == trace
    assert is_whole(engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_t4_prefill_in_chunks_is_prefill_at_once(family):
    asked = request(0, 9 * B + 2, 2 * B, LowConfidence(threshold=0.6))
    whole, trace = alone(family, asked)
    for rows in range(2 * B, 11 * B, B):
        answer, own = alone(family, asked, rows=rows)
        assert (answer.ids, own) == (whole.ids, trace)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [None, 2, 16])
def test_t5_a_prefix_hit_is_a_cold_run_and_ends_with_a_block(family, size):
    opening = prompt(5 * B, 3)
    first = BlockRequest(request_id=0, prompt_ids=opening + prompt(3, 4), gen_length=2 * B, rule=RULES[0])
    cold = {}
    engine = engine_for(family, block_size=size)
    answer = engine.run([first])[0]
    unit = engine.executor.tables.unit
    assert unit == max(B, size or B)
    # A conversation that goes on: the answer's whole blocks are reused as the prompt's are, its last block never is.
    known = first.prompt_ids + answer.ids
    followers = {
        1: opening[: 3 * B] + prompt(9, 5),
        2: known + prompt(6, 6),
        3: opening,
        4: opening[: 3 * B - 1] + prompt(9, 7),
        5: (opening[0] ^ 1, *opening[1:]),
        6: known[: 6 * B + 3] + prompt(6, 6),
        7: opening[2 * B :] + prompt(9, 8),  # known blocks, but not behind these
    }
    for number, ids in followers.items():
        asked = BlockRequest(request_id=number, prompt_ids=ids, gen_length=B + 2, rule=RULES[0])
        cold[number], trace = alone(family, asked, prefix_cache=False)
        found = engine.run([asked])[number]
        assert found.ids == cold[number].ids
        assert recorder(engine).traces[number] == trace
        saved = (cold[number].prefilled - found.prefilled) * B
        common = next(
            (i for i, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b), min(len(ids), len(known))
        )
        assert saved % unit == 0
        assert saved <= common // unit * unit
        # All whole blocks of both, but for a committed one whose token is still to come, and the last, never committed.
        least = min(common // B * B, len(ids) // B * B - B * (family == "fast-dllm-v2"), 6 * B) // unit * unit
        assert saved >= least
    assert is_whole(engine)
    assert engine.executor.tables._known


def test_t5_a_block_that_was_cut_is_not_reused():
    """Its K/V saw the tokens behind the cut."""
    first = request(0, B, B, RULES[0])
    engine = engine_for("llada2")
    answer = engine.run([first])[0]
    kept = first.prompt_ids + answer.ids[:3]
    again = BlockRequest(request_id=1, prompt_ids=kept + prompt(2 * B, 9), gen_length=B, rule=RULES[0])
    assert engine.run([again])[1].prefilled == alone("llada2", again)[0].prefilled - 1


def test_t6_thresholds_bound_the_forwards():
    for family in FAMILIES:
        slow, _ = alone(family, request(0, 2 * B, 2 * B, LowConfidence(threshold=1.0)))
        quick, _ = alone(family, request(0, 2 * B, 2 * B, LowConfidence(threshold=0.0)))
        given = 1 if family == "fast-dllm-v2" else 0  # a block's first token comes from the block before
        assert (slow.denoised, quick.denoised) == (2 * (B - given), 2)
        assert slow.committed == quick.committed == 1


def test_commits_ride_along_and_are_left_out_where_nothing_reads_them():
    asked = request(0, 2 * B, 3 * B, LowConfidence(threshold=0.0))
    engine = engine_for("sdar")
    engine.run([asked])
    shares = [(work.tokens // B, work.rows) for plan, _ in recorder(engine).steps for work in plan.works]
    assert shares == [
        (2, (0, B)),
        (1, (0, B)),
        (1, (0, B)),
    ]  # prefill or commit and denoise in one step; none at the end
    # A block whose last forward changed nothing has its K/V.
    edits = JointThreshold(threshold=0.0, edit_threshold=1.0, max_post_steps=9)
    answer, _ = alone("sdar", request(0, 2 * B, 3 * B, edits))
    assert (answer.denoised, answer.committed) == (6, 0)


@pytest.mark.parametrize(
    ("family", "batching"),
    [*((family, "mixed") for family in FAMILIES), ("sdar", "first-done"), ("sdar", "synchronous")],
)
def test_t7_a_request_may_be_aborted_at_every_step(family, batching):
    asked = mixed(family)[:4]
    for steps in range(0, 60, 6):
        engine = engine_for(family, rows=48, prefix_cache=steps % 2 == 0, batching=batching)
        submitted(engine, asked, steps)
        victims = list(engine.sequences)
        if not victims:
            break
        engine.abort(victims[steps % len(victims)])
        finished(engine)
        assert is_whole(engine)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_t7_preempted_requests_end_as_if_they_had_not_been(family, prefix_cache):
    asked = mixed(family)
    engine = engine_for(family, rows=64, num_slots=9, num_tokens=10 * B, prefix_cache=prefix_cache)
    assert sum(len(record.preempted) for record in finished(submitted(engine, asked))) > 1
    assert is_whole(engine)
    for each in asked:
        assert engine.take(each.request_id).ids == alone(family, each)[0].ids


@pytest.mark.parametrize("family", FAMILIES)
def test_t7_answers_count_the_forwards_of_all_steps(family):
    """Those too that a preempted request made for a block that begins anew."""
    engine = engine_for(family, num_tokens=10 * B)
    asked = [request(i, 3 * B + i, 3 * B, DUAL) for i in range(6)]
    records = finished(submitted(engine, asked))
    assert sum(len(each.preempted) for each in records) > 1
    denoised = [engine.take(each.request_id).denoised for each in asked]
    assert sum(denoised) == sum(each.denoised for each in records)
    assert sum(denoised) > sum(alone(family, each)[0].denoised for each in asked)


@pytest.mark.parametrize(("family", "rule"), [("llada2", RULES[2]), ("sdar", RULES[0]), ("fast-dllm-v2", DUAL)])
def test_t7_a_request_may_be_preempted_at_every_step(family, rule):
    sampling = BlockSampling(temperature=0.5, seed=1)
    asked = request(0, B + 3, B, rule, sampling=sampling)
    answer, _ = alone(family, asked)
    for step in range(1, answer.denoised + 2):
        keeps_blocks = step % 2 == 0
        engine = submitted(engine_for(family, prefix_cache=keeps_blocks), [asked], step)
        if not engine.scheduler.running:
            break
        engine.scheduler.preempt(engine.sequences[0])
        assert is_whole(engine)
        if not keeps_blocks:
            # As others do with blocks that are given back: nothing of what was there is left.
            generator = torch.Generator().manual_seed(0)
            for held in (engine.executor.pool.k, engine.executor.pool.v):
                held.copy_(torch.randn(held.shape, generator=generator) * 5)
        finished(engine)
        assert engine.take(0).ids == answer.ids


@pytest.mark.parametrize("family", FAMILIES)
def test_t8_an_answer_ends_with_its_first_stop_token(family):
    for tokens in (3, B, B + 3):
        asked = request(tokens, tokens, 3 * B, LowConfidence(threshold=0.5))
        whole, _ = alone(family, asked)
        for stop in list(dict.fromkeys(whole.ids))[::5]:
            ended, _ = alone(family, BlockRequest(**vars(asked) | {"stop_ids": frozenset([stop])}))
            assert ended.ids == whole.ids[: whole.ids.index(stop) + 1]
            assert ended.reason == "stop"
            assert ended.denoised <= whole.denoised
            early, _ = alone(family, BlockRequest(**vars(asked) | {"stop_ids": frozenset([stop]), "exits_early": True}))
            assert (early.ids, early.reason) == (ended.ids, "stop")
            assert early.denoised <= ended.denoised
        for length in (1, B - 1, B, B + 1, 3 * B - 1):
            cut, _ = alone(family, BlockRequest(**vars(asked) | {"gen_length": length}))
            assert (cut.ids, cut.reason) == (whole.ids[:length], "length")


@pytest.mark.parametrize("exits_early", [False, True])
def test_t8_a_stop_token_of_the_prompt_stops_nothing(exits_early):
    for tokens in (B, B + 3):
        ids = (END, *prompt(tokens - 2, 1), END)
        asked = BlockRequest(request_id=0, prompt_ids=ids, gen_length=B, rule=RULES[0])
        stops = BlockRequest(**vars(asked) | {"stop_ids": frozenset([END]), "exits_early": exits_early})
        for family in FAMILIES:
            whole = alone(family, asked)[0].ids
            if END not in whole:
                assert alone(family, stops)[0].ids == whole


def test_t9_the_mask_s_id_in_a_prompt_is_a_token():
    """And no token of a prompt changes, whatever rule edits or takes more than there are holes."""
    for rule in (RULES[2], Static(steps=2)):
        ids = (*prompt(B, 2), MASK, 5, MASK, 7, 8, 9)
        engine = engine_for("llada2")
        engine.submit(BlockRequest(request_id=0, prompt_ids=ids, gen_length=B, rule=rule))
        while engine.has_work:
            held = engine.sequences[0]
            assert (*held.final, *held.ids)[: len(ids)] == ids
            engine.step()
        assert MASK not in engine.take(0).ids


def test_draws_depend_on_the_seed_alone():
    hot = {seed: BlockSampling(temperature=1.5, seed=seed) for seed in (1, 2)}
    answers = {seed: alone("sdar", request(0, 9, 24, RULES[0], sampling=each))[0].ids for seed, each in hot.items()}
    assert answers[1] != answers[2]
    assert answers[1] == alone("sdar", request(0, 9, 24, RULES[0], sampling=hot[1]), rows=16)[0].ids
    # One token to choose from: greedy, and as sure as can be.
    one, trace = alone("sdar", request(0, 9, 24, RULES[0], sampling=BlockSampling(temperature=1.0, top_k=1)))
    assert {level for _, levels in trace for level in levels} == {1.0}
    assert one.denoised == 4
    greedy, _ = alone("sdar", request(0, 9, 24, Sequential(steps=8)))
    likeliest = BlockSampling(temperature=0.3, top_p=0.5, draws=False)
    assert alone("sdar", request(0, 9, 24, Sequential(steps=8), sampling=likeliest))[0].ids == greedy.ids


@pytest.mark.parametrize("raised", [None, 0, 1, 3])
def test_a_confidence_is_what_temperature_and_cuts_leave(raised):
    """By hand: top_k before top_p. The mask, raised to some rank, counts in both as any other token; it is not taken, and where the cuts
    leave it alone the next one is beside it."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(3)) * 2
    mask = 17
    if raised is not None:
        logits[:, mask] = logits.sort(descending=True).values[:, raised] + 1e-3
    cuts = [(0.7, 5, 0.6), (1.0, 1, 1.0), (1.3, 40, 0.9), (0.5, 3, 1.0), (1.0, 40, 0.05), (2.0, 40, 1.0)]
    temperature, top_k, top_p = (torch.tensor(each) for each in zip(*cuts, strict=True))
    is_drawn = torch.zeros(6, dtype=torch.bool)
    draws = BlockDraws(
        temperature=temperature,
        keys=torch.arange(6),
        random_remasking=is_drawn,
        top_k=top_k,
        top_p=top_p,
        draws=is_drawn,
    )
    tokens, confidence = Reduction(confidence_of="sampler", suppress_id=mask)(logits.clone(), draws)
    drawing = replace(draws, draws=~is_drawn)
    drawn, _ = Reduction(confidence_of="sampler", suppress_id=mask)(logits.clone(), drawing)
    for row, (warmth, k, p), token, sure, other in zip(
        logits.double().tolist(), cuts, tokens, confidence, drawn, strict=True
    ):
        order = sorted(range(40), key=lambda i: -row[i])
        share = np.exp([(row[i] - row[order[0]]) / warmth for i in order[:k]])
        share /= share.sum()
        left = len(share) if p == 1.0 else int(np.argmax(share.cumsum() > p)) + 1
        left = max(left, 2) if order[0] == mask else left
        weight = np.exp([(row[i] - row[order[0]]) / warmth for i in order[:left]])
        likeliest = next(i for i in order if i != mask)
        assert token == likeliest
        assert float(sure) == pytest.approx(weight[order.index(likeliest)] / weight.sum(), rel=1e-5)
        assert int(other) in set(order[:left]) - {mask}


@st.composite
def requests(draw):
    number = draw(st.integers(1, 5))
    rules = st.sampled_from((*RULES, DUAL))
    return [
        request(
            i,
            draw(st.integers(1, 40)),
            draw(st.integers(1, 20)),
            draw(rules),
            sampling=draw(st.sampled_from((BlockSampling(), BlockSampling(temperature=0.9, seed=3)))),
            stop_ids=frozenset(draw(st.sets(st.integers(0, MASK), max_size=10))),
        )
        for i in range(number)
    ]


@settings(max_examples=15)
@given(
    requests(),
    st.sampled_from(FAMILIES),
    st.integers(2 * B, 80),
    st.sampled_from((8, 16, 40)),
    st.sampled_from((2, 4, 8, 16)),
    st.booleans(),
)
def test_any_batch_any_budget_any_pool(asked, family, rows, blocks, size, prefix_cache):
    options = {"num_tokens": max(8, blocks) * B, "block_size": size, "prefix_cache": prefix_cache}
    engine = engine_for(family, rows=rows, **options)
    answers = engine.run(asked)
    assert is_whole(engine)
    for each in asked:
        answer, _ = alone(family, each)
        assert (answers[each.request_id].ids, answers[each.request_id].reason) == (answer.ids, answer.reason)
        assert answers[each.request_id].denoised >= answer.denoised


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda: engine_for("sdar", rows=B), "max_num_batched_tokens=8"),
        (lambda: engine_for("sdar", block_size=6), "block_size=6"),
        (lambda: engine_for("sdar", max_len=1000), "max_len=1000"),
        (lambda: engine_for("sdar", max_num_logits=8), "max_num_logits=8"),
        (lambda: engine_for("sdar").submit(request(0, 150, 20, RULES[0])), "grows to 176 tokens in whole blocks of 8"),
        (lambda: engine_for("sdar").submit(request(0, 3, 9, Static(steps=9))), "steps=9"),
        (
            lambda: engine_for("sdar").run([request(0, B, 9, RULES[0], prompt_ids=(500,) * B)]),
            "token ids must lie between 0 and 102",
        ),
    ],
)
def test_what_the_engine_has_no_room_for_is_refused(do, says):
    with pytest.raises(UserError, match=says):
        do()
