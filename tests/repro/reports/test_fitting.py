"""Fitting a card's constants: the root finder, and a fit that recovers constants it was made from."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.cost.roofline import Calibration
from engines.errors import UserError
from repro.paths import CALIBRATION
from repro.reports.claims import load_claims
from repro.reports.fitting import BANDWIDTH_EFFICIENCY, PROTOCOLS, STEP_OVERHEAD_S, find_root, fit, protocol_of

STATED = {claim.id: claim.expected.value for claim in load_claims("dllm-serve")}


@given(root=st.floats(-3, 3), scale=st.floats(0.2, 5), bend=st.floats(0, 0.3))
def test_root_of_a_rising_function(root, scale, bend):
    def f(x: float) -> float:
        return scale * ((x - root) + bend * math.tanh(x - root))

    assert abs(f(find_root(f, 0.0, slope=1.0, name="x"))) < 1e-3


def test_a_root_out_of_range_is_the_bound():
    assert find_root(lambda x: x - 9, 0.5, slope=1.0, high=1.0, name="x") == 1.0


def test_what_never_settles_is_refused():
    with pytest.raises(UserError, match="share of peak does not settle"):
        find_root(lambda x: 1.0 if x < 0 else -1.0, 0.5, slope=1.0, name="share of peak")


@pytest.mark.parametrize("card", PROTOCOLS)
def test_fitted_cells_are_stated_numbers(card):
    protocol = protocol_of(card)
    assert all(isinstance(STATED[claim], float | int) for claim in protocol.targets)
    assert all(claim.startswith("dllm-") and "fast" not in claim for claim in protocol.targets)


def made(card: str, share: float) -> Callable[[str, Calibration], float]:
    """Stated throughput where the share is this, and a smooth response around it."""

    def simulate(claim: str, calibration: Calibration) -> float:
        return float(STATED[claim]) * (calibration.matmul_efficiency / share) ** 0.9

    return simulate


@pytest.mark.parametrize("card", PROTOCOLS)
@pytest.mark.parametrize("share", [0.3, 0.58, 0.9])
def test_a_fit_recovers_what_made_the_numbers(card, share):
    runs = []
    calibration = fit(PROTOCOLS[card], on_run=lambda: runs.append(1), simulate=made(card, share))
    assert calibration.matmul_efficiency == calibration.attention_efficiency == pytest.approx(share, rel=2e-3)
    assert calibration.step_overhead_s == STEP_OVERHEAD_S
    assert len(calibration.fitted_on) == len(PROTOCOLS[card].targets)
    assert 0 < len(runs) < 40


def test_a_share_above_the_peak_is_the_peak():
    assert fit(PROTOCOLS["l40s"], simulate=made("l40s", 1.4)).matmul_efficiency == 1


def test_stored_calibrations_have_one_constant_and_one_overhead():
    """Whatever is fitted is on the system under test, so that every baseline is a prediction."""
    for card in PROTOCOLS:
        stored = Calibration.load(CALIBRATION / f"{card}.json")
        assert all(cell.startswith("dllm-serve on ") for cell in stored.fitted_on)
        assert (stored.bandwidth_efficiency, stored.step_overhead_s) == (BANDWIDTH_EFFICIENCY, STEP_OVERHEAD_S)
        assert stored.matmul_efficiency == stored.attention_efficiency


def test_a_card_without_stated_cells_is_refused():
    with pytest.raises(UserError, match="platform='h200' has no stated cell to fit"):
        protocol_of("h200")
