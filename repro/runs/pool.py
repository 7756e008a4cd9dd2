"""Where a sweep's runs are made and packed: in this process and others of this machine, or on a cluster (repro.runs.ray_pool)."""

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing import active_children, get_context, parent_process
from typing import Annotated, Any, Protocol

from engines.errors import UserError
from engines.knobs import Range
from engines.machine import held, usable_cores
from repro.runs.code import held_here
from repro.runs.experiment import Experiment
from repro.runs.provenance import GitState, Timing, collect, utc_now
from repro.runs.record import OnProgress, RunRecord
from repro.runs.runner import Assignment, Hooks, WorkerLost, by_repeats, run_by_workers
from repro.runs.sitting import Sitting, UnitLocks
from repro.runs.store import Packed, pack

_PR_SET_PDEATHSIG = 1
LOST = "a process of this machine ended (it was killed, for want of memory say)"


def begin_worker(parent_pid: int) -> None:
    """Called first in a process that ``parent_pid`` has started: it ends when that does, however and whenever that is."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The kernel tells of a death to come; here is asked for one that was, and where there is no such kernel.
    threading.Thread(target=_end_with_parent, args=(parent_pid,), name="end-with-parent", daemon=True).start()
    # A terminal's Ctrl-C reaches the whole process group: workers end at once, without a traceback each. Where the
    # parent ignores it (a job in the background), so do they.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_with_parent(parent_pid: int) -> None:
    parent = parent_process()
    if parent is not None and os.getppid() == parent_pid:
        parent.join()
    os._exit(1)


@contextmanager
def worker_processes(num: int) -> Iterator[ProcessPoolExecutor]:
    """At most so many, which start as they are needed and end with the body; after an error (Ctrl-C, SIGTERM) they are killed, whatever
    they do."""
    # Spawned, not forked: forking a process that runs threads (torch, pyarrow) can deadlock.
    pool = ProcessPoolExecutor(num, mp_context=get_context("spawn"), initializer=begin_worker, initargs=(os.getpid(),))
    before = {child.pid for child in active_children()}
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in active_children():
            if child.pid not in before:
                with suppress(OSError):
                    child.kill()
        raise
    pool.shutdown()


_OBJECTS = 100_000
"""That a simulation makes before the collector looks at them (Python's default: 700)."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Makes a run and packs it, in whatever process of whatever machine it is called: what it knows is the sweep's.

    Packing a run takes about as long as a short simulation. Done by the sweep, one after the other, workers would wait.
    """

    git: GitState
    command: tuple[str, ...]
    """Cleaned: another machine knows nothing of the folders of this one."""

    def make(
        self, experiment: Experiment, on_progress: OnProgress | None = None, sitting: Sitting | None = None
    ) -> Packed:
        """A run in a sitting says besides how busy the machine was."""
        before = gc.get_threshold()
        if not experiment.is_measured:
            # A simulation makes millions of small objects and no rings of them: looking for some took a quarter of its time.
            gc.set_threshold(_OBJECTS, *before[1:])
        try:
            started, began, load = utc_now(), time.perf_counter(), None
            if sitting is None:
                record = experiment.run(on_progress)
            else:
                record, load = sitting.measure(partial(experiment.run, on_progress))
            elapsed = time.perf_counter() - began
            provenance = collect(
                obtained=record.obtained,
                timing=Timing(started_utc=started, finished_utc=utc_now(), elapsed_s=elapsed, load=load),
                git=self.git,
                calibration=record.manifest.get("calibration"),
                dataset=record.manifest.get("dataset"),
                argv=self.command,
                sitting=None if sitting is None else sitting.id,
                busy_s=_busy_s(experiment, record) if experiment.is_measured else None,
            )
            return pack(experiment, record, provenance)
        finally:
            gc.set_threshold(*before)


def _busy_s(experiment: Experiment, record: RunRecord) -> float | None:
    """Seconds of a measured run's steps, where its family has steps and they were computed on the CPU."""
    if record.manifest.get("device", "cpu") != "cpu":
        return None
    compute = next((metric.compute for metric in experiment.family.metrics if metric.name == "busy_s"), None)
    return None if compute is None else compute(record)


Jobs = Annotated[int, Range(1, 1024)] | None
"""Runs at once; None leaves it to the pool."""
CELLS_PER_WORKER = 4
"""Simulated cells below which another process costs more than it saves."""
KEPT_WORKLOADS = 64
"""That a process has at hand: systems that are compared serve the same one."""
UNGUARDED = 97
"""Exit code of a process that runs its script again and comes to the sweep that it was started for."""
ENDING_S = 5.0
_UNGUARDED_SAID = (
    'the script was run again by a process that its sweep had started: put what sweeps under if __name__ == "__main__":, '
    "or give jobs=1"
)


class Pool(Protocol):
    @property
    def is_here(self) -> bool:
        """Whether this machine's devices are those that runs are measured on."""

    def placed(self, experiments: Sequence[Experiment]) -> list[Experiment]:
        """The experiments, measured ones with the machine that they are measured on."""

    def check(self, experiments: Sequence[Experiment]) -> None:
        """Raise UserError for what machines lack that the runs need, before the first run."""

    def simulate(self, experiments: Sequence[Experiment], jobs: int | None, packing: Packing, hooks: Hooks) -> None:
        """By ``jobs`` workers at once; the pool says how many where that is None. Whoever else makes the same runs makes the
        same numbers."""

    def measure(
        self, experiments: Sequence[Experiment], sitting: Sitting, packing: Packing, locks: UnitLocks, hooks: Hooks
    ) -> None:
        """Unit by unit, each by one worker that has a machine to itself."""


class LocalPool:
    """This machine. Measured runs are made in this process, alone, in one sitting."""

    is_here = True

    def placed(self, experiments: Sequence[Experiment]) -> list[Experiment]:
        return list(experiments)

    def check(self, experiments: Sequence[Experiment]) -> None:
        for experiment in experiments:
            experiment.check_machine()

    def simulate(self, experiments: Sequence[Experiment], jobs: int | None, packing: Packing, hooks: Hooks) -> None:
        """In processes of their own only where there are enough runs to gain by it."""
        here = first_held_here(experiments, elsewhere=False)
        if here is not None and (jobs or 1) > 1:
            raise UserError(f"jobs={jobs}: {here}, or give jobs=1")
        jobs = 1 if here is not None else jobs
        num = min(jobs or min(usable_cores(), max(1, len(experiments) // CELLS_PER_WORKER)), len(experiments))
        if num == 1:
            run_here(experiments, packing.make, hooks)
            return
        _leave_unguarded_script()
        run_by_workers(Assignment(by_repeats(experiments)), [partial(local_process, packing)] * num, hooks)

    def measure(
        self, experiments: Sequence[Experiment], sitting: Sitting, packing: Packing, locks: UnitLocks, hooks: Hooks
    ) -> None:
        # Closed whatever happens: the error that ends a sweep is kept by who catches it, and would keep the lock.
        with closing(locks.one_by_one(experiments)) as locked:
            run_here(locked, partial(packing.make, sitting=sitting), hooks)


def first_held_here(experiments: Iterable[Experiment], *, elsewhere: bool) -> str | None:
    """The first thing that these runs name and no other process, or none on another machine, can import; and why."""
    found = (held_here(each.cell, elsewhere=elsewhere) for each in experiments)
    return next((each for each in found if each is not None), None)


def run_here(
    experiments: Iterable[Experiment], make: Callable[[Experiment, OnProgress | None], Packed], hooks: Hooks
) -> None:
    """One after the other."""
    for experiment in experiments:
        hooks.on_start(experiment)
        try:
            heard = None if hooks.on_step is None else partial(hooks.on_step, experiment)
            hooks.on_done(experiment, make(experiment, heard))
        except Exception as error:
            hooks.on_error(experiment, error)


def _leave_unguarded_script() -> None:
    """Where this process is still importing the script of the one that started it, which waits for it: it ends without a
    word, and the other one says why."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)


@contextmanager
def local_process(packing: Packing) -> "Iterator[_Process]":
    """A fresh process of this machine, for simulated runs only: measured ones would disturb each other."""
    with worker_processes(1) as pool:
        yield _Process(pool, packing)


class _Process:
    def __init__(self, pool: ProcessPoolExecutor, packing: Packing) -> None:
        self._pool = pool
        self._packing = packing
        others = {child.pid for child in multiprocessing.active_children()}
        with held():  # the first task starts the process
            self._begun = pool.submit(_begin)
        self._children = [child for child in multiprocessing.active_children() if child.pid not in others]
        self._pickled: dict[int, bytes] = {}
        """Workloads, by the identity of what is sent: to compare them takes longer than it saves."""

    def hopeless(self) -> None:
        """A process can always be started."""

    def submit(self, experiment: Experiment | None) -> Future[Any]:
        if experiment is None:
            return self._begun
        sent = replace(experiment, workload=None)
        try:
            return self._pool.submit(_make, self._packing, sent, self._sent(experiment.workload))
        except BrokenProcessPool as error:
            broken: Future[Any] = Future()
            broken.set_exception(error)
            return broken

    def _sent(self, workload: object) -> bytes:
        if id(workload) not in self._pickled:
            if len(self._pickled) == KEPT_WORKLOADS:
                self._pickled.clear()
            self._pickled[id(workload)] = pickle.dumps(workload, protocol=pickle.HIGHEST_PROTOCOL)
        return self._pickled[id(workload)]

    def result(self, future: Future[Any]) -> Any:
        try:
            return future.result()
        except BrokenProcessPool as error:
            until = time.monotonic() + ENDING_S
            for child in self._children:
                # The pool's own thread asks for it too: to whom the system does not tell it, it is None until that one has noted it.
                while child.exitcode is None and time.monotonic() < until:
                    time.sleep(0.01)
                if child.exitcode == UNGUARDED:
                    raise UserError(_UNGUARDED_SAID) from None
            raise WorkerLost(LOST) from error


def _begin() -> None:
    """Nothing: the process is there."""


def _make(packing: Packing, experiment: Experiment, workload: bytes) -> Packed:
    """A workload of thousands of sessions takes a fifth of the time of its simulation to be sent: each is sent whole and read once."""
    return packing.make(replace(experiment, workload=_unpickled(workload)))


_unpickled = lru_cache(maxsize=KEPT_WORKLOADS)(pickle.loads)
