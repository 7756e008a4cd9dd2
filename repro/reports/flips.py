"""Finds verdicts that depend on one of our choices: runs changed cells, and judges the claims again under each change.

``python -m repro.reports.flips PAPER RUNS [FOLDER]`` changes every free setting and every reading of ``results/paper/flips.yaml``, one
at a time, makes the runs below RUNS, and writes FOLDER/flips-PAPER.csv. Both sides have the arrivals and lengths of one seed."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from engines.errors import UserError, require
from engines.knobs import knobs_of
from repro.files import file_cache, replace_text
from repro.paths import LOCAL_FIGURES, PAPER
from repro.reports.claims import COMPARED, Claim, Flip, FlipKind, Verdict, judge_all, read_claims
from repro.reports.claims_file import flips_csv, flips_path
from repro.reports.evidence import FigureSource, sources
from repro.reports.figures import PAPERS, Paper
from repro.reports.run_table import places_read
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.store import Store, StoredRun
from repro.runs.sweep import Sweep
from repro.runs.system import TUNE, Setting, free_of, settings_of

MakeRuns = Callable[[Sequence[Cell]], Sequence[StoredRun]]
Drawn = Sequence[tuple[FigureSource, Sequence[StoredRun]]]
"""Figures, each with the runs of its cells."""


@file_cache(maxsize=1)
def spec() -> dict[str, Any]:
    """The content of ``flips.yaml``: the readings, and the size of each paper's figures."""
    content: dict[str, Any] = yaml.safe_load((PAPER / "flips.yaml").read_text(encoding="utf-8"))
    return content


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """One changed choice: a setting of one system, or a reading, which changes every system that has the setting."""

    setting: Setting
    system: str | None = None

    @property
    def kind(self) -> FlipKind:
        return "reading" if self.system is None else "free"

    @property
    def text(self) -> str:
        knobs = " ".join(f"{name}={value}" for name, value in self.setting)
        return knobs if self.system is None else f"{self.system}: {knobs}"

    def of(self, cell: Cell) -> Cell:
        """The changed cell. Returns the cell itself if it has no such choice, searches or sets it itself, or refuses it."""
        setting = dict(self.setting)
        if self.system is None:
            applies = setting.keys() <= {name for kind in settings_of(cell.system) for name in knobs_of(kind)}
            if "shared_len" not in cell.knob_values:
                setting = {name: value for name, value in setting.items() if name not in spec()["assumed_lengths"]}
        else:
            searches = "search" in (cell.knob_values.get("deployment"), cell.knob_values.get(TUNE))
            applies = self.system == cell.system and not searches and self.setting in free_settings(cell)
        if not applies:
            return cell
        changed = replace(cell, knobs=tuple({**cell.knob_values, **setting}.items()))
        return changed if _is_accepted(changed.with_seed(0)) else cell


@file_cache(maxsize=4096)
def _is_accepted(cell: Cell) -> bool:
    try:
        prepare(cell)
    except UserError:
        return False
    return True


def free_settings(cell: Cell) -> Iterator[Setting]:
    """Alternatives to the defaults of a cell's free settings. Settings without a default are left to a search."""
    for free in free_of(cell.system):
        if free.has_default:
            yield from free.among(cell)


def changes(cells: Sequence[Cell]) -> list[SettingChange]:
    """All alternatives of the free settings of the cells' systems, and all readings, that change at least one cell."""
    candidates: dict[SettingChange, None] = {}
    for cell in cells:
        candidates.update({SettingChange(setting=setting, system=cell.system): None for setting in free_settings(cell)})
    candidates.update({SettingChange(setting=tuple(setting.items())): None for setting in spec()["readings"]})
    return [change for change in candidates if any(change.of(cell) != cell for cell in cells)]


