"""Which verdicts hang on a choice of ours: every free knob and reading of the defaults is changed, one at a time, and the claims judged
again. ``python -m repro.reports.flips PAPER RUNS [FOLDER]`` makes the runs below RUNS, of the size in ``SIZES``, and writes the flips to
FOLDER/flips-PAPER.csv. What runs of that size judge otherwise than the whole figures is no flip of these.

Arrivals and lengths are those of one seed on both sides; what another seed would turn is told from a flip by nothing here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from engines.errors import UserError, require
from engines.knobs import knobs_of
from repro.files import kept, replace_text
from repro.paths import LOCAL_FIGURES
from repro.reports.claims import COMPARED, Answer, Finding, Role, Verdict, judge_all
from repro.reports.evidence import Source, sources
from repro.reports.figures import Knobs, Paper
from repro.reports.figures import paper as paper_of
from repro.reports.flipped import Flip, Kind, as_csv, flips_path
from repro.reports.paper import Claim, read_claims
from repro.reports.roles import DRAWS, FAR, NEAR, Perturbed, differing
from repro.reports.stamp import save_flips
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.family import Validity
from repro.runs.free import TUNE, Setting
from repro.runs.record import RunRecord, Table
from repro.runs.store import Store, StoredRun
from repro.runs.sweep import Sweep
from repro.runs.system import free_of, settings_of


def _each(name: str, *values: Any) -> tuple[Setting, ...]:
    return tuple(((name, value),) for value in values)


READINGS: tuple[Setting, ...] = (
    *_each("reading", "efficient", "policy"),
    *_each("batch_rule", "one", "max_model_len", "batch"),
    *_each("length_scale", 0.5, 2.0),
    *_each("history_read", "serial", "own-cache"),
    (("history_read", "own-cache"), ("affinity", "cost")),
    (("history_read", "own-cache"), ("affinity", "none")),
    *_each("slo_scope", "session"),
    *_each("ttft_rule", "mean"),
    *_each("itl_stat", "mean", "p95-lower", "p95-higher"),
    *_each("joins", "shorter", "same"),
    *_each("long_dispatch", "single"),
    *_each("kappa", -0.08, 0.14),
    *_each("boundary", 64),
    *_each("batching", "synchronous", "mixed"),
    *_each("shared_len", 0),
    (("step_overhead_s", 0.004), ("tokens_per_forward", 11.4)),
    (("input_len", 450), ("shared_len", 416), ("tokens_per_forward", 5.72)),
    (("input_len", 1800), ("shared_len", 1664), ("tokens_per_forward", 6.51)),
    (("gen_length", 128), ("tokens_per_forward", 7.0)),
    (("gen_length", 512), ("tokens_per_forward", 5.56)),
)
"""What the papers leave open of what they measured, besides what it is by default: for every system that has such a knob. Lengths by a
factor of two; LAPS's mixing penalty as far as it was measured (docs/silicon.md); of SGLang's published points the schedule, the prefix that prompts
share, and 4 ms of the host a step or other prompts and answers, each with the tokens a forward that the first point is fitted by then. Not
``counted``: sessions of rounds that long fit on no worker of Table 2."""
ASSUMED_LENGTHS = frozenset({"input_len", "gen_length", "shared_len"})
"""What a reading changes only of cells that say what their prompts share, which is assumed: other cells' lengths are published."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """What flips are found with: whole figures for every choice would take a day."""

    figures: tuple[str, ...]
    rates: tuple[float, ...] = ()
    knobs: Knobs = ()
    num_runs: int = 1


SIZES: Mapping[str, Size] = {
    "ampd": Size(figures=("fig4", "fig5", "fig6", "fig8"), rates=(2.0,)),
    "laps": Size(figures=("fig1", "fig3", "fig5", "fig6", "fig7", "fig8", "table2")),
    "dllm-serve": Size(figures=("fig3", "fig4", "fig5", "fig7", "fig8", "table4"), knobs=(("num_prompts", 150),)),
    "block": Size(figures=("sglang",), num_runs=3),
}
"""Simulated figures that claims rest on; AMPD's without those of the planner, which none of this changes."""

