"""Pools that make and pack a sweep's runs: this process and others of this machine, or a cluster (repro.runs.ray_pool)."""

import ctypes
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing import active_children, get_context, parent_process
from typing import Annotated, Any, Protocol

from engines.errors import RunError, UserError
from engines.knobs import Range
from engines.machine import delay_signals, usable_cores
from repro.runs.cell import BASIS, Cell
from repro.runs.experiment import Experiment
from repro.runs.provenance import GitState, collect, utc_now, why_unshareable
from repro.runs.record import DriveProgress, OnProgress, RunRecord
from repro.runs.sitting import Sitting, UnitLocks
from repro.runs.store import Packed, pack

MOST_LOSSES = 2
"""Workers that one run may lose: it is tried once more, and then given up."""


class Assignment:
    """Assigns runs to workers, which are numbered. A worker makes the runs of one group, then those of another group. If no group is
    waiting, it helps with the largest group."""

    def __init__(self, groups: Iterable[Sequence[Experiment]]) -> None:
        self._waiting = deque(map(deque, groups))
        self._groups: dict[int, deque[Experiment]] = {}
        """The remaining runs of each worker's group."""
        self._losses: Counter[str] = Counter()

    @property
    def is_left(self) -> bool:
        """Whether there is a run that no worker has taken."""
        return bool(self._waiting) or any(self._groups.values())

    def take(self, worker: int) -> Experiment | None:
        """The worker's next run; None if no run is left."""
        group = self._groups.pop(worker, None)
        if not group and self._waiting:
            group = self._waiting.popleft()
        if not group:
            group = max(self._groups.values(), key=len, default=None)
        if not group:
            return None
        self._groups[worker] = group
        return group.popleft()

    def lost(self, worker: int, culprit: Experiment) -> bool:
        """Notes that a worker was lost while it made ``culprit``. Its other runs are taken again. Returns whether the culprit is given
        up."""
        group = self._groups.pop(worker)
        is_shared = any(group is other for other in self._groups.values())
        self._losses[culprit.cell.key] += 1
        is_given_up = self._losses[culprit.cell.key] == MOST_LOSSES
        retries = deque[Experiment]() if is_given_up else deque([culprit])
        if not is_shared:
            retries += group
        if retries:
            self._waiting.appendleft(retries)
        return is_given_up


def group_repeats(experiments: Iterable[Experiment]) -> list[list[Experiment]]:
    """Groups the repeats of a cell, which differ only in their seeds and so in their requests. The process of a group reuses what a
    deployment finds out before it runs (AMPD's search simulates a dozen runs)."""
    groups: dict[Cell, list[Experiment]] = {}
    for experiment in experiments:
        repeated = replace(experiment.cell.with_seed(0).without(BASIS), figure=None)
        groups.setdefault(repeated, []).append(experiment)
    return list(groups.values())


# -- at work ------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""After so many seconds without news from any worker, we log that we are waiting."""


class WorkerLost(RunError):
    """A worker ended before it had finished its run."""


class Worker(Protocol):
    """Makes one run at a time."""

    def submit(self, experiment: Experiment | None) -> Future[Any]:
        """A future of the experiment's run. For None, the future is done once the worker can work."""

    def result(self, future: Future[Any]) -> Any:
        """The result of a finished future. Raises WorkerLost if the worker is gone, or else what the run raised."""

    def hopeless(self) -> str | None:
        """Why the worker can never start, because what it needs is gone; None if it may still start."""


OnStep = Callable[[Experiment, DriveProgress], None]
"""Called for each step of a run in this process."""
Start = Callable[[], AbstractContextManager[Worker]]
"""Context of a worker, which ends with the body; if the body raises, the worker ends at once."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Callbacks while runs are made."""

    on_start: Callable[[Experiment], None]
    on_done: Callable[[Experiment, Packed], None]
    on_error: Callable[[Experiment, Exception], None]
    """Raises an error to end the sweep, or returns to continue it."""
    on_step: OnStep | None = None


def run_by_workers(assignment: Assignment, starts: Sequence[Start], hooks: Hooks) -> None:
    """Makes the runs with one worker for each of ``starts``; a worker has one run at a time. A lost worker is replaced, and its run is made
    again. After an error that ends the sweep, runs that have begun still finish and are stored."""
    with ExitStack() as stack:
        _Crew(assignment, starts, hooks, stack).work()