def flips(claims: Sequence[Claim], drawn: Drawn, tried: Sequence[SettingChange], make_runs: MakeRuns) -> Iterator[Flip]:
    """Claims whose verdict differs under a change. Runs that no finding reads are not made again; all others are made in one sweep."""
    read = [places_read(source.findings, runs) for source, runs in drawn]

    def swapped(change: SettingChange, source: FigureSource, places: Sequence[int]) -> dict[int, Cell]:
        """The figure's cells that the change replaces, by their place."""
        swaps = {index: change.of(source.cells[index]) for index in places}
        return {index: cell for index, cell in swaps.items() if cell != source.cells[index]}

    grids = [[swapped(change, source, own) for (source, _), own in zip(drawn, read, strict=True)] for change in tried]
    cells = {cell.key: cell for grid in grids for swaps in grid for cell in swaps.values()}
    reruns = dict(zip(cells, make_runs([*cells.values()]), strict=True))
    default = _verdicts(claims, drawn)
    for change, grid in zip(tried, grids, strict=True):
        changed = [(source, _with_new(runs, swaps, reruns)) for (source, runs), swaps in zip(drawn, grid, strict=True)]
        for claim, (verdict, value) in _verdicts(claims, changed).items():
            old_verdict, old_value = default[claim]
            if old_verdict != verdict and not {old_verdict, verdict}.isdisjoint(COMPARED):
                yield Flip(
                    kind=change.kind,
                    change=change.text,
                    claim=claim,
                    default=old_verdict,
                    changed=verdict,
                    default_value=old_value,
                    changed_value=value,
                )


def _with_new(runs: Sequence[StoredRun], others: Mapping[int, Cell], new: Mapping[str, StoredRun]) -> list[StoredRun]:
    """The figure's runs with those of changed cells put in. They carry the original cells, which the figure looks for."""
    replaced = list(runs)
    for index, cell in others.items():
        replaced[index] = copy(new[cell.key])
        vars(replaced[index])["cell"] = runs[index].cell
    return replaced


def _verdicts(claims: Sequence[Claim], drawn: Drawn) -> Mapping[str, tuple[Verdict, str]]:
    """The verdict on every claim. Claims without a finding are included, because a change may remove a finding."""
    plain = [replace(claim, role="prediction", role_by_roofline=None) for claim in claims]
    judged = judge_all(plain, [finding for source, runs in drawn for finding in source.findings(runs)])
    values = {each.claim.id: () if each.finding is None else each.finding.values for each in judged}
    return {
        each.claim.id: (each.verdict, " ".join(f"{value:.4g}" for value in values[each.claim.id])) for each in judged
    }


def runs_below(root: Path, jobs: int | None = None) -> MakeRuns:
    """Returns a function that makes runs below ``root``, or finds them there."""
    store = Store(root)

    def make_runs(cells: Sequence[Cell]) -> Sequence[StoredRun]:
        sweep = Sweep([prepare(cell) for cell in cells], store)
        sweep.run(jobs=jobs)
        return sweep.runs

    return make_runs


def figures_of_size(paper: Paper, size: Mapping[str, Any]) -> list[FigureSource]:
    """The paper's figures in the given size, on their platforms."""
    resized = []
    for source in sources(tuple(entry for entry in paper.entries if entry.name.rpartition("/")[2] in size["figures"])):
        knobs, rates = tuple(size.get("knobs", {}).items()), tuple(size.get("rates", ()))
        view = replace(source.view, num_runs=size.get("num_runs", 1), rates=rates, knobs=knobs)
        cells = tuple(view.applied(cell) for cell in source.figure.cells(view))
        resized.append(replace(source, view=view, cells=cells))
    return resized


def main(name: str, runs: str, folder: str = str(LOCAL_FIGURES)) -> None:
    require(name in spec()["sizes"], f"paper={name!r} has no size: use {', '.join(spec()['sizes'])}")
    paper, make_runs = PAPERS[name], runs_below(Path(runs))
    chosen = figures_of_size(paper, spec()["sizes"][name])
    drawn = [(source, make_runs(source.cells)) for source in chosen]
    tried = changes([cell for source in chosen for cell in source.cells])
    flipped = [*flips(read_claims(paper.claims, paper.name), drawn, tried, make_runs)]
    path = replace_text(flips_path(name, Path(folder)), flips_csv(flipped))
    print(f"file: {path}: {len(flipped)} flips of {len({flip.claim for flip in flipped})} claims, {len(tried)} changes")


if __name__ == "__main__":
    main(*sys.argv[1:4])
