"""A sweep: looks experiments up in the store once, runs the missing ones, and returns all as stored runs."""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engines.errors import RunError, UserError, require
from engines.knobs import check_value
from repro.files import writable_folder
from repro.runs.cell import Cell, plain
from repro.runs.clean import clean_command
from repro.runs.experiment import Experiment
from repro.runs.pool import Hooks, Jobs, LocalPool, OnStep, Packing, Pool
from repro.runs.provenance import fault_of, git_state, is_of_a_plug_in
from repro.runs.sitting import Sitting, UnitLocks, interleaved, runs_by_unit, why_incomplete
from repro.runs.store import Packed, Store, StoredRun

logger = logging.getLogger(__name__)

POOLS = ("local", "ray")
EventKind = Literal["started", "ran", "reused", "failed", "interrupted"]


def pool_of(name: str, address: str | None = None, jobs: int | None = None) -> AbstractContextManager[Pool]:
    """The pool of this name, which ends with the body. Raises UserError for an impossible pool, and for invalid ``jobs``."""
    check_value(Jobs, "jobs", jobs)
    name, address = plain(name), plain(address)
    require(address is None or isinstance(address, str), f"address={address!r} must be a text: auto or host:port")
    require(isinstance(name, str) and name in POOLS, f"pool={name!r} is unknown: use {' or '.join(POOLS)}")
    if name == "local":
        require(address is None, f"address={address!r} is of a Ray cluster: add --pool ray, or leave it out")
        return nullcontext(LocalPool())
    from repro.runs.ray_pool import RayPool

    return RayPool(address)


@dataclass(frozen=True, kw_only=True)
class CellOutcome:
    cell: Cell
    status: Literal["ran", "reused", "failed"]
    reason: str
    """Why the cell ran or was reused; for a failed cell, the error."""
    run: StoredRun | None = None


@dataclass(frozen=True, kw_only=True)
class CellEvent:
    """``kind`` is ``started`` (for a pool: handed over), one of the outcomes, or ``interrupted``, which ends the run."""

    kind: EventKind
    cell: Cell | None
    message: str
    num_closed: int
    num_total: int


OnEvent = Callable[[CellEvent], None]


class Sweep:
    """Runs experiments; those with the same key count as one. ``force`` also runs what is stored. Measured cells of one comparison are
    reused, or made again, together (repro.runs.sitting)."""

    def __init__(
        self, experiments: Sequence[Experiment], store: Store, *, force: bool = False, pool: Pool | None = None
    ) -> None:
        """``pool`` makes the missing runs; the default is this machine."""
        self.pool = pool or LocalPool()
        self.experiments = self.pool.placed(experiments)
        self.store = store
        self._unique: dict[str, Experiment] = {}
        for experiment in self.experiments:
            self._unique.setdefault(experiment.cell.key, experiment)
        self._outcomes: dict[str, CellOutcome] = {}
        self._runs: dict[str, StoredRun] = {}
        self._reasons: dict[str, str] = {}
        self.num_cells = len(self._unique)
        measured = {key: experiment for key, experiment in self._unique.items() if experiment.is_measured}
        self._seen = {key: store.written(experiment.cell) for key, experiment in measured.items()}
        never_known = {name: None for experiment in self._unique.values() for name in experiment.code.fileless}
        if never_known:
            logger.warning("%s: in no file, so that its runs are made again each time", ", ".join(never_known))
        for key, experiment in self._unique.items():
            state = store.find(experiment)
            if state.run is not None and not force:
                self._runs[key] = state.run
                self._outcomes[key] = CellOutcome(
                    cell=experiment.cell, status="reused", reason=state.reason, run=state.run
                )
            else:
                self._reasons[key] = f"forced ({state.reason})" if force else state.reason
        for unit in runs_by_unit(measured.values()).values() if measured else ():
            if (reason := why_incomplete(unit, self._runs)) is not None:
                for key in {experiment.cell.key for experiment in unit} & self._outcomes.keys():
                    del self._outcomes[key], self._runs[key]
                    self._reasons[key] = reason

    @property
    def to_run(self) -> list[Experiment]:
        return [experiment for key, experiment in self._unique.items() if key not in self._outcomes]

    def why(self, cell: Cell) -> str:
        """One sentence: why the cell's run is reused, or why it must be made."""
        return self._reasons[cell.key] if cell.key in self._reasons else self._outcomes[cell.key].reason

    def check(self, out_dir: Path | None = None) -> None:
        """Raise UserError, before the first missing run, if a machine lacks something it needs. ``out_dir`` is the folder for figures of
        the runs."""
        self.pool.check(self.to_run)
        if out_dir is not None:
            writable_folder("out_dir", out_dir)
        if self.to_run:
            writable_folder("result_dir", self.store.root)
            self.store.clear_leftovers()

    def run(
        self,
        *,
        continue_on_error: bool = False,
        on_event: OnEvent | None = None,
        on_step: OnStep | None = None,
        jobs: int | None = None,
        sitting: Sitting | None = None,
    ) -> list[CellOutcome]:
        """Make the missing runs. First ``jobs`` workers (default: all cores) make the simulated ones. Then measured ones follow, each with
        a machine to itself. Those of this machine share one ``sitting``, and the systems of a comparison take turns. Outcomes are in the
        order of the experiments.

        A run that raises is reported as an event and, unless ``continue_on_error``, ends the sweep with its exception. ``on_step`` is
        called for every step of a run in this process. ``KeyboardInterrupt`` is reported and raised again; finished runs stay stored.
        """
        check_value(Jobs, "jobs", jobs)
        # The code was imported before the first cell, so an edit during a sweep has no effect on it.
        packing = Packing(git=git_state(), command=tuple(clean_command(sys.argv)))
        making = _Making(sweep=self, on_event=on_event, continue_on_error=continue_on_error)
        for outcome in self._outcomes.values():
            making.tell(outcome.status, outcome.cell, outcome.reason)
        simulated = [experiment for experiment in self.to_run if not experiment.is_measured]
        measured = [experiment for experiment in self.to_run if experiment.is_measured]
        hooks = Hooks(
            on_start=lambda experiment: making.tell("started", experiment.cell, self.why(experiment.cell)),
            on_done=making.done,
            on_error=making.failed,
            on_step=on_step,
        )
        try:
            if simulated:
                self.pool.simulate(simulated, jobs, packing, hooks)
            if measured:
                locks = UnitLocks(self.store, self._seen, making.reused)
                self.pool.measure(interleaved(measured), sitting or Sitting(), packing, locks, hooks)
        except KeyboardInterrupt:
            making.interrupted()
            raise
        return [replace(self._outcomes[experiment.cell.key], cell=experiment.cell) for experiment in self.experiments]

    @property
    def missing(self) -> list[Cell]:
        """Cells without a stored run."""
        return [experiment.cell for key, experiment in self._unique.items() if key not in self._runs]

    @property
    def runs(self) -> list[StoredRun]:
        """The stored runs, in the order of the experiments, without missing ones."""
        return [self._runs[key] for experiment in self.experiments if (key := experiment.cell.key) in self._runs]

    def by_grid(self, grids: Sequence[Sequence[Cell]]) -> list[list[StoredRun] | None]:
        """Splits the runs into consecutive parts, each as long as its grid; None for a part with a missing run."""
        keys, parts = iter([experiment.cell.key for experiment in self.experiments]), []
        for grid in grids:
            runs = [self._runs.get(next(keys)) for _ in grid]
            stored = [run for run in runs if run is not None]
            parts.append(stored if len(stored) == len(runs) else None)
        return parts


