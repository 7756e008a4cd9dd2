"""What was drawn, judged or found by other code, made again by today's from the runs that are stored: the same numbers and words?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from engines.errors import UserError
from repro.checks.answers import misjudged
from repro.checks.held import Pair
from repro.checks.results import Checked, Today, asked, figures, other_words, view_of
from repro.reports import claims_file
from repro.reports.claims import judge_all
from repro.reports.figures import PAPERS, Paper, figure
from repro.reports.flipped import as_csv, flips_path, read_flips
from repro.reports.flips import SIZES, Judging, changes, sized
from repro.reports.paper import read_claims
from repro.reports.stamp import answered_by, drawn_by, flipped_by, numbers_of, read_stamp, runs_of
from repro.runs.cell import Cell
from repro.runs.store import UNREADABLE, Store, StoredRun, StoreError, read_run

Found = tuple[Pair, Path, str | None]
"""Code that made it and today's; where it is; what differs, None where nothing does."""


def make_anew(
    root: Path, today: Today, runs: Path, advance: Callable[[], None] = lambda: None
) -> tuple[dict[Pair, int], list[Checked]]:
    """How many results of each pair of code came out the same, 0 of a pair of which one did not; and those that did not. What rests on
    runs that are not stored in ``runs`` is left as it is."""
    shelf = _Shelf(today, runs)
    seen: dict[Pair, int] = {}
    faults = []
    for pair, path, differs in _made(root, shelf):
        if differs is not None:
            faults.append(Checked(figure=path.stem, path=path, status="stale", is_measured=False, reason=differs))
        seen[pair] = 0 if differs is not None or seen.get(pair) == 0 else seen.get(pair, 0) + 1
        advance()
    return seen, faults


class _Shelf:
    """Runs as they are stored, whichever code made them."""

    def __init__(self, today: Today, runs: Path) -> None:
        self.today, self._store = today, Store(runs)

    def run(self, cell: Cell) -> StoredRun | None:
        try:
            return read_run(self._store.file(self.today.experiment(cell).cell))
        except (*UNREADABLE, StoreError):
            return None

    def runs(self, cells: Sequence[Cell]) -> list[StoredRun] | None:
        found = [run for cell in cells if (run := self.run(cell)) is not None]
        return found if len(found) == len(cells) else None


def _made(root: Path, shelf: _Shelf) -> Iterator[Found]:
    for path in sorted(figures(root)):
        if path.is_file() and (found := _drawn(path, shelf)) is not None:
            yield found
    for paper in PAPERS.values():
        for made in (_judged, _flipped):
            if (found := made(paper, root, shelf)) is not None:
                yield found


def _drawn(path: Path, shelf: _Shelf) -> Found | None:
    stamp = read_stamp(path)
    entry, view = figure(stamp["figure"]), view_of(stamp)
    pair = stamp["drawn_by"], drawn_by(entry.module)
    experiments = asked(stamp, shelf.today)
    if pair[0] == pair[1] or not experiments:
        return None
    drawn = runs_of(stamp, [each.cell.folder_name for each in experiments])
    runs = shelf.runs([each.cell for each in experiments])
    if runs is None or any(not _is_as_drawn(run, drawn.get(run.cell.folder_name, {})) for run in runs):
        return None
    with TemporaryDirectory() as place:
        rendered = entry.load().render(runs, view, Path(place))
        differs = other_words(path.parent, rendered)
    if differs is None and list(rendered.notes) != stamp["notes"]:
        differs = "its notes are not those that it is drawn with now"
    return pair, path, differs


def _is_as_drawn(run: StoredRun, drawn: Mapping[str, str]) -> bool:
    if run.machine is not None:
        return bool(run.code_digest == drawn.get("code"))
    return numbers_of(run.summary) == drawn.get("numbers")


def _judged(paper: Paper, root: Path, shelf: _Shelf) -> Found | None:
    path = root / f"claims-{paper.name}.csv"
    if not path.is_file():
        return None
    pair = read_stamp(path.with_suffix(".json"))["drawn_by"], answered_by(paper)
    if pair[0] == pair[1]:
        return None
    answers = []
    for source in shelf.today.sources(paper.name):
        runs = shelf.runs(source.cells)
        if runs is None:
            return None
        answers += source.answers(runs)
    claims, rows = read_claims(paper.claims, paper.name), claims_file.read(path)
    judged = judge_all(claims, answers, read_flips(paper.name, root))
    faults = [fault for row, each in zip(rows, judged, strict=True) if (fault := misjudged(row, each))]
    return pair, path, faults[0] if faults else None


def _flipped(paper: Paper, root: Path, shelf: _Shelf) -> Found | None:
    path = flips_path(paper.name, root)
    if not path.is_file():
        return None
    pair = read_stamp(path.with_suffix(".json"))["drawn_by"], flipped_by(paper)
    if pair[0] == pair[1]:
        return None

    def stored(cells: Sequence[Cell]) -> Sequence[StoredRun]:
        if (runs := shelf.runs(cells)) is None:
            raise UserError("a run of a flip is not stored")
        return runs

    try:
        judging = Judging(read_claims(paper.claims, paper.name), sized(paper, SIZES[paper.name]), stored)
        found = as_csv(list(judging.flips(list(changes(judging.cells)))))
    except UserError:
        return None
    return pair, path, None if found == path.read_text("utf-8") else "its flips are others"
