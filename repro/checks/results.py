"""Committed figures against the code, calibration, data and stated numbers of today: would they come out the same? What
needs no run is drawn again."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import isclose
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from engines.errors import UserError
from repro.checks.held import Held, read_held
from repro.reports import claims_file
from repro.reports.evidence import Source, sources
from repro.reports.figures import PAPERS, FigureEntry, Knobs, Rendered, View, default_reading, figure
from repro.reports.predictions import PREDICTIONS_OF, predictions_note, report_path
from repro.reports.stamp import changed_files, drawn_by, name_of, read_stamp, runs_of, stated
from repro.runs.cell import Cell
from repro.runs.experiment import Experiment, prepare
from repro.systems.platforms import platform

OTHER_FOLDERS = ("paper", "calibration", "local", "figures")
"""Folders of results that hold what was put in, or what this machine made."""
SUFFIXES = (".csv", ".md", ".txt", ".png", ".pdf")
"""Endings of a figure's own files."""

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
    command: str = "-"
    """Makes it again."""

    @property
    def is_fault(self) -> bool:
        return self.status in ("stale", "no stamp") or (self.status == "other code" and not self.is_measured)


class Today:
    """What cells would be run as today. Each is prepared once, whoever asks; ``advance`` is called after each."""

    def __init__(self, advance: Callable[[], None] = lambda: None, held: Held | None = None) -> None:
        self.held = held or Held()
        self._experiments: dict[str, Experiment] = {}
        self._sources: dict[tuple[str, Knobs], list[Source]] = {}
        self._advance = advance

    def experiment(self, cell: Cell) -> Experiment:
        if cell.key not in self._experiments:
            self._experiments[cell.key] = prepare(cell)
            self._advance()
        return self._experiments[cell.key]

    def codes(self, paper: str, platforms: Sequence[str] | None = None, charged: Knobs = ()) -> dict[str, str]:
        """Key of every run that decides a claim -> digest of the code that would make it."""
        chosen = [
            each for each in self.sources(paper, charged) if platforms is None or each.view.platform.name in platforms
        ]
        return {each.cell.key: each.code.digest for own in chosen for each in map(self.experiment, own.cells)}

    def sources(self, paper: str, charged: Knobs = ()) -> list[Source]:
        """``charged`` are what simulated steps are charged by."""
        if (paper, charged) not in self._sources:
            self._sources[paper, charged] = sources(PAPERS[paper].entries, charged=charged)
        return self._sources[paper, charged]

    def whole(self, paper: str) -> set[str]:
        """Names of all runs of a figure that has many, as rows of claims name them."""
        grids = [[self.experiment(cell).cell.key for cell in source.cells] for source in self.sources(paper)]
        return {name for keys in grids for name in claims_file.names_of(keys)}


def check_results(root: Path, today: Today | None = None) -> list[Checked]:
    """Every figure and table in the folders of platforms, by path."""
    today = today or Today(held=read_held(root))
    return [_check(path, today) for path in sorted(figures(root))]


def figures(root: Path) -> Iterator[Path]:
    """Path of each figure's stamp, whether it is there or not."""
    for folder in root.iterdir():
        if folder.is_dir() and folder.name not in OTHER_FOLDERS and not folder.name.startswith("."):
            drawn = (path for path in folder.iterdir() if path.suffix in SUFFIXES and not _is_of_a_script(path.name))
            yield from {path.with_suffix(".json") for path in drawn}


def _is_of_a_script(name: str) -> bool:
    """Whether the GPU suite left it, what holds composed steps against its runs, or a script of ``benchmarks``: nothing is drawn
    there, and like other files it is accepted."""
    return name in ("README.md", "verdict.md") or name.startswith(("composed-", "benchmark-"))


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
    entry, view = figure(stamp["figure"]), view_of(stamp)
    experiments = asked(stamp, today)
    status: Status
    if strange := _strange_file(stamp, path):
        status, reason = "stale", strange
    elif runs or experiments:
        status, reason = _compare(stamp, experiments, today.held)
    else:
        status, reason = _redraw(stamp, view, path.parent)
    return Checked(
        figure=stamp["figure"],
        path=path,
        status=status,
        is_measured=any(run["obtained"].startswith("measured") for run in runs),
        reason=reason,
        command=_command(entry, view, path.parent),
    )


def asked(stamp: Mapping[str, Any], today: Today) -> list[Experiment]:
    """What the figure of a stamp would run as today."""
    view = view_of(stamp)
    return [today.experiment(view.applied(cell)) for cell in figure(stamp["figure"]).load().cells(view)]


def _command(entry: FigureEntry, view: View, folder: Path) -> str:
    where = view.platform
    words = ["repro reproduce", entry.name, "--platform", where.name]
    if where.executor != platform(where.name).executor:
        words += ["--executor", where.executor]
    if view.reading != default_reading(where):
        words += ["--reading", view.reading]
    if view.accuracy != "usual":
        words += ["--accuracy", view.accuracy]
    if view.num_runs != entry.load().default_num_runs(where):
        words += ["--num-runs", str(view.num_runs)]
    words += [f"--request-rate {rate:g}" for rate in view.rates]
    words += [f"--{name.replace('_', '-')} {value}" for name, value in view.knobs]
    return " ".join([*words, "--out-dir", shlex.quote(os.path.relpath(folder))])


