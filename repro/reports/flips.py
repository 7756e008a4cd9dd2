"""Which verdicts hang on a choice of ours: every free knob and reading of the defaults is changed, one at a time, and the claims judged
again. ``python -m repro.reports.flips PAPER FOLDER`` makes the runs, of one seed, below FOLDER and prints the flips as CSV.

A flip is told from what another seed may do by nothing here: of one that matters, look at the figure under that knob."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from engines.errors import UserError
from engines.knobs import knobs_of
from repro.files import kept
from repro.reports.claims import COMPARED, Answer, Finding, Role, Verdict, judge_all
from repro.reports.evidence import Source, sources
from repro.reports.figures import paper as paper_of
from repro.reports.paper import Claim, read_claims
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.family import Validity
from repro.runs.free import Setting
from repro.runs.record import RunRecord, Table
from repro.runs.store import Store, StoredRun
from repro.runs.sweep import Sweep
from repro.runs.system import free_of, settings_of

READINGS: Mapping[str, tuple[object, ...]] = {
    "reading": ("efficient", "policy"),
    "batch_rule": ("one", "max_model_len"),
    "length_scale": (0.5, 2.0),
    "history_read": ("serial", "own-cache"),
    "slo_scope": ("session",),
    "kappa": (0.3,),
    "boundary": (64,),
}
"""What the papers leave open and a cell says, for every system that has such a knob."""

MakeRuns = Callable[[Sequence[Cell]], Sequence[StoredRun]]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One choice made otherwise: of one system, or of every one that has the knob."""

    setting: Setting
    system: str | None = None

    @property
    def text(self) -> str:
        named = " ".join(f"{name}={value}" for name, value in self.setting)
        return named if self.system is None else f"{self.system}: {named}"

    def of(self, cell: Cell) -> Cell:
        """The cell so changed, or itself where it has no such choice, or refuses it."""
        names = {name for name, _ in self.setting}
        if self.system not in (None, cell.system) or not names <= _knobs(cell.system):
            return cell
        changed = replace(cell, knobs=tuple({**cell.knob_values, **dict(self.setting)}.items()))
        return changed if _can_be(changed.with_seed(0)) else cell


@dataclass(frozen=True, kw_only=True)
class Flip:
    change: str
    claim: str
    default: Verdict
    changed: Verdict
    default_value: str
    changed_value: str


def _knobs(system: str) -> frozenset[str]:
    return frozenset(name for kind in settings_of(system) for name in knobs_of(kind))


@kept(maxsize=4096)
def _can_be(cell: Cell) -> bool:
    try:
        prepare(cell)
    except UserError:
        return False
    return True


def changes(cells: Sequence[Cell]) -> Iterator[Change]:
    """Every alternative of what is free in a system of the cells, and every reading that one of them has."""
    by_system: dict[str, Cell] = {}
    for cell in cells:
        by_system.setdefault(cell.system, cell)
    for system in by_system:
        for each in free_of(system):
            found = {setting for cell in cells if cell.system == system for setting in each.among(cell)}
            yield from (Change(setting=setting, system=system) for setting in sorted(found, key=repr))
    for name, values in READINGS.items():
        if any(name in _knobs(system) for system in by_system):
            yield from (Change(setting=((name, value),)) for value in values)  # type: ignore[arg-type]


def flips(
    claims: Sequence[Claim], chosen: Sequence[Source], make_runs: MakeRuns, on_change: Callable[[str], None] = print
) -> Iterator[Flip]:
    """Claims whose verdict differs under a change from that under the defaults, over the same figures and seeds."""

    def verdicts(change: Change | None) -> Mapping[str, tuple[Verdict, str]]:
        answers = []
        for source in chosen:
            cells = source.cells if change is None else tuple(change.of(cell) for cell in source.cells)
            # A figure asks for its runs by the cells of its defaults.
            made = [_Instead(run, cell) for run, cell in zip(make_runs(cells), source.cells, strict=True)]
            found = source.figure.findings(made, source.view)
            role: Role = "prediction"
            answers += [Answer(finding=each, roles=(role,) * len(each.values)) for each in found]
        return {
            each.claim.id: (each.verdict, _text(each.finding))
            for each in judge_all(claims, answers)
            if each.verdict in COMPARED
        }

    default = verdicts(None)
    for change in changes([cell for source in chosen for cell in source.cells]):
        on_change(change.text)
        for claim, (verdict, value) in verdicts(change).items():
            if claim in default and default[claim][0] != verdict:
                before, was = default[claim]
                yield Flip(
                    change=change.text,
                    claim=claim,
                    default=before,
                    changed=verdict,
                    default_value=was,
                    changed_value=value,
                )


class _Instead(StoredRun):
    """A run under the cell that it was made in place of."""

    def __init__(self, run: StoredRun, cell: Cell) -> None:
        super().__init__(cell, run.file, run.manifest, run.provenance, run.other_code)
        self.__dict__["_run"] = run

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.__dict__["_run"].summary
        return found

    @cached_property
    def record(self) -> RunRecord:
        found: RunRecord = self.__dict__["_run"].record
        return found

    @cached_property
    def validity(self) -> Validity:
        found: Validity = self.__dict__["_run"].validity
        return found

    def table(self, name: str) -> Table:
        found: Table = self.__dict__["_run"].table(name)
        return found


def _text(finding: Finding | None) -> str:
    return "" if finding is None else " ".join(f"{value:.4g}" for value in finding.values)


def as_csv(found: Sequence[Flip]) -> str:
    text = io.StringIO()
    names = [field.name for field in fields(Flip)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([getattr(each, name) for name in names] for each in found)
    return text.getvalue()


def simulated(root: Path) -> MakeRuns:
    """Runs made below ``root``, or found there."""
    store = Store(root)

    def make(cells: Sequence[Cell]) -> Sequence[StoredRun]:
        sweep = Sweep([prepare(cell) for cell in cells], store)
        sweep.run()
        return sweep.runs

    return make


def main(name: str, folder: str) -> None:
    paper = paper_of(name)
    chosen = [
        replace(source, view=view, cells=tuple(view.applied(cell) for cell in source.figure.cells(view)))
        for source in sources(paper.entries)
        if source.cells and (view := replace(source.view, num_runs=1)).is_simulated
    ]
    found = flips(
        read_claims(paper.claims, paper.name),
        chosen,
        simulated(Path(folder)),
        lambda text: print(text, file=sys.stderr),
    )
    print(as_csv(list(found)), end="")


if __name__ == "__main__":
    main(*sys.argv[1:3])
