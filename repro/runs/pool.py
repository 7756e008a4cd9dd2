"""Where a sweep's runs are made: in this process and others of this machine, or on a cluster (repro.runs.ray_pool)."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Annotated, Any, Protocol

from engines.errors import UserError, require
from engines.knobs import Range, check_value
from engines.runtime.signals import held
from repro.cores import usable_cores
from repro.runs.assignment import Assignment, by_repeats
from repro.runs.cell import plain
from repro.runs.experiment import Experiment
from repro.runs.locks import UnitLocks
from repro.runs.packing import Packing
from repro.runs.runner import Hooks, WorkerLost, run_by_workers, run_here
from repro.runs.sitting import Sitting
from repro.runs.store import Packed
from repro.runs.workers import begin_worker, ending_with_its_workers

Jobs = Annotated[int, Range(1, 1024)] | None
"""Runs at once; None leaves it to the pool."""
POOLS = ("local", "ray")
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


def pool_of(name: str, address: str | None = None, jobs: int | None = None) -> AbstractContextManager[Pool]:
    """The pool of a name, which ends with the body. Refuses what cannot be, ``jobs`` that it is to make at once included."""
    check_value(Jobs, "jobs", jobs)
    name, address = plain(name), plain(address)
    require(address is None or isinstance(address, str), f"address={address!r} must be a text: auto or host:port")
    require(isinstance(name, str) and name in POOLS, f"pool={name!r} is unknown: use {' or '.join(POOLS)}")
    if name == "local":
        require(address is None, f"address={address!r} is of a Ray cluster: add --pool ray, or leave it out")
        return nullcontext(LocalPool())
    from repro.runs.ray_pool import RayPool

    return RayPool(address)


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
            return
        _leave_unguarded_script()
        run_by_workers(Assignment(by_repeats(experiments)), [partial(local_process, packing)] * num, hooks)

    def measure(
        self, experiments: Sequence[Experiment], sitting: Sitting, packing: Packing, locks: UnitLocks, hooks: Hooks
    ) -> None:
        # Closed whatever happens: the error that ends a sweep is kept by who catches it, and would keep the lock.
        with closing(locks.one_by_one(experiments)) as locked:
            run_here(locked, partial(packing.make, sitting=sitting), hooks)


def _leave_unguarded_script() -> None:
    """Where this process is still importing the script of the one that started it, which waits for it: it ends without a
    word, and the other one says why."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)


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
            for child in self._children:
                child.join(ENDING_S)
                if child.exitcode == UNGUARDED:
                    raise UserError(_UNGUARDED_SAID) from None
            raise WorkerLost("a process of this machine ended (it was killed, for want of memory say)") from error


def _begin() -> None:
    """Nothing: the process is there."""


def _make(packing: Packing, experiment: Experiment, workload: bytes) -> Packed:
    """A workload of thousands of sessions takes a fifth of the time of its simulation to be sent: each is sent whole and read once."""
    return packing.make(replace(experiment, workload=_unpickled(workload)))


@lru_cache(maxsize=KEPT_WORKLOADS)
def _unpickled(workload: bytes) -> Any:
    return pickle.loads(workload)
