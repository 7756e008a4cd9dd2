"""Answers to a paper's claims from stored runs, over all its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from repro.files import kept
from repro.reports.claims import Answer
from repro.reports.costs import read_cost
from repro.reports.figures import FIGURES, Figure, FigureEntry, Knobs, View, default_reading
from repro.reports.fitting import PROTOCOLS
from repro.reports.roles import answers
from repro.runs.cell import Cell
from repro.runs.experiment import Experiment, prepare
from repro.runs.store import Store, StoredRun
from repro.runs.sweep import Sweep
from repro.systems.platforms import platform as platform_of

THROUGHPUTS = frozenset({"throughput_tok_s", "request_throughput", "window_s"})
QUEUED = 0.2
"""A queue's latency is its throughput's to within this, the tolerance of the latencies that a paper prints."""
SATURATED = 0.9
"""A system that serves less than this share of the arriving requests is saturated."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A figure on one platform, and the cells behind it."""

    entry: FigureEntry
    figure: Figure
    view: View
    cells: tuple[Cell, ...]

    def answers(self, runs: Sequence[StoredRun], command_s: float | None = None) -> list[Answer]:
        """``runs`` are those of ``cells``, ``command_s`` the processor time of making all of them."""
        where, bare = self.view.platform.name, self.entry.name.rpartition("/")[2]
        first = next((name for name in FIGURES if name.rpartition("/")[2] == bare), self.entry.name)
        name = bare if first == self.entry.name else self.entry.name
        fitted = frozenset(target.claim for protocol in PROTOCOLS.values() for target in protocol.targets)
        return answers(
            lambda changed: self.figure.findings(changed, self.view),
            runs,
            determined=determined,
            targets=fitted if self.view.obtained == "simulated" else frozenset(),
            command=" ".join([f"repro reproduce {name} --platform {where}", *self.view.charged_options])
            if runs
            else None,
            command_s=command_s,
        )


def sources(
    entries: Sequence[FigureEntry], platforms: Sequence[str] | None = None, charged: Knobs = ()
) -> list[Source]:
    """Figures that decide claims, each in its platform's usual reading; ``platforms`` None is all of them. ``charged`` are what
    simulated steps are charged by."""
    return [
        _source(entry, name, charged)
        for entry in entries
        for name in entry.load().deciding
        if platforms is None or name in platforms
    ]


@kept(maxsize=64)
def _source(entry: FigureEntry, platform: str, charged: Knobs) -> Source:
    figure, where = entry.load(), platform_of(platform)
    view = View(platform=where, reading=default_reading(where), num_runs=figure.num_runs)
    if view.is_simulated:
        view = replace(view, knobs=charged)
    cells = tuple(view.applied(cell) for cell in figure.cells(view))
    return Source(entry=entry, figure=figure, view=view, cells=cells)


def sweep_over(chosen: Sequence[Source], store: Store) -> Sweep:
    """The runs behind them; figures share runs, and each cell is prepared once."""
    prepared: dict[str, Experiment] = {}
    cells = [cell for source in chosen for cell in source.cells]
    return Sweep([prepared.get(cell.key) or prepared.setdefault(cell.key, prepare(cell)) for cell in cells], store)


def stored_answers(
    entries: Sequence[FigureEntry], store: Store, on_figure: Callable[[], None] = lambda: None, charged: Knobs = ()
) -> list[Answer]:
    """Answers of every figure whose runs are all stored; ``on_figure`` is called after each."""
    # Preparing a cell costs more than seeing that nothing like it is stored, whatever the basis of its numbers.
    chosen = [source for source in sources(entries, charged=charged) if not store.surely_missing(source.cells)]
    return answers_of(chosen, sweep_over(chosen, store), on_figure)


def answers_of(chosen: Sequence[Source], sweep: Sweep, on_figure: Callable[[], None] = lambda: None) -> list[Answer]:
    """``sweep`` is over their cells."""
    answered: list[Answer] = []
    for source, runs in zip(chosen, sweep.by_grid([source.cells for source in chosen]), strict=True):
        if runs is not None:
            # As the command draws it, which may repeat more than answers take.
            drawn = replace(source.view, num_runs=source.figure.default_num_runs(source.view.platform))
            answered += source.answers(runs, read_cost(sweep.store.root, source.entry, drawn))
        on_figure()
    return answered


def determined(run: StoredRun) -> frozenset[str]:
    """Metrics of the run that the fit of its card gives; none if it is not of a target's system and data set.

    Saturated, it serves the same tokens per second at any rate. The latencies of its N requests follow where a queue makes them: their
    mean is then (N / 2) (tokens / throughput - 1 / rate). Where the card holds most of the requests at once each of them takes long by
    itself, and its latency is found, not given. Below saturation the throughput is the load's."""
    cell, protocol = run.cell, PROTOCOLS.get(run.cell.platform)
    if protocol is None or cell.rate is None:
        return frozenset()
    if all(_but_rate(protocol.cell(target)) != _but_rate(cell) for target in protocol.targets):
        return frozenset()
    served = run.summary["request_throughput"] or 0.0
    is_saturated = cell.rate == protocol.rate or served < SATURATED * cell.rate
    return frozenset(run.summary) if is_saturated and _queue_alone(run) else THROUGHPUTS


def _queue_alone(run: StoredRun) -> bool:
    """Whether the closed form of a queue gives the run's mean latency within what a claim of a latency allows."""
    served, latency = run.summary["request_throughput"], run.summary["e2el_s"]["mean"]
    if not served or not latency or run.cell.rate is None:
        return False
    num_requests = sum(run.summary["num_requests"].values())
    fluid = num_requests / 2 * (1 / served - 1 / run.cell.rate)
    return abs(fluid / latency - 1) <= QUEUED


def _but_rate(cell: Cell) -> tuple[object, ...]:
    """What a cell asks, whatever its rate, its seed and the basis of its answer."""
    knobs = frozenset(knob for knob in cell.knobs if knob[0] != "basis")
    return (cell.system, cell.dataset, cell.platform, cell.executor, knobs)
