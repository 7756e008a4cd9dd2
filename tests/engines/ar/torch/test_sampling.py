"""Sampled tokens follow softmax(logits / temperature) cut at top-p, and depend on seed and position alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.causal import executor, generate, prompt, run, start

from engines.ar.sampling import SamplingParams
from engines.ar.torch.sampling import Draws, TokenScores, draw_keys, next_tokens, nucleus


def draws(n: int, temperature: float, top_p: float, seed: int = 0) -> Draws:
    keys = draw_keys(torch.full((n,), seed), torch.arange(n))
    every = torch.ones(n, dtype=torch.float64)
    return Draws(every * temperature, every * top_p, keys, top_p == 1)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.8), (2.0, 0.6)])
def test_frequencies(temperature, top_p):
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    n = 40_000
    found = next_tokens(logits.expand(n, 5), draws(n, temperature, top_p))
    share = torch.softmax(logits.double() / temperature, 0)
    before = share.cumsum(0) - share
    share = torch.where(before < top_p, share, 0.0)
    share /= share.sum()
    counts = torch.bincount(found, minlength=5) / n
    # Five standard deviations of a share.
    assert ((counts - share).abs() <= 5 * (share * (1 - share) / n).sqrt() + 1e-12).all()
    assert counts[share == 0].sum() == 0


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=12), st.floats(0.01, 1.0), st.floats(0.0, 5.0))
def test_a_nucleus_is_the_fewest_likely_tokens_that_hold_top_p(values, top_p, heat):
    logits = torch.tensor([values])
    kept = nucleus(logits, torch.tensor([heat], dtype=torch.float64), torch.tensor([top_p], dtype=torch.float64))[0]
    assert kept[logits.argmax()]
    if heat == 0:
        assert (logits[0][kept] == logits.max()).all()
        return
    share = torch.softmax(logits.double()[0] / max(heat, 1e-300), 0)
    assert share[kept].sum() >= top_p - 1e-9
    assert share[kept].min() >= share[~kept].max() - 1e-12 if (~kept).any() else True
    least = share[kept].min()
    assert share[kept].sum() - least < top_p + 1e-9


def test_a_sequence_samples_the_same_alone_and_in_company():
    hot = SamplingParams(temperature=1.5, top_p=0.9, seed=7)
    alone = executor()
    slot = alone.open(hot)
    alone.write(slot, 0, prompt(20))
    alone.tables.grow(np.array([slot]), np.array([40]))
    expected = generate(alone, slot, 20, 10)

    together = executor()
    greedy = start(together, prompt(33, 1))
    other = together.open(SamplingParams(temperature=0.7, seed=8))
    mine = together.open(hot)
    for place, ids in ((other, prompt(5, 2)), (mine, prompt(20))):
        together.write(place, 0, ids)
        together.tables.grow(np.array([place]), np.array([60]))
    found = [run(together, (greedy, 0, 33, True), (other, 0, 5, True), (mine, 0, 20, True))[2]]
    for step in range(9):
        found.append(run(together, (mine, 20 + step, 1, True), (other, 5 + step, 1, True))[0])
    assert found == expected
    reference = executor()
    assert generate(reference, start(reference, prompt(33, 1)), 33, 1) == together.read(greedy, 33, 34)
    assert len(set(expected)) > 4


def test_other_seeds_give_other_answers():
    answers = set()
    for seed in range(4):
        worker = executor()
        slot = worker.open(SamplingParams(temperature=2.0, seed=seed))
        worker.write(slot, 0, prompt(8))
        worker.tables.grow(np.array([slot]), np.array([32]))
        answers.add(tuple(generate(worker, slot, 8, 8)))
    assert len(answers) == 4


def test_equally_likely_tokens_are_told_by_their_ids():
    found = TokenScores(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0] * 5])).of(torch.tensor([2, 4]))
    assert found.top_ids.tolist() == [[1, 2, 4, 3, 0], [0, 1, 2, 3, 4]]
    assert found.rank.tolist() == [3, 5]