def view_of(stamp: Mapping[str, Any]) -> View:
    """What was asked of the figure."""
    if stamp["executor"] not in ("torch", "roofline"):
        raise ValueError(f"executor={stamp['executor']!r}")
    return View(
        platform=replace(platform(stamp["platform"]), executor=stamp["executor"]),
        reading=stamp["reading"],
        accuracy=stamp.get("accuracy", "usual"),
        num_runs=stamp["num_runs"],
        knobs=tuple(stamp["knobs"].items()),
        rates=tuple(stamp["rates"]),
    )


def _strange_file(stamp: Mapping[str, Any], path: Path) -> str | None:
    if changed := changed_files(stamp, path.parent):
        return f"{changed[0]} is not as it was drawn"
    unknown = {other.name for other in path.parent.glob(f"{path.stem}.*")} - {path.name, *stamp["files"]}
    return f"{min(unknown)} was not drawn with it" if unknown else None


def _redraw(stamp: Mapping[str, Any], view: View, folder: Path) -> tuple[Status, str]:
    """Whether a figure of arithmetic alone, which any machine draws again, comes out the same: its numbers and words, as
    libraries decide the picture."""
    with TemporaryDirectory() as place:
        rendered = figure(stamp["figure"]).load().render([], view, Path(place))
        if differs := other_words(folder, rendered):
            return "stale", differs
    if list(rendered.notes) != stamp["notes"]:
        return "stale", "its notes are not those that it is drawn with now"
    return "same", "no runs, drawn again"


def other_words(folder: Path, rendered: Rendered) -> str | None:
    """What the files there and those drawn now have otherwise; None where nothing but pictures."""
    for made in rendered.files:
        if made.suffix in (".csv", ".md", ".txt") and (lines := _other_line(folder / made.name, made)):
            return f"{made.name} has {lines[0]!r}, where it is drawn now with {lines[1]!r}"
    return None


def _other_line(committed: Path, made: Path) -> tuple[str, str] | None:
    """The first line that differs, as it is there and as it is now."""
    there, now = (path.read_text("utf-8").splitlines() if path.is_file() else [] for path in (committed, made))
    return next((pair for pair in zip_longest(there, now, fillvalue="") if not is_alike(*pair)), None)


def is_alike(there: str, now: str) -> bool:
    """The same words and numbers, up to the last places in which processors differ."""
    pairs = zip_longest(_NUMBER.split(there), _NUMBER.split(now), fillvalue="")
    return all(a == b or (_is_number(a) and _is_number(b) and isclose(float(a), float(b))) for a, b in pairs)


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


_NUMBER = re.compile(r"(-?\d+\.\d+(?:e[-+]?\d+)?)")


def _compare(stamp: Mapping[str, Any], experiments: Sequence[Experiment], held: Held) -> tuple[Status, str]:
    today = {experiment.cell.folder_name: experiment for experiment in experiments}
    status, reason = _compare_runs(stamp, today, held)
    if status == "stale":
        return status, reason
    card = platform(stamp["platform"]).gpu
    quoted = [note for note in stamp["notes"] if note.startswith(PREDICTIONS_OF)]
    if card is not None and any(note != predictions_note(card) for note in quoted):
        return "stale", f"its notes quote another report than {report_path(card).name}"
    if status == "same" and not held.is_same(stamp["drawn_by"], drawn_by(figure(stamp["figure"]).module)):
        return "other code", "it was drawn by other code"
    if status == "same" and stamp["stated"] != stated(stamp["figure"].partition("/")[0]):
        return "other code", "the paper's numbers in it may be others than results/paper has"
    return status, reason


def _compare_runs(stamp: Mapping[str, Any], today: Mapping[str, Experiment], held: Held) -> tuple[Status, str]:
    if "folders" in stamp:
        if stamp["folders"] != name_of(today):
            return "stale", f"its runs are not the {len(today)} of today's data, calibration and settings"
    else:
        drawn = {run["folder"] for run in stamp["runs"]}
        if missing := sorted(today.keys() - drawn):
            return (
                "stale",
                f"{len(missing)} of {len(today)} runs are of other data, calibration or settings: {missing[0]}",
            )
        if extra := sorted(drawn - today.keys()):
            return "stale", f"{len(extra)} runs are no longer asked for: {extra[0]}"
    if "folders" in stamp and "each" not in stamp:
        return "stale", "it does not say what became of each of its runs"
    runs = runs_of(stamp, today)
    pairs = Counter((runs[name]["code"], experiment.code.digest) for name, experiment in today.items())
    if others := sum(num for pair, num in pairs.items() if not held.is_same(*pair)):
        return "other code", f"{others} of {len(today)} runs were made by other code"
    return "same", f"{len(today)} runs{held.told(pairs)}"