MakeRuns = Callable[[Sequence[Cell]], Sequence[StoredRun]]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One choice made otherwise: of one system, or of every one that has the knob."""

    setting: Setting
    system: str | None = None
    """None of a reading."""

    @property
    def kind(self) -> Kind:
        return "reading" if self.system is None else "free"

    @property
    def text(self) -> str:
        named = " ".join(f"{name}={value}" for name, value in self.setting)
        return named if self.system is None else f"{self.system}: {named}"

    def of(self, cell: Cell) -> Cell:
        """The cell so changed, or itself where it has no such choice, searches or says it itself, or refuses it."""
        setting = dict(self.setting)
        if self.system is None:
            has_it = setting.keys() <= _knobs(cell.system)
            if "shared_len" not in cell.knob_values:
                setting = {name: value for name, value in setting.items() if name not in ASSUMED_LENGTHS}
        else:
            has_it = self.system == cell.system and not _searches(cell) and self.setting in free_settings(cell)
        if not has_it:
            return cell
        changed = replace(cell, knobs=tuple({**cell.knob_values, **setting}.items()))
        return changed if _can_be(changed.with_seed(0)) else cell


def _knobs(system: str) -> frozenset[str]:
    return frozenset(name for kind in settings_of(system) for name in knobs_of(kind))


@kept(maxsize=4096)
def _can_be(cell: Cell) -> bool:
    try:
        prepare(cell)
    except UserError:
        return False
    return True


def _searches(cell: Cell) -> bool:
    return cell.knob_values.get("deployment") == "search" or cell.knob_values.get(TUNE) == "search"


def free_settings(cell: Cell) -> Iterator[Setting]:
    """What is free in a cell, otherwise than by default; what has no default is a search's."""
    for each in free_of(cell.system):
        if each.has_default:
            yield from each.among(cell)


def changes(cells: Sequence[Cell]) -> Iterator[Change]:
    """Every alternative of what is free in a system of the cells, and every reading, that makes another cell of one."""
    found: dict[Change, None] = {}
    for cell in cells:
        found.update({Change(setting=setting, system=cell.system): None for setting in free_settings(cell)})
    found.update({Change(setting=setting): None for setting in READINGS})
    yield from (each for each in found if any(each.of(cell) != cell for cell in cells))


class Judging:
    """A paper's claims over some figures, under the defaults and under changes. Runs on which no claim rests are not made again."""

    def __init__(self, claims: Sequence[Claim], chosen: Sequence[Source], make_runs: MakeRuns) -> None:
        self.claims, self.make_runs = claims, make_runs
        runs = iter(make_runs([cell for source in chosen for cell in source.cells]))
        self.made = [(source, [next(runs) for _ in source.cells]) for source in chosen]
        self.resting = [_resting(source, own) for source, own in self.made]
        self.default = self._verdicts(self.made)

    @property
    def cells(self) -> list[Cell]:
        return [cell for source, _ in self.made for cell in source.cells]

    @property
    def compared(self) -> frozenset[str]:
        """Claims that the defaults are held against."""
        return frozenset(claim for claim, (verdict, _) in self.default.items() if verdict in COMPARED)

    def flips(self, tried: Sequence[Change]) -> Iterator[Flip]:
        """Claims whose verdict differs under a change, one after the other. All runs are made first, at once."""
        asked = [[self._asked(change, place) for place in range(len(self.made))] for change in tried]
        cells = list({cell.key: cell for grids in asked for grid in grids for cell in grid.values()}.values())
        runs = {cell.key: run for cell, run in zip(cells, self.make_runs(cells), strict=True)}
        for change, grids in zip(tried, asked, strict=True):
            # A figure asks for its runs by the cells of its defaults.
            made = [
                (source, [_Instead(runs[grid[at].key], run.cell) if at in grid else run for at, run in enumerate(own)])
                for (source, own), grid in zip(self.made, grids, strict=True)
            ]
            yield from self._flips(change, made)

    def _asked(self, change: Change, place: int) -> Mapping[int, Cell]:
        """Cells of a figure that are others under a change, by their place."""
        cells, resting = self.made[place][0].cells, self.resting[place]
        found = {at: change.of(cell) for at, cell in enumerate(cells) if _sort(cell) in resting}
        return {at: cell for at, cell in found.items() if cell != cells[at]}

    def _flips(self, change: Change, made: Sequence[tuple[Source, Sequence[StoredRun]]]) -> Iterator[Flip]:
        for claim, (verdict, value) in self._verdicts(made).items():
            before, was = self.default[claim]
            if before != verdict and not {before, verdict}.isdisjoint(COMPARED):
                yield Flip(
                    kind=change.kind,
                    change=change.text,
                    claim=claim,
                    default=before,
                    changed=verdict,
                    default_value=was,
                    changed_value=value,
                )

    def _verdicts(self, made: Sequence[tuple[Source, Sequence[StoredRun]]]) -> Mapping[str, tuple[Verdict, str]]:
        """The verdict on every claim, those too that no finding answers: under a change one may be answered no more."""
        role: Role = "prediction"
        answers = [
            Answer(finding=each, roles=(role,) * len(each.values))
            for source, runs in made
            for each in source.figure.findings(runs, source.view)
        ]
        return {each.claim.id: (each.verdict, _text(each.finding)) for each in judge_all(self.claims, answers)}


