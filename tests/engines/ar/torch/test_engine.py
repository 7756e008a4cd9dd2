"""Steps of the torch executor.

A sequence's numbers do not depend on how its prompt is cut, on its company in a step, or on the bucket it runs in.
"""

import numpy as np
import pytest
import torch
from support.causal import executor, generate, pooled, prompt, run, small_config, small_model, small_qwen3, start
from support.refusals import refuses

from engines.ar.sampling import SamplingParams
from engines.ar.torch.executor import PagedExecutor
from engines.ar.torch.rows import PackedWork
from engines.errors import UserError
from engines.models.loader import load_causal
from engines.models.qwen2_config import tiny_causal
from engines.policies.views import Bucket, Rung


@pytest.mark.parametrize(
    ("options", "said"),
    [({"max_len": 5000}, "max_len=5000"), ({"num_tokens": 0}, "num_tokens=0"), ({"num_slots": 0}, "num_slots=0")],
)
def test_sizes_that_cannot_be_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        executor(**options)


def test_ids_outside_the_vocabulary_are_refused():
    worker: PagedExecutor = executor()
    slot = worker.open()
    with pytest.raises(UserError, match="between 0 and 96"):
        worker.write(slot, 0, [5, 97])
    with refuses("max_len=256"):
        worker.write(slot, 250, [1] * 7)


TOLERANCE = 4e-6
"""Largest difference of K and V (up to 4, float32, two layers) that the order of a sum explains: measured 2.3e-6."""


@pytest.fixture(scope="module", params=[small_config, small_qwen3], ids=["qwen2", "qwen3"])
def worker(request: pytest.FixtureRequest) -> PagedExecutor:
    return executor(small_model(config=request.param()))


def test_every_chunk_size_gives_the_same_tokens_and_kv(worker):
    ids = prompt(40)
    whole = start(worker, ids)
    expected = generate(worker, whole, 40, 6)
    kv = pooled(worker, whole, 45)
    for size in (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 39, 40):
        slot = start(worker, ids)
        for begin in range(0, 40, size):
            end = min(begin + size, 40)
            found = run(worker, (slot, begin, end - begin, end == 40))
        for place in range(40, 45):
            found += run(worker, (slot, place, 1, True))
        assert found == expected, f"chunks of {size}"
        for mine, theirs in zip(pooled(worker, slot, 45), kv, strict=True):
            torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0, msg=f"chunks of {size}")
        worker.close_slot(slot)
    worker.close_slot(whole)


def test_few_rows_that_give_logits_are_computed_among_others(worker, monkeypatch):
    """A row's numbers are the same in any company of at least ``min_rows``."""
    seen, logits = [], worker.model.logits
    monkeypatch.setattr(worker.model, "min_rows", 7)
    monkeypatch.setattr(worker.model, "logits", lambda hidden: seen.append(len(hidden)) or logits(hidden))
    slot = worker.open(SamplingParams(prompt_logprobs=0, prompt_tokens=3))
    worker.write(slot, 0, prompt(3))
    worker.tables.grow(np.array([slot]), np.array([16]))
    step = worker.run(PackedWork.of([(slot, 0, 3, True)]))
    assert len(step.prompt_logprobs[slot].chosen) == 2
    run(worker, (slot, 3, 1, True))
    assert seen == [7, 7, 7], "rows of the prompt, its last row, a decode"
    worker.close_slot(slot)


LENGTHS = (1, 2, 5, 17, 31, 64, 64, 100)


def test_a_packed_prefill_is_bit_for_bit_that_of_each_prompt_alone(worker):
    prompts = [prompt(tokens, seed) for seed, tokens in enumerate(LENGTHS)]
    together = [start(worker, ids) for ids in prompts]
    tokens = run(worker, *((slot, 0, len(ids), True) for slot, ids in zip(together, prompts, strict=True)))
    for slot, ids, token in zip(together, prompts, tokens, strict=True):
        alone = start(worker, ids)
        assert run(worker, (alone, 0, len(ids), True)) == [token]
        for mine, theirs in zip(pooled(worker, slot, len(ids)), pooled(worker, alone, len(ids)), strict=True):
            assert torch.equal(mine, theirs), f"{len(ids)} tokens differ by {(mine - theirs).abs().max()}"
        worker.close_slot(alone)
        worker.close_slot(slot)