class _Crew:
    def __init__(self, assignment: Assignment, starts: Sequence[Start], hooks: Hooks, stack: ExitStack) -> None:
        self._assignment = assignment
        self._starts = starts
        self._hooks = hooks
        self._stack = stack
        self._workers: dict[int, tuple[Worker, ExitStack]] = {}
        """Workers and what ends them, by their place in ``starts``. A replacement takes the place of the lost worker."""
        self._in_hand: dict[Future[Any], tuple[int, Experiment | None]] = {}
        """The place and experiment of each future; None: the worker is starting."""
        self._idle: set[int] = set()
        self._error: Exception | None = None
        """The first error that ends the sweep."""

    def work(self) -> None:
        for place in range(len(self._starts)):
            self._start_worker(place)
        while self._is_making or (self._assignment.is_left and self._error is None):
            done, _ = wait(self._in_hand, timeout=PATIENCE_S, return_when=FIRST_COMPLETED)
            for future in [each for each in self._in_hand if each in done]:
                self._finish_run(*self._in_hand.pop(future), future)
            for place in sorted(self._idle):
                self._start_run(place)
            if not done:
                self._check_starting()
        if self._error is not None:
            raise self._error

    @property
    def _is_making(self) -> bool:
        return any(experiment is not None for _, experiment in self._in_hand.values())

    def _start_worker(self, index: int) -> None:
        stack = self._stack.enter_context(ExitStack())
        worker = stack.enter_context(self._starts[index]())
        self._workers[index] = worker, stack
        self._in_hand[worker.submit(None)] = index, None

    def _start_run(self, index: int) -> None:
        experiment = None if self._error is not None else self._assignment.take(index)
        if experiment is None:
            self._idle.add(index)
            return
        self._idle.discard(index)
        self._hooks.on_start(experiment)
        self._in_hand[self._workers[index][0].submit(experiment)] = index, experiment

    def _finish_run(self, index: int, experiment: Experiment | None, future: Future[Any]) -> None:
        worker, _ = self._workers[index]
        try:
            packed = worker.result(future)
        except WorkerLost as error:
            if experiment is None:
                self._drop_worker(index, worker.hopeless() or str(error))
            else:
                self._replace(index, experiment, error)
        except Exception as error:
            if experiment is None:
                raise
            self._report(experiment, error)
            self._start_run(index)
        else:
            # The worker begins its next run while this one is stored.
            self._start_run(index)
            if experiment is not None:
                self._store(experiment, packed)

    def _store(self, experiment: Experiment, packed: Packed) -> None:
        try:
            self._hooks.on_done(experiment, packed)
        except Exception as error:
            self._report(experiment, error)

    def _report(self, experiment: Experiment, error: Exception) -> None:
        try:
            self._hooks.on_error(experiment, error)
        except Exception as ending:
            self._error = self._error or ending

    def _replace(self, index: int, experiment: Experiment, error: WorkerLost) -> None:
        self._workers.pop(index)[1].close()
        if self._assignment.lost(index, experiment):
            self._report(experiment, WorkerLost(f"{error}; it was tried {MOST_LOSSES} times"))
        if self._assignment.is_left and self._error is None:
            logger.warning("%s while it made %s, which is made again", error, experiment.cell.folder_name)
            self._start_worker(index)

    def _check_starting(self) -> None:
        """Called after ``PATIENCE_S`` without news from any worker."""
        for future, (place, experiment) in list(self._in_hand.items()):
            if experiment is None and (reason := self._workers[place][0].hopeless()) is not None:
                del self._in_hand[future]
                self._drop_worker(place, reason)
        if not self._is_making:
            logger.warning("waiting for the first of %d workers: what they need is not free", len(self._starts))

    def _drop_worker(self, index: int, reason: str) -> None:
        self._workers.pop(index)[1].close()
        if not self._workers:
            raise RunError(f"{reason}: nothing is left to make the other runs, run the command again") from None
        logger.warning("%s; its runs are made elsewhere", reason)


_PR_SET_PDEATHSIG = 1
LOST = "a process of this machine ended (it was killed, for want of memory say)"
NOT_BEGUN = (
    "a process of this machine ended before its first run (it was killed, or ran the script again that had started it: put what "
    'sweeps under if __name__ == "__main__":, or give jobs=1)'
)


