"""Where a sweep's runs are made: in this process and others of this machine, or on a cluster (repro.runs.ray_pool)."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Annotated, Any, Protocol

from engines.errors import UserError
from engines.knobs import Range
from engines.runtime.signals import held
from repro.cores import usable_cores
from repro.runs.assignment import Assignment, by_repeats
from repro.runs.experiment import Experiment
from repro.runs.packing import Made, Packing
from repro.runs.runner import Hooks, WorkerLost, run_by_workers, run_here
from repro.runs.sitting import Sitting
from repro.runs.unit_locks import UnitLocks
from repro.runs.workers import begin_worker, ending_with_its_workers

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


def _leave_unguarded_script() -> None:
    """Where this process is still importing the script of the one that started it, which waits for it: it ends without a
    word, and the other one says why."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)


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
            experiment.deployment.check_machine()

    def simulate(self, experiments: Sequence[Experiment], jobs: int | None, packing: Packing, hooks: Hooks) -> None:
        """In processes of their own only where there are enough runs to gain by it."""
        num = min(jobs or min(usable_cores(), max(1, len(experiments) // CELLS_PER_WORKER)), len(experiments))
        if num == 1:
            run_here(experiments, packing.make, hooks)
        else:
            _leave_unguarded_script()
            run_by_workers(Assignment(by_repeats(experiments)), [partial(local_process, packing)] * num, hooks)

    def measure(
        self, experiments: Sequence[Experiment], sitting: Sitting, packing: Packing, locks: UnitLocks, hooks: Hooks
    ) -> None:
        # Closed whatever happens: the error that ends a sweep is kept by who catches it, and would keep the lock.
        with closing(locks.one_by_one(experiments)) as locked:
            run_here(locked, partial(packing.make, sitting=sitting), hooks)


@contextmanager
def local_process(packing: Packing) -> Iterator[_Process]:
    """A fresh process of this machine, for simulated runs only: measured ones would disturb each other."""
    # Spawned, not forked: forking a process that runs threads (torch, pyarrow) can deadlock.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, mp_context=context, initializer=begin_worker, initargs=(os.getpid(),))
    with ending_with_its_workers(pool):
        yield _Process(pool, packing)


class _Process:
    def __init__(self, pool: ProcessPoolExecutor, packing: Packing) -> None:
        self._pool = pool
        self._packing = packing
        self._children: list[Any] = []
        # For as long as the process lives: a cache of the module would hold workloads for ever.
        self._pickled = lru_cache(maxsize=KEPT_WORKLOADS)(_pickled)

    def begun(self) -> Future[Any]:
        """It starts with its first run."""
        future: Future[Any] = Future()
        future.set_result(None)
        return future

    def hopeless(self) -> None:
        """A process can always be started."""

    def submit(self, experiment: Experiment) -> Future[Made]:
        try:
            sent = replace(experiment, workload=None)
            others = {child.pid for child in multiprocessing.active_children()}
            with held():  # the first starts the process
                future = self._pool.submit(_make, self._packing, sent, self._pickled(_Itself(experiment.workload)))
            self._children += [child for child in multiprocessing.active_children() if child.pid not in others]
            return future
        except BrokenProcessPool as error:
            broken: Future[Made] = Future()
            broken.set_exception(error)
            return broken

    def result(self, future: Future[Any]) -> Any:
        try:
            return future.result()
        except BrokenProcessPool as error:
            for child in self._children:
                child.join(ENDING_S)
                if child.exitcode == UNGUARDED:
                    raise UserError(_UNGUARDED_SAID) from None
            raise WorkerLost(
                "a process of this machine ended while it made a run: it was killed, for want of memory say"
            ) from error


class _Itself:
    """Equal to what holds the same object: a workload is compared by what it is, which takes longer than it saves."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.held is self.held


def _pickled(workload: _Itself) -> bytes:
    return pickle.dumps(workload.held, protocol=pickle.HIGHEST_PROTOCOL)


@lru_cache(maxsize=KEPT_WORKLOADS)
def _unpickled(workload: bytes) -> Any:
    return pickle.loads(workload)


def _make(packing: Packing, experiment: Experiment, workload: bytes) -> Made:
    """A workload of thousands of sessions takes a fifth of the time of its simulation to be sent: each is sent whole and read once."""
    return packing.make(replace(experiment, workload=_unpickled(workload)))
