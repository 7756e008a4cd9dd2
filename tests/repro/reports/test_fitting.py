"""Fitting a card's constants: the root finder, and a fit that recovers constants it was made from."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import UserError
from engines.hardware.roofline import Calibration
from repro.reports.fitting import PROTOCOLS, FittedCell, find_root, fit, protocol_of
from repro.reports.paper import load_claims

STATED = {claim.id: claim.expected.value for claim in load_claims("dllm-serve")}


@given(root=st.floats(-3, 3), scale=st.floats(0.2, 5), bend=st.floats(0, 0.3))
def test_root_of_a_rising_function(root: float, scale: float, bend: float) -> None:
    def f(x: float) -> float:
        return scale * ((x - root) + bend * math.tanh(x - root))

    assert abs(f(find_root(f, 0.0, slope=1.0, name="x"))) < 1e-3


def test_a_root_out_of_range_is_the_bound() -> None:
    assert find_root(lambda x: x + 1, 0.5, slope=1.0, low=0.0, name="x") == 0.0
    assert find_root(lambda x: x - 9, 0.5, slope=1.0, high=1.0, name="x") == 1.0


def test_what_never_settles_is_refused() -> None:
    with pytest.raises(UserError, match="share of peak does not settle"):
        find_root(lambda x: 1.0 if x < 0 else -1.0, 0.5, slope=1.0, name="share of peak")


@pytest.mark.parametrize("card", PROTOCOLS)
def test_fitted_cells_are_stated_numbers(card: str) -> None:
    protocol = protocol_of(card)
    assert all(isinstance(STATED[claim], float | int) for claim in protocol.claims)
    assert {cell.system for cell in protocol.engine} == {"dllm-serve"}
    assert {cell.system for cell in protocol.upstream} == {"fast-dllm"}


def made(card: str, share: float, overhead: float) -> Callable[[FittedCell, Calibration], float]:
    """Stated throughput where the constants are these, and a smooth response around them."""

    def simulate(cell: FittedCell, calibration: Calibration) -> float:
        stated = float(STATED[cell.claim])  # type: ignore[arg-type]
        own = calibration.matmul_efficiency / share
        if cell.system == "dllm-serve":
            return stated * own**0.9
        return stated * own * 0.05 / (0.05 + calibration.upstream_step_overhead_s - overhead)

    return simulate


@pytest.mark.parametrize("card", PROTOCOLS)
@pytest.mark.parametrize(("share", "overhead"), [(0.3, 0.004), (0.58, 0.0007), (0.9, 0.02)])
def test_a_fit_recovers_what_made_the_numbers(card: str, share: float, overhead: float) -> None:
    runs = []
    calibration = fit(PROTOCOLS[card], on_run=lambda: runs.append(1), simulate=made(card, share, overhead))
    assert calibration.matmul_efficiency == calibration.attention_efficiency == pytest.approx(share, rel=2e-3)
    assert calibration.upstream_step_overhead_s == pytest.approx(overhead, abs=2e-4)
    assert len(calibration.fitted_on) == len(PROTOCOLS[card].engine) + len(PROTOCOLS[card].upstream)
    assert 0 < len(runs) < 60


def test_an_overhead_below_zero_is_none() -> None:
    calibration = fit(PROTOCOLS["l40s"], simulate=made("l40s", 0.4, -0.01))
    assert calibration.upstream_step_overhead_s == 0


def test_a_card_without_stated_cells_is_refused() -> None:
    with pytest.raises(UserError, match="platform='h200' has no stated cell to fit"):
        protocol_of("h200")
