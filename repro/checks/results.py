"""Committed figures against the code, calibration and data of today: would they come out the same?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from repro.reports.figures import View, figure
from repro.reports.stamp import changed_files, read_stamp
from repro.runs.experiment import Experiment, prepare_all
from repro.systems.platforms import platform

Status = Literal["same", "other code", "stale", "no stamp"]


@dataclass(frozen=True, kw_only=True)
class Checked:
    """``stale``: other data, calibration or settings, or files that were changed by hand. ``other code`` is a fault of
    simulated figures, which any machine can draw again; measured ones stay true of the code that they name. ``no
    stamp``: nothing says what the figure rests on."""

    figure: str
    path: Path
    status: Status
    is_measured: bool
    reason: str

    @property
    def is_fault(self) -> bool:
        return self.status in ("stale", "no stamp") or (self.status == "other code" and not self.is_measured)


def check_results(root: Path) -> list[Checked]:
    """Every figure and table in the folders of platforms, by path."""
    return [_check(path) for path in sorted(_figures(root))]


def _figures(root: Path) -> Iterator[Path]:
    """Where the stamp of each is, or should be."""
    for path in root.glob("*/*.csv"):
        if path.with_suffix(".pdf").is_file() or path.with_suffix(".md").is_file():
            yield path.with_suffix(".json")


def _check(path: Path) -> Checked:
    if not path.is_file():
        reason = "nothing says what it was drawn from"
        return Checked(figure=path.stem, path=path, status="no stamp", is_measured=False, reason=reason)
    stamp = read_stamp(path)
    experiments = _experiments(stamp)
    runs: Sequence[Mapping[str, Any]] = stamp["runs"]
    status, reason = _compare(stamp, runs, experiments, path.parent)
    return Checked(
        figure=stamp["figure"],
        path=path,
        status=status,
        is_measured=any(run["obtained"].startswith("measured") for run in runs),
        reason=reason,
    )


def _experiments(stamp: Mapping[str, Any]) -> list[Experiment]:
    """What the figure would be drawn from today."""
    where = replace(platform(stamp["platform"]), executor=stamp["executor"])
    view = View(
        platform=where,
        reading=stamp["reading"],
        num_runs=stamp["num_runs"],
        knobs=tuple(stamp["knobs"].items()),
        rates=tuple(stamp["rates"]),
    )
    return prepare_all(view.applied(cell) for cell in figure(stamp["figure"]).load().cells(view))


def _compare(
    stamp: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], experiments: Sequence[Experiment], folder: Path
) -> tuple[Status, str]:
    if changed := changed_files(stamp, folder):
        return "stale", f"{changed[0]} is not as it was drawn"
    drawn = {run["folder"]: run["code"] for run in runs}
    asked = {experiment.cell.folder_name: experiment for experiment in experiments}
    if missing := sorted(asked.keys() - drawn.keys()):
        return "stale", f"{len(missing)} of {len(asked)} runs are of other data, calibration or settings: {missing[0]}"
    if extra := sorted(drawn.keys() - asked.keys()):
        return "stale", f"{len(extra)} runs are no longer asked for: {extra[0]}"
    others = sum(asked[name].code.digest != code for name, code in drawn.items())
    if others:
        return "other code", f"{others} of {len(drawn)} runs were made by other code"
    return "same", f"{len(drawn)} runs"