def begin_worker(parent_pid: int) -> None:
    """Called first in a process that ``parent_pid`` has started. The process then ends whenever its parent ends, however that happens."""
    sys.stdout = sys.stderr  # what a policy prints must not stand among the command's answers
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The kernel signals only a future death of the parent. The thread also covers an earlier one, and systems without such a kernel.
    threading.Thread(target=_end_with_parent, args=(parent_pid,), name="end-with-parent", daemon=True).start()
    # A terminal's Ctrl-C reaches the whole process group: workers then end at once, without a traceback each. If the parent ignores it (a
    # job in the background), workers do too.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_with_parent(parent_pid: int) -> None:
    parent = parent_process()
    if parent is not None and os.getppid() == parent_pid:
        parent.join()
    os._exit(1)


@contextmanager
def worker_processes(num: int) -> Iterator[ProcessPoolExecutor]:
    """Yields a pool of at most ``num`` processes, which start when needed and end with the body. After an error (Ctrl-C, SIGTERM) they are
    killed, even if busy."""
    # Spawned, not forked: forking a process that runs threads (torch, pyarrow) can deadlock.
    pool = ProcessPoolExecutor(num, mp_context=get_context("spawn"), initializer=begin_worker, initargs=(os.getpid(),))
    old_pids = {child.pid for child in active_children()}
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in active_children():
            if child.pid not in old_pids:
                with suppress(OSError):
                    child.kill()
        raise
    pool.shutdown()


_OBJECTS = 100_000
"""Objects that a simulation makes before the garbage collector runs (Python's default: 700)."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Makes a run and packs it, in any process of any machine; holds what a run needs to know of its sweep.

    Packing a run takes about as long as a short simulation. If the sweep packed runs one by one, workers would wait.
    """

    git: GitState
    command: tuple[str, ...]
    """Cleaned, because another machine does not know the folders of this one."""

    def make(
        self, experiment: Experiment, on_progress: OnProgress | None = None, sitting: Sitting | None = None
    ) -> Packed:
        """Make and pack a run. In a sitting, its provenance also tells how busy the machine was."""
        threshold = gc.get_threshold()
        if not experiment.is_measured:
            # A simulation makes millions of small objects and no reference cycles. Looking for cycles took a quarter of its time.
            gc.set_threshold(_OBJECTS, *threshold[1:])
        try:
            started, start_s, load = utc_now(), time.perf_counter(), None
            if sitting is None:
                record = experiment.run(on_progress)
            else:
                record, load = sitting.measure(partial(experiment.run, on_progress))
            elapsed = time.perf_counter() - start_s
            provenance = collect(
                obtained=record.obtained,
                started_utc=started,
                elapsed_s=elapsed,
                load=load,
                git=self.git,
                calibration=record.manifest.get("calibration"),
                dataset=record.manifest.get("dataset"),
                argv=self.command,
                sitting=None if sitting is None else sitting.id,
                busy_s=_busy_s(experiment, record) if experiment.is_measured else None,
            )
            return pack(experiment, record, provenance)
        finally:
            gc.set_threshold(*threshold)


def _busy_s(experiment: Experiment, record: RunRecord) -> float | None:
    """Seconds of a measured run's steps, if its family has steps and the CPU computed them; else None."""
    if record.manifest.get("device", "cpu") != "cpu":
        return None
    compute = next((metric.compute for metric in experiment.family.metrics if metric.name == "busy_s"), None)
    return None if compute is None else compute(record)


Jobs = Annotated[int, Range(1, 1024)] | None
"""Runs at once; None leaves it to the pool."""
CELLS_PER_WORKER = 4
"""With fewer simulated cells per worker, another process costs more than it saves."""
KEPT_WORKLOADS = 64
"""Workloads that a process caches, because systems that are compared serve the same one."""


class Pool(Protocol):
    @property
    def is_here(self) -> bool:
        """Whether runs are measured on this machine's devices."""

    def placed(self, experiments: Sequence[Experiment]) -> list[Experiment]:
        """Return the experiments, with the measuring machine set in measured ones."""

    def check(self, experiments: Sequence[Experiment]) -> None:
        """Raise UserError, before the first run, if a machine lacks something that the runs need."""

    def simulate(self, experiments: Sequence[Experiment], jobs: int | None, packing: Packing, hooks: Hooks) -> None:
        """Make simulated runs with ``jobs`` workers at once; if None, the pool chooses. Other sweeps may make the same runs, with the same
        numbers."""

    def measure(
        self, experiments: Sequence[Experiment], sitting: Sitting, packing: Packing, locks: UnitLocks, hooks: Hooks
    ) -> None:
        """Make measured runs unit by unit, each by one worker that has a machine to itself."""