def test_decodes_and_chunks_over_history_in_one_step_are_those_of_each_alone(worker):
    """A mixed step: three decodes, two re-prefills of unequal history, two fresh prompts."""
    parts = [(30, 1), (47, 1), (90, 1), (16, 12), (80, 33), (0, 9), (0, 70)]
    prompts = [prompt(history + tokens, 20 + seed) for seed, (history, tokens) in enumerate(parts)]
    mixed, alone = [], []
    for slots in (mixed, alone):
        for ids, (history, _) in zip(prompts, parts, strict=True):
            slot = start(worker, ids)
            if history:
                run(worker, (slot, 0, history, False))
            slots.append(slot)
    tokens = run(worker, *((slot, *part, True) for slot, part in zip(mixed, parts, strict=True)))
    for slot, other, part, token in zip(mixed, alone, parts, tokens, strict=True):
        assert run(worker, (other, *part, True)) == [token]
        for mine, theirs in zip(pooled(worker, slot, sum(part)), pooled(worker, other, sum(part)), strict=True):
            torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)
    for slot in (*mixed, *alone):
        worker.close_slot(slot)


@pytest.mark.parametrize("heads", [20, 4], ids=["kernel", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decode_s_kv_and_token_are_bit_for_bit_those_it_has_alone(dtype, heads):
    """Wide enough that a product of few rows is rounded unlike one of many, by MKL and, of one row, by oneDNN."""
    model = load_causal(
        tiny_causal(d_model=1280, n_layers=2, n_heads=heads, n_kv_heads=2), weights="random", dtype=dtype
    )
    wide, found = executor(model, num_slots=12), []
    for company in (0, 1, 3, 9):
        slots = [start(wide, prompt(21 + 9 * seed, seed)) for seed in range(company + 1)]
        run(wide, *((slot, 0, 20 + 9 * seed, False) for seed, slot in enumerate(slots)))
        token = run(wide, *((slot, 20 + 9 * seed, 1, True) for seed, slot in reversed([*enumerate(slots)])))[-1]
        found.append((token, *pooled(wide, slots[0], 21)))
        for slot in slots:
            wide.close_slot(slot)
    for token, *kv in found[1:]:
        assert token == found[0][0]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(kv, found[0][1:], strict=True))


@pytest.mark.parametrize("histories", [(0, 0, 0, 0, 0), (0, 16, 3, 50, 120)], ids=["fresh", "over-history"])
@pytest.mark.parametrize("mode", [Bucket(16, 8), Bucket(32, 5), Rung(64), Rung(200)], ids=str)
def test_a_padded_bucket_gives_what_the_packed_step_gives(worker, histories, mode):
    counts = (16, 1, 7, 12, 4)
    prompts = [
        prompt(history + count, 50 + i) for i, (history, count) in enumerate(zip(histories, counts, strict=True))
    ]
    results = []
    for asked in (None, mode):
        slots = [start(worker, ids) for ids in prompts]
        for slot, history in zip(slots, histories, strict=True):
            if history:
                run(worker, (slot, 0, history, False))
        entries = [(slot, history, count, True) for slot, history, count in zip(slots, histories, counts, strict=True)]
        tokens = run(worker, *entries, mode=asked)
        # What padding left in the pool must not show in the next step.
        after = run(worker, *((slot, h + c, 1, True) for slot, h, c in zip(slots, histories, counts, strict=True)))
        kv = [pooled(worker, slot, len(ids)) for slot, ids in zip(slots, prompts, strict=True)]
        results.append((tokens, after, kv))
        for slot in slots:
            worker.close_slot(slot)
    (tokens, after, kv), (padded_tokens, padded_after, padded_kv) = results
    assert padded_tokens == tokens
    assert padded_after == after
    for mine, theirs in zip(padded_kv, kv, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=0)


def test_a_mode_that_does_not_hold_the_step_runs_as_it_is(worker):
    slot = start(worker, prompt(20))
    from engines.ar.torch.rows import PackedWork

    work = PackedWork.of([(slot, 0, 20, True)])
    for mode in (Bucket(16, 4), Bucket(64, 1), Rung(19), "fast", None):
        assert worker.run(work, mode).size is None, mode
    assert worker.run(work, Bucket(32, 1)).size == Bucket(32, 1)
    assert worker.run(work, Bucket(32, 2)).num_rows == 64
    worker.close_slot(slot)


def test_padding_never_touches_another_sequence(worker):
    """A bucket whose padding runs past the sequence's blocks, beside full neighbours."""
    neighbours = [start(worker, prompt(60, seed), room=64) for seed in range(3)]
    for slot in neighbours:
        run(worker, (slot, 0, 60, False))
    before = [pooled(worker, slot, 60) for slot in neighbours]
    short = start(worker, prompt(3), room=4)
    long = start(worker, prompt(256), room=256)
    run(worker, (long, 0, 250, False))
    run(worker, (short, 0, 3, True), (long, 250, 6, True), mode=Bucket(32, 4))
    for slot, kept in zip(neighbours, before, strict=True):
        for mine, theirs in zip(pooled(worker, slot, 60), kept, strict=True):
            assert torch.equal(mine, theirs)
    for slot in (*neighbours, short, long):
        worker.close_slot(slot)
    assert np.all(worker.tables.table == 0)
