"""Least squares without a library: as exact as one, and the same bits where a library's differ."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.least_squares import dot, least_squares, reduced
from repro.paths import REPO

FITTED = """
from engines.ampd.performance import SimulatedProfile
from engines.ampd.performance import profile
from engines.cluster.hardware import Hardware
from engines.cluster.hardware import PHYSICAL
from engines.cost.roofline import H20, H200
from engines.laps.cluster import PrefillCost
from engines.laps.latency import StepModel
from engines.models.shape import QWEN2_5_14B, QWEN3_32B
hardware = Hardware(shape=QWEN3_32B, gpu=H20, constants=PHYSICAL)
made = [profile(SimulatedProfile(hardware=hardware, link=hardware.links.intra), (4,)),
        StepModel.profile(PrefillCost(QWEN2_5_14B, H200))]
"""


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 25))
def test_it_is_what_a_library_finds(seed, num_columns, num_rows):
    """Also where columns are sums of others, or empty, or fewer measurements than columns: the shortest of the best."""
    rng = np.random.default_rng(seed)
    features = rng.random((num_rows, num_columns)) * 10.0 ** rng.integers(-6, 6, num_columns)
    if seed % 3 == 0:
        features[:, -1] = 3 * features[:, 0]
    if seed % 7 == 0:
        features[:, 0] = 0.0
    norms = np.linalg.norm(features, axis=0)
    norms[norms == 0] = 1.0
    due = np.linalg.lstsq(features / norms, np.ones(num_rows), rcond=1e-12)[0]
    found = np.array(least_squares(features.T.tolist(), [1.0] * num_rows)) * norms
    # Two columns that are nearly one leave the digits that they differ by.
    worst = np.linalg.cond(features / norms)
    tolerance = 1e-9 if worst < 1e4 or worst > 1e13 else 1e-2
    assert found == pytest.approx(due, rel=tolerance, abs=tolerance * max(1.0, float(np.abs(due).max())))


def test_what_is_reduced_has_the_same_least_squares():
    columns = [[1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 5.0], [1.0, 4.0, 9.0, 25.0]]
    target = [2.0, 1.0, 4.0, 3.0]
    made = reduced(columns, target)
    for chosen in ((0,), (0, 1), (1, 2), (0, 1, 2)):
        whole = least_squares([columns[i] for i in chosen], target)
        assert least_squares([made.columns[i] for i in chosen], made.target) == pytest.approx(whole)
        missed = [
            sum(x * columns[i][row] for x, i in zip(whole, chosen, strict=True)) - target[row] for row in range(4)
        ]
        short = [
            sum(x * made.columns[i][row] for x, i in zip(whole, chosen, strict=True)) - made.target[row]
            for row in range(3)
        ]
        assert dot(short, short) + made.rest == pytest.approx(dot(missed, missed))


def test_what_simulations_are_fitted_to_is_the_same_on_another_kind_of_cpu():
    """The environment of an older machine: other kernels of the library of linear algebra, and numpy without its newer instructions."""
    here: dict[str, object] = {}
    exec(FITTED, here)
    older = {"OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512_SKX X86_V3 X86_V4"}
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{FITTED}\nprint(repr(made))"],
        cwd=REPO,
        env={**os.environ, **older},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said == f"{here['made']!r}\n"
