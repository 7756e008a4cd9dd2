"""What is installed, pinned and packed: the triton of torch, the lock file, the version, the files of a wheel."""

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import repro

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


PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_lock_pins_what_the_project_asks_for():
    lines = (REPO / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pinned = {
        canonicalize_name(name): release for name, _, release in (line.partition("==") for line in lines) if release
    }
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [
        *PROJECT["project"]["dependencies"],
        *(each for name in ("server", "http", "redis", "dev") for each in extras[name]),
    ]
    found = {
        canonicalize_name(each.name): each
        for each in map(Requirement, asked)
        if each.name != PROJECT["project"]["name"]
    }
    assert [name for name, each in found.items() if pinned.get(name, "0") not in each.specifier] == []
    assert f"TORCH_RELEASE := torch=={pinned['torch']}\n" in (REPO / "Makefile").read_text(encoding="utf-8")


def test_there_is_one_version():
    cited = yaml.safe_load((REPO / "CITATION.cff").read_text(encoding="utf-8"))
    told = re.search(r"^## ([0-9.]+) \((.+)\)$", (REPO / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert told is not None
    assert (PROJECT["project"]["version"], str(cited["date-released"])) == told.groups()
    assert {cited["version"], repro.__version__} == {PROJECT["project"]["version"]}


def test_a_wheel_brings_every_file_of_the_packages():
    """The patterns of package data know them, and setup.py the folders that lie beside."""
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    listed = subprocess.run(
        ["git", "ls-files", "repro", "engines", "baselines", "paper_figures"], cwd=REPO, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("no checkout, or no git")
    files = [path for path in map(Path, listed.stdout.splitlines()) if path.suffix != ".py"]
    assert len(files) > 50
    assert [str(path) for path in files if not any(fnmatch(path.name, pattern) for pattern in patterns)] == []