class LocalPool:
    """The pool of this machine. Measured runs are made in this process, alone, in one sitting."""

    is_here = True

    def placed(self, experiments: Sequence[Experiment]) -> list[Experiment]:
        return list(experiments)

    def check(self, experiments: Sequence[Experiment]) -> None:
        for experiment in experiments:
            experiment.check_machine()

    def simulate(self, experiments: Sequence[Experiment], jobs: int | None, packing: Packing, hooks: Hooks) -> None:
        """Starts other processes only if there are enough runs to gain by it."""
        obstacle = first_unshareable(experiments, is_remote=False)
        if obstacle is not None and (jobs or 1) > 1:
            raise UserError(f"jobs={jobs}: {obstacle}, or give jobs=1")
        jobs = 1 if obstacle is not None else jobs
        num = min(jobs or min(usable_cores(), max(1, len(experiments) // CELLS_PER_WORKER)), len(experiments))
        if num == 1:
            run_here(experiments, packing.make, hooks)
            return
        _leave_unguarded_script()
        run_by_workers(Assignment(group_repeats(experiments)), [partial(local_process, packing)] * num, hooks)

    def measure(
        self, experiments: Sequence[Experiment], sitting: Sitting, packing: Packing, locks: UnitLocks, hooks: Hooks
    ) -> None:
        # Close it whatever happens: whoever catches the sweep's error keeps it alive, and so would keep the lock.
        with closing(locks.one_by_one(experiments)) as locked:
            run_here(locked, partial(packing.make, sitting=sitting), hooks)


def first_unshareable(experiments: Iterable[Experiment], *, is_remote: bool) -> str | None:
    """The first thing in these runs that no other process (with ``is_remote``: none on another machine) can import, and why."""
    obstacles = (why_unshareable(experiment.cell, is_remote=is_remote) for experiment in experiments)
    return next((obstacle for obstacle in obstacles if obstacle is not None), None)


def run_here(
    experiments: Iterable[Experiment], make: Callable[[Experiment, OnProgress | None], Packed], hooks: Hooks
) -> None:
    """Makes the runs in this process, one after the other."""
    for experiment in experiments:
        hooks.on_start(experiment)
        try:
            on_progress = None if hooks.on_step is None else partial(hooks.on_step, experiment)
            hooks.on_done(experiment, make(experiment, on_progress))
        except Exception as error:
            hooks.on_error(experiment, error)


def _leave_unguarded_script() -> None:
    """Ends this process silently if it is still importing the script of its parent process. The parent then reports why."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(1)


@contextmanager
def local_process(packing: Packing) -> "Iterator[_Process]":
    """Yields a fresh process of this machine. Only for simulated runs, because measured ones would disturb each other."""
    with worker_processes(1) as pool:
        yield _Process(pool, packing)


class _Process:
    def __init__(self, pool: ProcessPoolExecutor, packing: Packing) -> None:
        self._pool = pool
        self._packing = packing
        with delay_signals():  # the first task starts the process
            self._begun = pool.submit(_do_nothing)
        self._pickled: dict[int, bytes] = {}
        """Pickled workloads by ``id``, because comparing workloads would take longer than it saves."""

    def hopeless(self) -> None:
        """Returns None: a local process can always start."""

    def submit(self, experiment: Experiment | None) -> Future[Any]:
        if experiment is None:
            return self._begun
        stripped = replace(experiment, workload=None)
        try:
            return self._pool.submit(_make, self._packing, stripped, self._pickled_workload(experiment.workload))
        except BrokenProcessPool as error:
            broken: Future[Any] = Future()
            broken.set_exception(error)
            return broken

    def _pickled_workload(self, workload: object) -> bytes:
        if id(workload) not in self._pickled:
            if len(self._pickled) == KEPT_WORKLOADS:
                self._pickled.clear()
            self._pickled[id(workload)] = pickle.dumps(workload, protocol=pickle.HIGHEST_PROTOCOL)
        return self._pickled[id(workload)]

    def result(self, future: Future[Any]) -> Any:
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise WorkerLost(NOT_BEGUN if future is self._begun else LOST) from error


def _do_nothing() -> None:
    """Does nothing; it returns once the process runs."""


def _make(packing: Packing, experiment: Experiment, workload: bytes) -> Packed:
    """Makes a run. Sending thousands of sessions takes a fifth of their simulation's time: each workload is sent whole and read once."""
    return packing.make(replace(experiment, workload=_unpickled(workload)))


_unpickled = lru_cache(maxsize=KEPT_WORKLOADS)(pickle.loads)
