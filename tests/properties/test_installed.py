"""The test tools are those that a card runs: the triton of the torch that is installed."""

import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
TRITON_OF_TORCH = {"2.11.0": "3.6.0", "2.13.0": "3.7.1"}
"""What a CUDA build requires, by its release; a CPU build's metadata names none. From ``Requires-Dist`` of PyPI's wheels."""


def asked_by_torch() -> str:
    for line in requires("torch") or ():
        found = re.match(r"triton==([0-9.]+)", line.replace(" ", ""))
        if found is not None:
            return found[1]
    release = version("torch").partition("+")[0]
    assert release in TRITON_OF_TORCH, f"torch {release} is new here: add the triton that its CUDA build requires"
    return TRITON_OF_TORCH[release]


def test_kernels_are_tested_in_the_triton_that_the_installed_torch_asks_for():
    try:
        found = version("triton")
    except PackageNotFoundError:
        pytest.skip("triton is not installed")
    assert found == asked_by_torch(), f"pip install triton=={asked_by_torch()}"


def test_the_test_tools_name_the_triton_of_the_makefile_s_torch():
    torch = re.search(r"^TORCH_RELEASE := torch==(\S+)$", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    triton = re.search(r'"triton==([0-9.]+);', (REPO / "pyproject.toml").read_text(encoding="utf-8"))
    assert torch is not None
    assert triton is not None
    assert triton[1] == TRITON_OF_TORCH[torch[1]]