def _sort(cell: Cell) -> str:
    """Cells that differ by what is served and how much of it alone are of one sort."""
    place = {"model": "", "deployment": "search" if _searches(cell) else ""}
    return repr((cell.system, sorted({**cell.knob_values, **place}.items())))


def _resting(source: Source, runs: Sequence[StoredRun]) -> frozenset[str]:
    """Sorts of cells whose runs move a finding of the figure."""
    found = {finding.claim: finding for finding in source.figure.findings(runs, source.view)}
    sorts = [_sort(cell) for cell in source.cells]

    def moves(sort: str) -> bool:
        for size in (NEAR, FAR):
            for draw in range(DRAWS[size]):
                changed = [
                    Perturbed(run, size=size, seed=DRAWS[size] * place + draw) if sorts[place] == sort else run
                    for place, run in enumerate(runs)
                ]
                after = source.figure.findings(changed, source.view)
                if any(any(differing(found[each.claim], each)) for each in after):
                    return True
        return False

    return frozenset(sort for sort in dict.fromkeys(sorts) if moves(sort))


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


def simulated(root: Path, jobs: int | None = None) -> MakeRuns:
    """Runs made below ``root``, or found there."""
    store = Store(root)

    def make(cells: Sequence[Cell]) -> Sequence[StoredRun]:
        sweep = Sweep([prepare(cell) for cell in cells], store)
        sweep.run(jobs=jobs)
        return sweep.runs

    return make


def sized(paper: Paper, size: Size) -> list[Source]:
    """The paper's figures in a size, on their platforms."""
    found = []
    for source in sources(tuple(each for each in paper.entries if each.name.rpartition("/")[2] in size.figures)):
        view = replace(source.view, num_runs=size.num_runs, rates=size.rates, knobs=size.knobs)
        cells = tuple(view.applied(cell) for cell in source.figure.cells(view))
        found.append(replace(source, view=view, cells=cells))
    return found


def main(name: str, runs: str, folder: str = str(LOCAL_FIGURES)) -> None:
    require(name in SIZES, f"paper={name!r} has no size: use {', '.join(SIZES)}")
    paper, size = paper_of(name), SIZES[name]
    judging = Judging(read_claims(paper.claims, paper.name), sized(paper, size), simulated(Path(runs)))
    tried = list(changes(judging.cells))
    found = list(judging.flips(tried))
    path = flips_path(name, Path(folder))
    replace_text(path, as_csv(found))
    turned = {each.claim for each in found}
    judged = sorted(judging.compared | turned)
    save_flips(paper, path, size=asdict(size), tried=[each.text for each in tried], judged=judged)
    print(f"file: {path}: {len(found)} flips of {len(turned)} claims, {len(tried)} changes")


if __name__ == "__main__":
    main(*sys.argv[1:4])
