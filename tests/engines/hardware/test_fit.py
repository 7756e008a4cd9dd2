"""Constants of a roofline, fitted to timed steps."""

from dataclasses import replace
from itertools import product

import pytest
from support.own_cards import PLANTED, WORKS, timed_steps

from engines.errors import UserError
from engines.hardware.catalogue import H200, L40S, Gpu
from engines.hardware.fit import TimedStep, fit_steps, left_out
from engines.hardware.roofline import Calibration, Roofline


@pytest.mark.parametrize("card", [L40S, H200], ids=str)
@pytest.mark.parametrize("share", [0.3, 0.62, 1.0])
@pytest.mark.parametrize("bandwidth", [0.5, 0.81])
@pytest.mark.parametrize("overhead_s", [0.0, 3e-3])
def test_planted_constants_are_found(card, share, bandwidth, overhead_s):
    planted = {
        "matmul_efficiency": share,
        "attention_efficiency": share,
        "bandwidth_efficiency": bandwidth,
        "step_overhead_s": overhead_s,
    }
    steps = timed_steps(card, constants=planted)
    found = fit_steps(steps, card, "m.csv")
    assert found.fitted_on == ("12 steps of m.csv",)
    for name, value in planted.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6, abs=1e-9), name
    for step, seconds in zip(steps, left_out(steps, card, "m.csv"), strict=True):
        assert seconds == pytest.approx(step.seconds, rel=1e-6)


def errors(noise: float) -> tuple[float, float]:
    """Mean squared relative errors of the fit, and of each step by the others."""
    steps = timed_steps(L40S, noise)
    fitted = fit_steps(steps, L40S, "m.csv")
    own = [step.predicted_s(L40S, fitted) / step.seconds - 1 for step in steps]
    others = [told / step.seconds - 1 for step, told in zip(steps, left_out(steps, L40S, "m.csv"), strict=True)]
    return sum(e * e for e in own) / len(own), sum(e * e for e in others) / len(others)


def test_noise_raises_both_errors_and_that_of_the_steps_left_out_more():
    (none, none_out), (some, some_out), (more, more_out) = map(errors, (0.0, 0.02, 0.08))
    assert none < none_out + 1e-15 < 1e-12
    assert 1e-5 < some < more
    assert some < some_out < more_out
    assert more < more_out


def test_no_constants_nearby_have_a_smaller_error():
    steps = timed_steps(L40S, 0.1)
    best = fit_steps(steps, L40S, "m.csv")

    def loss(found: Calibration) -> float:
        return sum((step.predicted_s(L40S, found) / step.seconds - 1) ** 2 for step in steps)

    least = loss(best)
    for share, bandwidth, overhead in product((0.97, 0.999, 1.0, 1.001, 1.03), repeat=3):
        moved = replace(
            best,
            matmul_efficiency=best.matmul_efficiency * share,
            attention_efficiency=best.attention_efficiency * share,
            bandwidth_efficiency=best.bandwidth_efficiency * bandwidth,
            step_overhead_s=best.step_overhead_s * overhead,
        )
        assert loss(moved) >= least - 1e-12


def test_four_steps_are_fitted_and_each_is_told_by_the_three_others_where_they_can():
    kept = {WORKS[0], WORKS[3], WORKS[6], WORKS[10]}
    steps = [step for step in timed_steps(L40S) if step.work in kept]
    assert len(steps) == 4
    assert fit_steps(steps, L40S, "m.csv").matmul_efficiency == pytest.approx(PLANTED["matmul_efficiency"])
    told = left_out(steps, L40S, "m.csv")
    assert all(told is None or told == pytest.approx(step.seconds) for step, told in zip(steps, told, strict=True))
    with pytest.raises(UserError, match=r"m\.csv has 3 timed steps and three constants are fitted: time 4 or more"):
        fit_steps(steps[:3], L40S, "m.csv")


def bound_by_memory(card: Gpu) -> list[TimedStep]:
    """In all their parts."""
    steps = timed_steps(card)
    return [
        step
        for step in steps
        for roofline in [Roofline(step.shape, card)]
        if all(arithmetic < traffic for arithmetic, traffic in roofline.floors(step.work))
    ]


def test_steps_that_do_not_tell_a_constant_are_refused():
    by_memory = bound_by_memory(L40S)
    assert len(by_memory) >= 4
    with pytest.raises(UserError, match=r"none of the steps of m.csv is bound by arithmetic, .* time one of more rows"):
        fit_steps(by_memory, L40S, "m.csv")
    with pytest.raises(UserError, match="do not tell"):
        fit_steps([timed_steps(L40S)[6]] * 5, L40S, "m.csv")


def test_steps_faster_than_the_card_are_refused():
    fast = [replace(step, seconds=step.seconds / 4) for step in timed_steps(L40S)]
    with pytest.raises(UserError, match=r"m.csv has steps that take 2\.48 times the matrix peak of l40s"):
        fit_steps(fast, L40S, "m.csv")
