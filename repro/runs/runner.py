"""Runs experiments by workers, each once: decides which run a worker makes next, and what happens to the run of a lost worker."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from engines.errors import RunError
from repro.runs.cell import BASIS
from repro.runs.experiment import Experiment
from repro.runs.record import DriveProgress
from repro.runs.store import Packed

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
    groups: dict[Hashable, list[Experiment]] = {}
    for experiment in experiments:
        cell = experiment.cell
        knobs = tuple(knob for knob in cell.knobs if knob[0] != BASIS)
        repeated = (cell.system, cell.dataset, cell.platform, cell.executor, cell.rate, knobs)
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
            raise RunError(f"{reason}: nothing is left to make the other runs, run the command again")
        logger.warning("%s; its runs are made elsewhere", reason)