@dataclass(frozen=True, kw_only=True)
class _Making:
    """Records the outcomes of a sweep's missing runs while they are made."""

    sweep: Sweep
    on_event: OnEvent | None
    continue_on_error: bool

    def tell(self, kind: EventKind, cell: Cell | None, message: str) -> None:
        if self.on_event is not None:
            num_closed, num_total = len(self.sweep._outcomes), self.sweep.num_cells
            self.on_event(CellEvent(kind=kind, cell=cell, message=message, num_closed=num_closed, num_total=num_total))

    def _close(self, outcome: CellOutcome) -> None:
        self.sweep._outcomes[outcome.cell.key] = outcome
        if outcome.run is not None:
            self.sweep._runs[outcome.cell.key] = outcome.run
        self.tell(outcome.status, outcome.cell, outcome.reason)

    def done(self, experiment: Experiment, packed: Packed) -> None:
        cell = experiment.cell
        run = self.sweep.store.put(packed)
        self._close(CellOutcome(cell=cell, status="ran", reason=self.sweep.why(cell), run=run))

    def reused(self, experiment: Experiment, run: StoredRun) -> None:
        reason = "made by another sweep meanwhile"
        self._close(CellOutcome(cell=experiment.cell, status="reused", reason=reason, run=run))

    def failed(self, experiment: Experiment, error: Exception) -> None:
        fault = error if is_of_a_plug_in(error) else fault_of(experiment.cell, error)
        # An error that ends the sweep is raised, so the log need not show its traceback too.
        if self.continue_on_error and not isinstance(error, UserError | RunError):
            logger.error("%s failed", experiment.cell.folder_name, exc_info=error)
        message = str(fault) if isinstance(fault, UserError | RunError) else f"{type(fault).__name__}: {fault}"
        self._close(CellOutcome(cell=experiment.cell, status="failed", reason=message))
        if not self.continue_on_error:
            raise fault from (None if fault is error else error)

    def interrupted(self) -> None:
        num_failed = sum(outcome.status == "failed" for outcome in self.sweep._outcomes.values())
        num_done, num_left = len(self.sweep._outcomes) - num_failed, self.sweep.num_cells - len(self.sweep._outcomes)
        summary = f"{num_done} cells done, {num_failed} failed, {num_left} left; the same command continues"
        self.tell("interrupted", None, f"interrupted: {summary}")
