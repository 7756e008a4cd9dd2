"""Findings for a paper's claims from stored runs, over all its figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from repro.families.platforms import platform as platform_of
from repro.files import file_cache
from repro.reports.claims import Finding
from repro.reports.figures import Figure, FigureEntry, Knobs, View, default_reading
from repro.runs.cell import Cell
from repro.runs.experiment import Experiment, prepare
from repro.runs.store import Store, StoredRun
from repro.runs.sweep import Sweep


@dataclass(frozen=True, kw_only=True)
class FigureSource:
    """A figure on one platform, and the cells behind it."""

    entry: FigureEntry
    figure: Figure
    view: View
    cells: tuple[Cell, ...]

    @property
    def command(self) -> str:
        """The command that makes the figure's runs and draws it."""
        return " ".join(
            [f"repro reproduce {self.entry.alias} --platform {self.view.platform.name}", *self.view.charged_options]
        )

    def findings(self, runs: Sequence[StoredRun]) -> list[Finding]:
        """The figure's findings; ``runs`` are those of ``cells``."""
        latest = {finding.claim: finding for finding in self.figure.findings(runs, self.view)}
        return [replace(finding, command=self.command) for finding in latest.values()] if runs else [*latest.values()]


def sources(
    entries: Sequence[FigureEntry], platforms: Sequence[str] | None = None, charged: Knobs = ()
) -> list[FigureSource]:
    """Figures that decide claims, each in its platform's usual reading. ``platforms`` None means all platforms. ``charged`` holds the knobs
    that price simulated steps."""
    return [
        _source(entry, name, charged)
        for entry in entries
        for name in entry.load().deciding
        if platforms is None or name in platforms
    ]


@file_cache(maxsize=64)
def _source(entry: FigureEntry, platform: str, charged: Knobs) -> FigureSource:
    figure, where = entry.load(), platform_of(platform)
    view = View(platform=where, reading=default_reading(where), num_runs=figure.num_runs)
    if view.is_simulated:
        view = replace(view, knobs=charged)
    cells = tuple(view.applied(cell) for cell in figure.cells(view))
    return FigureSource(entry=entry, figure=figure, view=view, cells=cells)


def sweep_over(chosen: Sequence[FigureSource], store: Store) -> Sweep:
    """A sweep over the figures' runs. Figures share runs, and each cell is prepared once."""
    prepared: dict[str, Experiment] = {}
    cells = [cell for source in chosen for cell in source.cells]
    return Sweep([prepared.get(cell.key) or prepared.setdefault(cell.key, prepare(cell)) for cell in cells], store)


def stored_findings(
    entries: Sequence[FigureEntry], store: Store, on_figure: Callable[[], None] = lambda: None, charged: Knobs = ()
) -> list[Finding]:
    """Findings of every figure whose runs are all stored; ``on_figure`` is called after each."""
    # Looking for files that may hold a cell is cheaper than preparing it, and needs no basis.
    chosen = [source for source in sources(entries, charged=charged) if not store.surely_missing(source.cells)]
    return findings_of(chosen, sweep_over(chosen, store), on_figure)


def findings_of(
    chosen: Sequence[FigureSource], sweep: Sweep, on_figure: Callable[[], None] = lambda: None
) -> list[Finding]:
    """Findings of figures whose runs are all in the sweep, which is over their cells."""
    findings: list[Finding] = []
    for source, runs in zip(chosen, sweep.by_grid([source.cells for source in chosen]), strict=True):
        if runs is not None:
            findings += source.findings(runs)
        on_figure()
    return findings
