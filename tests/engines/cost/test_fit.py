"""Constants of a roofline, fitted to timed steps."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from support.own_cards import PLANTED, WORKS, timed_steps

from engines.cost import fit
from engines.cost.fit import TimedStep, fit_steps
from engines.cost.roofline import H200, L40S, Calibration, CardCalibration, Gpu, Roofline, StepWork
from engines.errors import UserError
from engines.least_squares import nonnegative_fit


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
    found, _, left_out = fit_steps(steps, card, "m.csv")
    assert found.fitted_on == ("12 steps of m.csv",)
    for name, value in planted.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6, abs=1e-9), name
    for step, seconds in zip(steps, left_out, strict=True):
        assert seconds == pytest.approx(step.seconds, rel=1e-6)


def errors(noise: float) -> tuple[float, float]:
    """Mean squared relative errors of the fit, and of each step by the others."""
    steps = timed_steps(L40S, noise)
    fitted, _, left_out = fit_steps(steps, L40S, "m.csv")
    own = [step.predicted_s(L40S, fitted) / step.seconds - 1 for step in steps]
    others = [told / step.seconds - 1 for step, told in zip(steps, left_out, strict=True)]
    return sum(e * e for e in own) / len(own), sum(e * e for e in others) / len(others)


def test_noise_raises_both_errors_and_that_of_the_steps_left_out_more():
    (none, none_out), (some, some_out), (more, more_out) = map(errors, (0.0, 0.02, 0.08))
    assert none < none_out + 1e-15 < 1e-12
    assert 1e-5 < some < more
    assert some < some_out < more_out
    assert more < more_out


def test_no_constants_nearby_have_a_smaller_error():
    steps = timed_steps(L40S, 0.1)
    best = fit_steps(steps, L40S, "m.csv").calibration

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
    found = fit_steps(steps, L40S, "m.csv")
    assert found.calibration.matmul_efficiency == pytest.approx(PLANTED["matmul_efficiency"])
    told = found.left_out
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


def test_a_share_that_no_step_tells_stays_the_datasheets():
    by_memory = bound_by_memory(L40S)
    assert len(by_memory) >= 4
    found = fit_steps(by_memory, L40S, "m.csv")
    assert found.datasheet_shares == ("arithmetic",)
    assert found.calibration.matmul_efficiency == found.calibration.attention_efficiency == 1.0
    assert found.calibration.bandwidth_efficiency == pytest.approx(PLANTED["bandwidth_efficiency"])
    assert found.calibration.note.endswith("; the matrix peak is the datasheet's")
    assert [*map(bool, found.left_out)] == [True] * len(by_memory)


def of_many_rows(**constants: float) -> list[TimedStep]:
    """Steps that are bound by arithmetic in all their parts, the first and every third of a new layout, every fourth a build."""
    shape = timed_steps(L40S)[0].shape
    planted = CardCalibration(gpu="l40s", fitted_on=(), note="", **{**PLANTED, **constants})
    works = [
        StepWork(rows, rows * 8192, rows, 8192, rows, 4, new_layout=int(n % 3 == 0), builds=int(n % 4 == 1))
        for n, rows in enumerate((2048, 2500, 3072, 4096, 6000, 8192, 10000, 16384))
    ]
    assert all(a > t for work in works for a, t in Roofline(shape, L40S).floors(work))
    return [
        TimedStep(
            name=str(work.query_rows),
            shape=shape,
            work=work,
            seconds=Roofline(shape, L40S, planted).step_time(work).total_s,
        )
        for work in works
    ]


def test_steps_of_a_processor_leave_the_bandwidth_and_tell_what_some_steps_take_besides():
    planted = {"layout_s": 2e-3, "build_s": 5e-3}
    found = fit_steps(of_many_rows(**planted), L40S, "m.csv")
    assert found.datasheet_shares == ("memory",)
    assert found.calibration.bandwidth_efficiency == 1.0
    assert found.free.kinds == ("layout_s", "build_s")
    for name, value in {**PLANTED, "bandwidth_efficiency": 1.0, **planted}.items():
        assert getattr(found.calibration, name) == pytest.approx(value, rel=1e-6), name
    none = fit_steps(of_many_rows(), L40S, "m.csv").calibration
    assert (none.layout_s, none.build_s) == pytest.approx((0.0, 0.0), abs=1e-9)


def test_kinds_that_steps_do_not_tell_apart_are_one():
    steps = of_many_rows(layout_s=2e-3)
    alike = [replace(step, work=step.work._replace(builds=step.work.new_layout)) for step in steps]
    assert fit_steps(alike, L40S, "m.csv").free.kinds == ("layout_s",)
    every = [replace(step, work=step.work._replace(builds=1)) for step in steps]
    assert fit_steps(every, L40S, "m.csv").free.kinds == ("layout_s",)  # the rest is every step's overhead
    assert fit_steps(steps[:4], L40S, "m.csv").free.kinds == ()


def test_no_case_is_better_than_the_best():
    """Cases that are left out because of their bound have no smaller loss."""
    steps = timed_steps(L40S, 0.1)
    timed, free = fit._Timed.of(steps, L40S), fit.FittedConstants(tuple(fit.SHARES), ())
    best = timed._loss(timed.best(free))
    for case in timed._cases(free):
        features = np.stack([*case.columns, np.ones(len(steps))], axis=1)
        *shares, overhead_s = nonnegative_fit(features, timed.seconds, known=case.known).tolist()
        assert timed._loss(fit._Constants(case.inverse(shares), overhead_s, {})) >= best


def test_steps_that_do_not_tell_the_constants_apart_are_refused():
    with pytest.raises(UserError, match="do not tell"):
        fit_steps([timed_steps(L40S)[6]] * 5, L40S, "m.csv")


def test_steps_faster_than_the_card_are_refused():
    fast = [replace(step, seconds=step.seconds / 4) for step in timed_steps(L40S)]
    with pytest.raises(UserError, match=r"m.csv has steps that take 2\.465 times the matrix peak of l40s"):
        fit_steps(fast, L40S, "m.csv")
