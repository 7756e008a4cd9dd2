"""The code that a sweep's runs need, gathered in one folder, to be sent to machines that have no checkout."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from repro.paths import CALIBRATION, DATASETS, IS_INSTALLED, PAPER
from repro.runs.code import PACKAGES, spec_of
from repro.runs.experiment import Experiment

_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def gather(experiments: Iterable[Experiment], folder: Path) -> None:
    """Fill ``folder``, which goes in front of a worker's ``sys.path``: the packages that decide numbers, with the data
    beside them, laid out as a wheel is (repro/paths.py); and those that plug-ins lie in."""
    for package in sorted(PACKAGES | plugged_in(experiments)):
        for source in _sources(package):
            if source.is_dir():
                shutil.copytree(source, folder / package, ignore=_LEFT_OUT, dirs_exist_ok=True)
            else:
                shutil.copy2(source, folder)
    if not IS_INSTALLED:
        for source, name in ((DATASETS, "datasets"), (PAPER, "results/paper"), (CALIBRATION, "results/calibration")):
            shutil.copytree(source, folder / "repro" / "data" / name, ignore=_LEFT_OUT)


def plugged_in(experiments: Iterable[Experiment]) -> frozenset[str]:
    """Packages that are none of ours, which the experiments name or what they name imports."""
    return frozenset().union(*(experiment.plugged_in for experiment in experiments))


def _sources(package: str) -> Iterator[Path]:
    """Its folders, several where it is spread over ``sys.path``; or the file that it is."""
    spec = spec_of(package)
    if spec is None:
        return
    if spec.submodule_search_locations is not None:
        yield from map(Path, spec.submodule_search_locations)
    elif spec.origin is not None and Path(spec.origin).is_file():
        yield Path(spec.origin)
