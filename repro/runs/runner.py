"""Runs cells, each at most once: what is stored is not run again, and a stop loses only cells in flight."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from engines.errors import UserError
from repro.runs.cell import Cell
from repro.runs.provenance import GitState, Timing, collect, git_state, utc_now
from repro.runs.record import RunRecord
from repro.runs.store import Store
from repro.runs.validity import Validity

RunCell = Callable[[Cell], RunRecord]
_Timed = tuple[RunRecord, Timing]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CellOutcome:
    cell: Cell
    status: Literal["ran", "reused", "failed"]
    reason: str
    """Why it ran or was reused; for a failed cell, the error."""
    folder: Path | None = None
    validity: Validity | None = None
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


def run_cells(
    cells: Iterable[Cell],
    run_cell: RunCell,
    store: Store,
    *,
    force: bool = False,
    continue_on_error: bool = False,
    on_event: OnEvent | None = None,
    jobs: int = 1,
) -> list[CellOutcome]:
    """Outcomes in the order of ``cells``; a cell given twice runs once and shares its outcome.

    A cell that raises is reported as an event and, unless ``continue_on_error``, ends the run with its exception.
    ``KeyboardInterrupt`` is reported and raised again; finished cells stay stored. ``jobs`` > 1 runs cells in
    fresh processes, for simulated cells only (measured ones would disturb each other): ``run_cell`` must then
    pickle, and what it returns too.
    """
    if jobs < 1:
        raise UserError(f"jobs={jobs} must be at least 1")
    ordered = list(cells)
    first: dict[str, Cell] = {}
    for cell in ordered:
        first.setdefault(cell.key, cell)
    unique = list(first.values())
    sweep = _Sweep(store=store, num_total=len(unique), on_event=on_event, git=git_state())
    try:
        todo = list(sweep.reuse(unique, force=force))
        if jobs == 1:
            _run_here(sweep, todo, run_cell, continue_on_error)
        else:
            _run_pool(sweep, todo, run_cell, continue_on_error, jobs)
    except KeyboardInterrupt:
        sweep.report_interrupt()
        raise
    return [replace(sweep.outcomes[cell.key], cell=cell) for cell in ordered]


class _Sweep:
    """What is closed so far, and who hears of it."""

    def __init__(self, *, store: Store, num_total: int, on_event: OnEvent | None, git: GitState) -> None:
        self.store = store
        self.num_total = num_total
        self.outcomes: dict[str, CellOutcome] = {}
        self._on_event = on_event
        # The code that runs was imported before the first cell: an edit in the middle of a sweep is not in it.
        self._git = git
        self._reasons: dict[str, str] = {}

    def reuse(self, cells: Sequence[Cell], *, force: bool) -> Iterator[Cell]:
        """Closes the cells that are done, yields the others."""
        for cell in cells:
            verdict = self.store.inspect(cell)
            if verdict.done and not force:
                self._close(
                    CellOutcome(
                        cell=cell,
                        status="reused",
                        reason=verdict.reason,
                        folder=self.store.folder(cell),
                        validity=self.store.validity(cell),
                    )
                )
            else:
                self._reasons[cell.key] = f"forced ({verdict.reason})" if force else verdict.reason
                yield cell

    def start(self, cell: Cell) -> None:
        self._tell("started", cell, self._reasons[cell.key])

    def keep(self, cell: Cell, record: RunRecord, timing: Timing) -> None:
        provenance = collect(
            obtained=record.obtained,
            timing=timing,
            git=self._git,
            calibration=record.manifest.get("calibration"),
            dataset=record.manifest.get("dataset"),
        )
        folder = self.store.save(cell, record, provenance=provenance)
        self._close(
            CellOutcome(
                cell=cell,
                status="ran",
                reason=self._reasons[cell.key],
                folder=folder,
                validity=self.store.validity(cell),
                elapsed_s=timing.elapsed_s,
            )
        )

    def fail(self, cell: Cell, error: Exception, *, is_last: bool) -> None:
        """``is_last``: the error is raised from the run, so its traceback need not be in the log too."""
        if not is_last and not isinstance(error, UserError):
            logger.error("%s failed", cell.folder_name, exc_info=error)
        message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        self._close(CellOutcome(cell=cell, status="failed", reason=message))

    def report_interrupt(self) -> None:
        num_failed = sum(outcome.status == "failed" for outcome in self.outcomes.values())
        num_left = self.num_total - len(self.outcomes)
        self._tell(
            "interrupted",
            None,
            f"interrupted: {len(self.outcomes) - num_failed} cells done, {num_failed} failed, "
            f"{num_left} left; the same command continues",
        )

    def _close(self, outcome: CellOutcome) -> None:
        self.outcomes[outcome.cell.key] = outcome
        self._tell(outcome.status, outcome.cell, outcome.reason)

    def _tell(
        self, kind: Literal["started", "ran", "reused", "failed", "interrupted"], cell: Cell | None, message: str
    ) -> None:
        if self._on_event is not None:
            self._on_event(
                CellEvent(
                    kind=kind, cell=cell, message=message, num_closed=len(self.outcomes), num_total=self.num_total
                )
            )


def _timed(run_cell: RunCell, cell: Cell) -> _Timed:
    started, began = utc_now(), time.perf_counter()
    record = run_cell(cell)
    elapsed = time.perf_counter() - began
    return record, Timing(started_utc=started, finished_utc=utc_now(), elapsed_s=elapsed)


def _run_here(sweep: _Sweep, cells: Sequence[Cell], run_cell: RunCell, continue_on_error: bool) -> None:
    for cell in cells:
        sweep.start(cell)
        try:
            sweep.keep(cell, *_timed(run_cell, cell))
        except Exception as error:
            sweep.fail(cell, error, is_last=not continue_on_error)
            if not continue_on_error:
                raise


def _run_pool(sweep: _Sweep, cells: Sequence[Cell], run_cell: RunCell, continue_on_error: bool, jobs: int) -> None:
    """After a failure that ends the run, cells already running still finish and are stored."""
    failures: dict[int, Exception] = {}
    with _pool(jobs) as pool:
        index: dict[Future[_Timed], int] = {}
        for i, cell in enumerate(cells):
            sweep.start(cell)
            index[pool.submit(partial(_timed, run_cell), cell)] = i
        for future in as_completed(index):
            if future.cancelled():
                continue
            cell = cells[index[future]]
            try:
                sweep.keep(cell, *future.result())
            except Exception as error:
                sweep.fail(cell, error, is_last=not continue_on_error)
                failures[index[future]] = error
                if not continue_on_error:
                    for other in index:
                        other.cancel()
    if failures and not continue_on_error:
        raise failures[min(failures)]


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    # Spawned, not forked: forking a process that runs threads (torch, pyarrow) can deadlock.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(max_workers=jobs, mp_context=context, initializer=_die_on_interrupt)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _die_on_interrupt() -> None:
    """A terminal's Ctrl-C reaches the whole process group: workers end at once, without a traceback each."""
    # Where the parent ignores it (a job in the background), so do they.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
