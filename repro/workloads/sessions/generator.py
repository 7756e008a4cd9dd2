"""Sessions drawn so that a sample meets its means exactly: a trace of 99 sessions has no other 703.79 than its own.

The totals of a sample are fixed by construction: rounds, prefill and decode tokens sum to the mean times the
number of sessions, rounded to a whole number. What is random is how they spread over sessions and rounds. So
the first n sessions of a longer sample are not a shorter sample.
"""

from __future__ import annotations

import numpy as np

from engines.errors import require
from repro.workloads.lengths import Floats, Ints
from repro.workloads.seed import derive_seed
from repro.workloads.sessions.card import LengthTotals, RoundCounts


def draw_rounds(counts: RoundCounts, num: int, seed: int) -> Ints:
    """Draws the rounds of each session, at least 1; their sum is the mean times ``num``."""
    if counts.kind == "fixed":
        return np.full(num, int(counts.mean), dtype=np.int64)
    rng = np.random.default_rng(derive_seed(seed, "rounds"))
    extra = counts.mean - 1
    if counts.kind == "poisson":
        drawn = rng.poisson(extra, num)
    else:
        assert counts.shape is not None
        drawn = rng.negative_binomial(counts.shape, counts.shape / (counts.shape + extra), num)
    return 1 + apportion(drawn.astype(np.float64) + 1e-9, round(extra * num))


def draw_lengths(totals: LengthTotals, rounds: Ints, seed: int) -> tuple[Ints, Ints]:
    """Draws prefill and decode tokens of every round, all sessions one after the other; at least 1 each."""
    sizes = []
    for name, mean in (("prefill", totals.prefill_tokens), ("decode", totals.decode_tokens)):
        rng = np.random.default_rng(derive_seed(seed, name))
        per_session = np.exp(totals.session_sigma * rng.standard_normal(len(rounds)))
        weight = np.exp(totals.round_sigma * rng.standard_normal(int(rounds.sum())))
        if name == "prefill":
            first = np.cumsum(rounds) - rounds
            weight[first] *= totals.first_round_weight
        num = len(rounds) if totals.counted == "per_session" else int(rounds.sum())
        # Averaged per round, a session of more rounds has more tokens whatever the card says.
        if totals.grows_with_rounds or totals.counted == "per_round":
            per_session = per_session * rounds
        whole = round(mean * num)
        require(
            whole >= rounds.sum(),
            f"{name}_tokens={mean}: {num} of them are fewer than the {rounds.sum()} rounds, which need a token each",
        )
        spare = apportion(per_session, whole - int(rounds.sum()))
        sizes.append(1 + apportion_within(weight, spare, rounds))
    return sizes[0], sizes[1]


def apportion(weight: Floats, total: int) -> Ints:
    """Finds whole numbers that sum to ``total``, proportional to ``weight`` (largest remainders)."""
    return apportion_within(weight, np.array([total]), np.array([len(weight)]))


def apportion_within(weight: Floats, totals: Ints, sizes: Ints) -> Ints:
    """Does as ``apportion`` for groups that lie one after the other: group g has ``sizes[g]`` weights and sums to
    ``totals[g]``."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    sums = np.bincount(group, weights=weight, minlength=len(sizes))
    exact = weight * (totals / sums)[group]
    whole = np.floor(exact).astype(np.int64)
    left = totals - np.bincount(group, weights=whole, minlength=len(sizes)).astype(np.int64)
    order = np.lexsort((whole - exact, group))  # the largest remainder of each group first
    rank = np.empty(len(weight), dtype=np.int64)
    rank[order] = np.arange(len(weight)) - (np.cumsum(sizes) - sizes)[group]
    return whole + (rank < left[group])
