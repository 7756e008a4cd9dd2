"""Committed figures, calibration reports and claims against the code, calibration and data of today: would they come out
the same?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from engines.errors import UserError
from repro.reports import claims_file
from repro.reports.evidence import sources
from repro.reports.figures import PAPERS, View, figure
from repro.reports.fitting import PROTOCOLS
from repro.reports.predictions import PREDICTIONS_OF, medians, predictions_note, read_report, report_path
from repro.reports.stamp import changed_files, name_of, read_stamp
from repro.runs.cell import Cell
from repro.runs.experiment import Experiment, prepare
from repro.systems.calibration import load_calibration
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


class Today:
    """What cells would be run as today. Each is prepared once, whoever asks; ``advance`` is called after each."""

    def __init__(self, advance: Callable[[], None] = lambda: None) -> None:
        self._experiments: dict[str, Experiment] = {}
        self._advance = advance

    def experiment(self, cell: Cell) -> Experiment:
        if cell.key not in self._experiments:
            self._experiments[cell.key] = prepare(cell)
            self._advance()
        return self._experiments[cell.key]

    def codes(self, paper: str, platforms: Sequence[str] | None = None) -> dict[str, str]:
        """Key of every run that decides a claim -> digest of the code that would make it."""
        cells = [cell for source in sources(PAPERS[paper].entries, platforms) for cell in source.cells]
        return {each.cell.key: each.code.digest for each in map(self.experiment, cells)}

    def whole(self, paper: str) -> set[str]:
        """Names of all runs of a figure that has many, as rows of claims name them."""
        grids = [[self.experiment(cell).cell.key for cell in source.cells] for source in sources(PAPERS[paper].entries)]
        return {name for keys in grids for name in claims_file.names_of(keys)}


def check_results(root: Path, today: Today | None = None) -> list[Checked]:
    """Every figure and table in the folders of platforms, by path."""
    today = today or Today()
    return [_check(path, today) for path in sorted(_figures(root))]


def check_reports(today: Today | None = None) -> list[Checked]:
    """The report of every calibrated card: of the stored constants, of runs that would be made today, and its medians
    those of its own comparisons."""
    today = today or Today()
    return [_check_report(card, today) for card in PROTOCOLS]


def check_claims(root: Path, today: Today | None = None) -> list[Checked]:
    """Every ``claims-PAPER.csv`` below ``root``: of runs that would be made today, by today's code."""
    today, paths = today or Today(), {paper: root / f"claims-{paper}.csv" for paper in PAPERS}
    return [_check_claims(paper, path, today) for paper, path in paths.items() if path.is_file()]


def _check_report(card: str, today: Today) -> Checked:
    path = report_path(card)

    def checked(status: Status, reason: str) -> Checked:
        return Checked(figure="calibration", path=path, status=status, is_measured=False, reason=reason)

    try:
        report = read_report(card)
    except UserError as error:
        return checked("stale", str(error))
    if report is None:
        return checked("stale", "no report is stored")
    if report["calibration"] != _plain(asdict(load_calibration(card))):
        return checked("stale", "the constants are not the stored ones")
    if report["medians"] != medians(report["comparisons"]):
        return checked("stale", "the medians are not those of its comparisons")
    runs = {key for each in report["comparisons"] for key in each["runs"]}
    codes = today.codes("dllm-serve", (card,))
    if unknown := sorted(runs - codes.keys()):
        return checked(
            "stale", f"{len(unknown)} of {len(runs)} runs are of other data, calibration or settings: {unknown[0]}"
        )
    if others := {code for each in report["comparisons"] for code in each["code"]} - set(codes.values()):
        return checked("other code", f"runs were made by other code: {sorted(others)[0]}")
    return checked("same", f"{len(runs)} runs")


def _check_claims(paper: str, path: Path, today: Today) -> Checked:
    def checked(status: Status, reason: str) -> Checked:
        return Checked(figure="claims", path=path, status=status, is_measured=False, reason=reason)

    try:
        rows = claims_file.read(path)
    except UserError as error:
        return checked("stale", str(error))
    runs = {key: row for row in rows for key in row["runs"].split()}
    codes = today.codes(paper)
    if unknown := sorted(runs.keys() - codes.keys() - today.whole(paper)):
        claim = runs[unknown[0]]["id"]
        return checked(
            "stale",
            f"{len(unknown)} of {len(runs)} runs are of other data, calibration or settings: {unknown[0]} of {claim}",
        )
    made_by = {code for row in rows if row["obtained"].startswith("simulated") for code in row["code"].split()}
    if others := made_by - set(codes.values()):
        return checked("other code", f"runs were made by other code: {sorted(others)[0]}")
    return checked("same", f"{len(rows)} claims, {len(runs)} runs")


