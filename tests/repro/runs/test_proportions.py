from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.runs.proportions import discordance, wilson_interval


def test_wilson_interval() -> None:
    low, high = wilson_interval(90, 100)
    assert (low, high) == (pytest.approx(0.8256, abs=1e-4), pytest.approx(0.9448, abs=1e-4))
    assert wilson_interval(0, 10)[0] == 0.0
    assert wilson_interval(10, 10)[1] == pytest.approx(1.0)


@given(n=st.integers(1, 2000), data=st.data())
def test_wilson_interval_holds_the_share_and_mirrors(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    low, high = wilson_interval(k, n)
    assert 0 <= low <= k / n + 1e-12
    assert k / n - 1e-12 <= high <= 1
    assert wilson_interval(n - k, n) == (pytest.approx(1 - high), pytest.approx(1 - low))


def test_discordance_counts_pairs() -> None:
    found = discordance([True, True, False, False, True], [True, False, True, False, False])
    assert (found.n, found.only_first, found.only_second) == (5, 2, 1)
    assert found.p_value == 1.0
    with pytest.raises(ValueError, match="zip"):
        discordance([True], [])


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (3, 3), (9, 1), (0, 8), (2, 5)])
def test_mcnemar_is_the_two_sided_coin(first: int, second: int) -> None:
    """By enumerating every outcome of the discordant problems."""
    found = discordance([True] * first + [False] * second, [False] * first + [True] * second)
    n = first + second
    extreme = sum(min(sum(coins), n - sum(coins)) <= min(first, second) for coins in product((0, 1), repeat=n))
    assert found.p_value == pytest.approx(extreme / 2**n)
    assert discordance([False] * 4, [False] * 4).p_value == 1.0
