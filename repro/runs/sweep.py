"""A sweep: experiments looked up in the store once, the missing ones run, and all of them as stored runs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engines.errors import RunError, UserError
from repro.files import writable_folder
from repro.runs.cell import Cell
from repro.runs.experiment import Experiment
from repro.runs.provenance import GitState, Timing, collect, git_state
from repro.runs.record import RunRecord
from repro.runs.runner import OnStep, run_here, run_in_pool, timed
from repro.runs.session import Session
from repro.runs.store import Packed, Store, StoredRun, pack
from repro.runs.unit import broken, interleaved, together, units

logger = logging.getLogger(__name__)

CELLS_PER_WORKER = 4
"""Simulated cells below which another process costs more than it saves."""


@dataclass(frozen=True, kw_only=True)
class CellOutcome:
    cell: Cell
    status: Literal["ran", "reused", "failed"]
    reason: str
    """Why it ran or was reused; for a failed cell, the error."""
    run: StoredRun | None = None
    elapsed_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class CellEvent:
    """``started`` (to a pool: handed over), one of the outcomes, or ``interrupted``, which ends the run."""

    kind: Literal["started", "ran", "reused", "failed", "interrupted"]
    cell: Cell | None
    message: str
    num_closed: int
    num_total: int


OnEvent = Callable[[CellEvent], None]


class Sweep:
    """Experiments of one key are one. ``force`` runs what is stored again. Measured cells of one comparison are reused, or
    made again, together (repro.runs.unit)."""

    def __init__(self, experiments: Sequence[Experiment], store: Store, *, force: bool = False) -> None:
        self.experiments = list(experiments)
        self.store = store
        self._unique: dict[str, Experiment] = {}
        for experiment in self.experiments:
            self._unique.setdefault(experiment.cell.key, experiment)
        self._outcomes: dict[str, CellOutcome] = {}
        self._reasons: dict[str, str] = {}
        self._seen = {key: store.written(experiment.cell) for key, experiment in self._unique.items()}
        for key, experiment in self._unique.items():
            state = store.find(experiment)
            if state.is_done and not force:
                self._outcomes[key] = CellOutcome(
                    cell=experiment.cell, status="reused", reason=state.reason, run=state.run
                )
            else:
                self._reasons[key] = f"forced ({state.reason})" if force else state.reason
        self._give_up_broken_units()

    def _give_up_broken_units(self) -> None:
        stored = {key: outcome.run for key, outcome in self._outcomes.items() if outcome.run is not None}
        for unit in units(self._unique.values()).values():
            if (reason := broken(unit, stored)) is None:
                continue
            for key in (experiment.cell.key for experiment in unit):
                if key in self._outcomes:
                    del self._outcomes[key]
                    self._reasons[key] = reason

    @property
    def to_run(self) -> list[Experiment]:
        return [experiment for key, experiment in self._unique.items() if key not in self._outcomes]

    def why(self, cell: Cell) -> str:
        """One sentence: why the cell's run is reused, or why it has to be made."""
        return self._reasons[cell.key] if cell.key in self._reasons else self._outcomes[cell.key].reason

    def check(self, out_dir: Path | None = None) -> None:
        """Refuse what this machine lacks for the runs that are missing, before the first of them. ``out_dir``: where
        figures of the runs will go."""
        for experiment in self.to_run:
            experiment.deployment.check_machine()
        if out_dir is not None:
            writable_folder("out_dir", out_dir)
        if self.to_run:
            writable_folder("result_dir", self.store.root)

    def run(
        self,
        *,
        continue_on_error: bool = False,
        on_event: OnEvent | None = None,
        on_step: OnStep | None = None,
        jobs: int | None = None,
        session: Session | None = None,
    ) -> list[CellOutcome]:
        """Make the missing runs: simulated ones in ``jobs`` processes (default: all cores), then measured ones, alone, in
        one ``session``, the systems of a comparison in turn. Outcomes are in the order of the experiments.

        A run that raises is reported as an event and, unless ``continue_on_error``, ends the sweep with its exception.
        ``on_step`` hears of every step of a run made in this process. ``KeyboardInterrupt`` is reported and raised again; finished runs stay stored.
        """
        if jobs is not None and jobs < 1:
            raise UserError(f"jobs={jobs} must be at least 1")
        # The code that runs was imported before the first cell: an edit in the middle of a sweep is not in it.
        git = git_state()
        session = session or Session()

        def tell(
            kind: Literal["started", "ran", "reused", "failed", "interrupted"], cell: Cell | None, message: str
        ) -> None:
            if on_event is not None:
                event = CellEvent(
                    kind=kind, cell=cell, message=message, num_closed=len(self._outcomes), num_total=self.num_cells
                )
                on_event(event)

        def close(outcome: CellOutcome) -> None:
            self._outcomes[outcome.cell.key] = outcome
            tell(outcome.status, outcome.cell, outcome.reason)

        def on_start(experiment: Experiment) -> None:
            tell("started", experiment.cell, self._reasons[experiment.cell.key])

        packing = Packing(git=git, session=session.id, argv=tuple(sys.argv))

        def on_packed(experiment: Experiment, packed: Packed, elapsed_s: float) -> None:
            run = self.store.put(packed)
            cell = experiment.cell
            reason = self._reasons[cell.key]
            close(CellOutcome(cell=cell, status="ran", reason=reason, run=run, elapsed_s=elapsed_s))

        def on_done(experiment: Experiment, record: RunRecord, timing: Timing) -> None:
            on_packed(experiment, packing.packed(experiment, record, timing), timing.elapsed_s)

        def on_error(experiment: Experiment, error: Exception) -> bool:
            # An error that ends the sweep is raised: its traceback need not be in the log too.
            is_said = isinstance(error, UserError | RunError)
            if continue_on_error and not is_said:
                logger.error("%s failed", experiment.cell.folder_name, exc_info=error)
            message = str(error) if is_said else f"{type(error).__name__}: {error}"
            close(CellOutcome(cell=experiment.cell, status="failed", reason=message))
            return continue_on_error

        for outcome in self._outcomes.values():
            tell(outcome.status, outcome.cell, outcome.reason)
        todo = self.to_run
        simulated = [experiment for experiment in todo if not experiment.is_measured]
        workers = jobs or min(os.cpu_count() or 1, max(1, len(simulated) // CELLS_PER_WORKER))
        try:
            if workers == 1:
                run_here(self._claimed(simulated, close), on_start, on_done, on_error, on_step)
            else:
                run_in_pool(simulated, workers, on_start, on_packed, on_error, packing)
            measured = interleaved([experiment for experiment in todo if experiment.is_measured])
            run_here(self._claimed(measured, close), on_start, on_done, on_error, on_step, session)
        except KeyboardInterrupt:
            num_failed = sum(outcome.status == "failed" for outcome in self._outcomes.values())
            num_left = len(self._unique) - len(self._outcomes)
            tell(
                "interrupted",
                None,
                f"interrupted: {len(self._outcomes) - num_failed} cells done, {num_failed} failed, {num_left} left; "
                f"the same command continues",
            )
            raise
        cells = [experiment.cell for experiment in self.experiments]
        return [replace(self._outcomes[cell.key], cell=cell) for cell in cells]

    def _claimed(self, experiments: Sequence[Experiment], close: Callable[[CellOutcome], None]) -> Iterator[Experiment]:
        """Unit by unit, each kept from other sweeps until the next is asked for. Those that others are making come last,
        and are reused once made."""
        busy: list[Sequence[Experiment]] = []
        for others in (together(experiments), busy):
            if busy:
                logger.warning("waiting for another sweep, which is making %d of the runs", sum(map(len, busy)))
            for unit in others:
                with self.store.claim([experiment.cell for experiment in unit], wait=others is busy) as is_mine:
                    if not is_mine:
                        busy.append(unit)
                    elif runs := self._made_meanwhile(unit):
                        for experiment in unit:
                            cell, reason = experiment.cell, "made by another sweep meanwhile"
                            close(CellOutcome(cell=cell, status="reused", reason=reason, run=runs[cell.key]))
                    else:
                        yield from unit

    def _made_meanwhile(self, unit: Sequence[Experiment]) -> dict[str, StoredRun]:
        """The unit's runs, where another sweep has made them since this one looked."""
        if all(self.store.written(experiment.cell) == self._seen[experiment.cell.key] for experiment in unit):
            return {}
        runs = {experiment.cell.key: self.store.find(experiment).run for experiment in unit}
        found = {key: run for key, run in runs.items() if run is not None}
        return found if len(found) == len(unit) and broken(unit, found) is None else {}

    @property
    def num_cells(self) -> int:
        return len(self._unique)

    @property
    def missing(self) -> list[Cell]:
        """Cells without a stored run."""
        return [experiment.cell for key, experiment in self._unique.items() if self._run(key) is None]

    @property
    def runs(self) -> list[StoredRun]:
        """The stored runs, in the order of the experiments; those that are missing are left out."""
        return [run for experiment in self.experiments if (run := self._run(experiment.cell.key)) is not None]

    def by_grid(self, grids: Sequence[Sequence[Cell]]) -> list[list[StoredRun] | None]:
        """The runs of consecutive parts of the experiments, as many as each grid has cells; None for a part in which one
        is missing."""
        keys, parts = iter([experiment.cell.key for experiment in self.experiments]), []
        for grid in grids:
            runs = [self._run(next(keys)) for _ in grid]
            found = [run for run in runs if run is not None]
            parts.append(found if len(found) == len(runs) else None)
        return parts

    def _run(self, key: str) -> StoredRun | None:
        outcome = self._outcomes.get(key)
        return None if outcome is None else outcome.run


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Makes a run and packs it, in whatever process it is called: what it knows is the sweep's."""

    git: GitState
    session: str
    argv: tuple[str, ...]

    def __call__(self, experiment: Experiment) -> tuple[Packed, float]:
        """The run, and how long it took."""
        record, timing = timed(experiment)
        return self.packed(experiment, record, timing), timing.elapsed_s

    def packed(self, experiment: Experiment, record: RunRecord, timing: Timing) -> Packed:
        provenance = collect(
            obtained=record.obtained,
            timing=timing,
            git=self.git,
            calibration=record.manifest.get("calibration"),
            dataset=record.manifest.get("dataset"),
            argv=self.argv,
            session=self.session,
            busy_s=_busy_s(experiment, record),
        )
        return pack(experiment, record, provenance)


def _busy_s(experiment: Experiment, record: RunRecord) -> float | None:
    """Seconds of a measured run's steps, where its family has steps and they were computed on the CPU."""
    if not experiment.is_measured or record.manifest.get("device", "cpu") != "cpu":
        return None
    compute = next((metric.compute for metric in experiment.family.all_metrics if metric.name == "busy_s"), None)
    return None if compute is None else compute(record)