def _plain(value: Any) -> Any:
    """The value as JSON gives it back."""
    return json.loads(json.dumps(value))


def _figures(root: Path) -> Iterator[Path]:
    """Path of each figure's stamp, whether it is there or not."""
    for path in root.glob("*/*.csv"):
        if path.with_suffix(".pdf").is_file() or path.with_suffix(".md").is_file():
            yield path.with_suffix(".json")


def _check(path: Path, today: Today) -> Checked:
    if not path.is_file():
        reason = "nothing says what it was drawn from"
        return Checked(figure=path.stem, path=path, status="no stamp", is_measured=False, reason=reason)
    try:
        return _check_stamp(path, read_stamp(path), today)
    except UserError as error:
        reason = str(error)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"what it says of itself cannot be used ({type(error).__name__}: {error})"
    return Checked(figure=path.stem, path=path, status="stale", is_measured=False, reason=reason)


def _check_stamp(path: Path, stamp: Mapping[str, Any], today: Today) -> Checked:
    runs: Sequence[Mapping[str, Any]] = stamp["runs"]
    status, reason = _compare(stamp, runs, _experiments(stamp, today), path.parent)
    return Checked(
        figure=stamp["figure"],
        path=path,
        status=status,
        is_measured=any(run["obtained"].startswith("measured") for run in runs),
        reason=reason,
    )


def _experiments(stamp: Mapping[str, Any], today: Today) -> list[Experiment]:
    """What the figure would be drawn from."""
    if stamp["executor"] not in ("torch", "roofline"):
        raise ValueError(f"executor={stamp['executor']!r}")
    where = replace(platform(stamp["platform"]), executor=stamp["executor"])
    view = View(
        platform=where,
        reading=stamp["reading"],
        num_runs=stamp["num_runs"],
        knobs=tuple(stamp["knobs"].items()),
        rates=tuple(stamp["rates"]),
    )
    return [today.experiment(view.applied(cell)) for cell in figure(stamp["figure"]).load().cells(view)]


def _compare(
    stamp: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], experiments: Sequence[Experiment], folder: Path
) -> tuple[Status, str]:
    if changed := changed_files(stamp, folder):
        return "stale", f"{changed[0]} is not as it was drawn"
    asked = {experiment.cell.folder_name: experiment for experiment in experiments}
    if "folders" in stamp:
        return _compare_many(stamp["folders"], runs, asked)
    drawn = {run["folder"]: run["code"] for run in runs}
    if missing := sorted(asked.keys() - drawn.keys()):
        return "stale", f"{len(missing)} of {len(asked)} runs are of other data, calibration or settings: {missing[0]}"
    if extra := sorted(drawn.keys() - asked.keys()):
        return "stale", f"{len(extra)} runs are no longer asked for: {extra[0]}"
    card = platform(stamp["platform"]).gpu
    quoted = [note for note in stamp["notes"] if note.startswith(PREDICTIONS_OF)]
    if card is not None and any(note != predictions_note(card) for note in quoted):
        return "stale", f"its notes quote another report than {report_path(card).name}"
    others = sum(asked[name].code.digest != code for name, code in drawn.items())
    if others:
        return "other code", f"{others} of {len(drawn)} runs were made by other code"
    return "same", f"{len(drawn)} runs"


def _compare_many(
    name: str, groups: Sequence[Mapping[str, Any]], asked: Mapping[str, Experiment]
) -> tuple[Status, str]:
    if name != name_of(asked):
        return "stale", f"its runs are not the {len(asked)} of today's data, calibration and settings"
    codes = {experiment.code.digest for experiment in asked.values()}
    others = sum(group["count"] for group in groups if group["code"] not in codes)
    if others:
        return "other code", f"{others} of {len(asked)} runs were made by other code"
    return "same", f"{len(asked)} runs"
