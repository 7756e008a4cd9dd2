"""The closed forms of waiting, the recursion they come from, and the simulated instance."""

import numpy as np
import pytest
from support.prefill import TokenCost, turns

from engines.errors import UserError
from engines.laps.batching import AdaptiveWait, ClassQueue, TemporalConfig, TemporalDisaggregation, WaitConfig
from engines.laps.cluster import PrefillCluster, PrefillRun
from engines.laps.latency import TwoClasses, waits_s
from engines.laps.system import PrefillSystem
from engines.policies.batching import ONE_BY_ONE
from paper_figures.laps import boundary

MIXED = TwoClasses(rate=8.0, short_share=0.7, short_s=0.02, long_s=0.2)
UNIFORM_WAIT_S = MIXED.rate * MIXED.mean_s**2 / (2 * (1 - MIXED.load))
"""The wait if every request took the mean time: M/D/1 at the same load."""


def priority_waits_s(queue: TwoClasses) -> tuple[float, float]:
    """Mean waits of short and long where short ones go first, without preemption (Cobham)."""
    residual_s = queue.rate * (queue.short_share * queue.short_s**2 + (1 - queue.short_share) * queue.long_s**2) / 2
    short_wait_s = residual_s / (1 - queue.rate * queue.short_share * queue.short_s)
    return short_wait_s, short_wait_s / (1 - queue.load)


def simulate(system: PrefillSystem, gaps: np.ndarray, service: np.ndarray) -> PrefillRun:
    arrivals = np.cumsum(gaps).tolist()
    tokens = np.rint(service * 1e3).astype(int).tolist()
    return PrefillCluster(system=system, cost=TokenCost(), slo_s=None, boundary=100).simulate(
        turns(*zip(arrivals, tokens, strict=True))
    )


def waits_of(run: PrefillRun) -> np.ndarray:
    return np.array(run.requests["started_s"]) - np.array(run.requests["arrival_s"])


def test_the_penalty_is_what_the_spread_of_lengths_adds():
    assert MIXED.wait_s == pytest.approx(UNIFORM_WAIT_S + MIXED.hol_penalty_s)
    second_moment = 0.7 * 0.02**2 + 0.3 * 0.2**2
    assert MIXED.wait_s == pytest.approx(8 * second_moment / (2 * (1 - MIXED.load)))
    assert TwoClasses(rate=8.0, short_share=0.7, short_s=0.1, long_s=0.1).hol_penalty_s == 0


def test_the_simulated_instance_is_the_recursion():
    gaps, service = MIXED.drawn(4000, seed=1)
    run = simulate(PrefillSystem(name="fcfs", make_batching=lambda: ONE_BY_ONE), gaps, service)
    np.testing.assert_allclose(waits_of(run), waits_s(gaps, service), atol=1e-9)


def test_the_recursion_is_the_formula_within_two_percent():
    """Pollaczek-Khinchine, and the penalty against the same arrivals with the mean service time."""
    gaps, service = MIXED.drawn(4_000_000, seed=2)
    wait_s = waits_s(gaps, service).mean()
    uniform_s = waits_s(gaps, np.full_like(service, MIXED.mean_s)).mean()
    assert wait_s == pytest.approx(MIXED.wait_s, rel=0.02)
    assert uniform_s == pytest.approx(UNIFORM_WAIT_S, rel=0.02)
    assert wait_s - uniform_s == pytest.approx(MIXED.hol_penalty_s, rel=0.02)


def test_at_a_load_of_0_45_mean_and_interval_lie_within_two_percent_of_the_formula():
    """The point of the boundary table, whose interval must be as narrow as the claim is."""
    for found, formula in (
        (boundary.waits()[1], boundary.QUEUE.hol_penalty_s),
        (boundary.waits()[0], boundary.QUEUE.wait_s),
    ):
        mean, half = found.mean, found.half_width
        assert abs(mean - formula) + half < 0.02 * formula
    assert boundary.QUEUE.load == pytest.approx(0.45, abs=0.005)


def test_short_first_waits_as_two_priorities_do():
    """One request a step, no window: Cobham's formula, which the mean over both classes obeys for any order too."""
    gaps, service = MIXED.drawn(20_000, seed=3)
    wait = AdaptiveWait(WaitConfig(wait="off", slo_s=None), [1], lambda requests, tokens: 0.0)
    temporal = TemporalConfig(long_dispatch="single", max_long_wait_s=1e6)
    system = PrefillSystem(
        name="short-first",
        make_queue=lambda: ClassQueue(100),
        make_batching=lambda: TemporalDisaggregation(wait, temporal),
    )
    waits = waits_of(simulate(system, gaps, service))
    is_short = service < 0.1
    # Kleinrock: work is conserved, so the waits weighted by load equal those of first come, first served.
    fcfs = waits_s(gaps, service)
    assert (waits * service).sum() == pytest.approx((fcfs * service).sum(), rel=2e-3)
    short_s, long_s = priority_waits_s(MIXED)
    assert waits[is_short].mean() == pytest.approx(short_s, rel=0.05)
    assert waits[~is_short].mean() == pytest.approx(long_s, rel=0.05)


def test_an_overload_has_no_mean_wait():
    with pytest.raises(UserError, match="lower the rate"):
        TwoClasses(rate=20.0, short_share=0.7, short_s=0.02, long_s=0.2)
    with pytest.raises(UserError, match="short_s="):
        TwoClasses(rate=1.0, short_share=0.7, short_s=0.3, long_s=0.2)
