"""Runs experiments, each at most once, here or by workers; a stop loses only those in flight."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from engines.errors import RunError
from repro.runs.assignment import MOST_LOSSES, Assignment
from repro.runs.drivers.steps import DriveProgress, OnProgress
from repro.runs.experiment import Experiment
from repro.runs.packing import Made

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""Without a sign of any worker, after which it is said that one is waited for."""


class WorkerLost(RunError):
    """A worker ended before it had made what it was given."""


class Worker(Protocol):
    """Makes one run at a time."""

    def begun(self) -> Future[Any]:
        """Done once it can work."""

    def hopeless(self) -> str | None:
        """Why it can never begin: what it needs is gone. None where it may."""

    def submit(self, experiment: Experiment) -> Future[Any]: ...

    def result(self, future: Future[Any]) -> Any:
        """Of a future that is done. Raises WorkerLost where the worker is gone, else what the run has raised."""


Make = Callable[[Experiment, OnProgress | None], Made]
OnStart = Callable[[Experiment], None]
OnDone = Callable[[Experiment, Made], None]
OnStep = Callable[[Experiment, DriveProgress], None]
OnError = Callable[[Experiment, Exception], None]
"""Raises what ends the sweep; returns where it goes on."""
Start = Callable[[], AbstractContextManager[Worker]]
"""A worker, which ends with the body; at once where that ends by an exception."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What is told while runs are made."""

    on_start: OnStart
    on_done: OnDone
    on_error: OnError
    on_step: OnStep | None = None
    """Of runs made in this process."""


def run_here(experiments: Iterable[Experiment], make: Make, hooks: Hooks) -> None:
    """One after the other."""
    for experiment in experiments:
        hooks.on_start(experiment)
        try:
            heard = None if hooks.on_step is None else partial(hooks.on_step, experiment)
            hooks.on_done(experiment, make(experiment, heard))
        except Exception as error:
            hooks.on_error(experiment, error)


def run_by_workers(assignment: Assignment, starts: Sequence[Start], hooks: Hooks) -> None:
    """By a worker of each of ``starts``, each with one run in hand. One that is lost is replaced, and its run is made again.
    After an error that ends the sweep, runs under way still finish and are kept."""
    with ExitStack() as stack:
        stack.callback(assignment.close)
        _Crew(assignment, starts, hooks, stack).work()


class _Crew:
    def __init__(self, assignment: Assignment, starts: Sequence[Start], hooks: Hooks, stack: ExitStack) -> None:
        self._assignment = assignment
        self._starts = starts
        self._hooks = hooks
        self._stack = stack
        self._workers: dict[int, Worker] = {}
        """By their place among the starts; a lost one's is taken by who replaces it."""
        self._ends: dict[int, ExitStack] = {}
        self._beginning: dict[Future[Any], int] = {}
        self._making: dict[Future[Any], tuple[int, Experiment]] = {}
        self._idle: set[int] = set()
        self._error: Exception | None = None
        """The first that ends the sweep."""

    def work(self) -> None:
        for place in range(len(self._starts)):
            self._engage(place)
        while self._making or (self._assignment.is_left and self._error is None):
            waiting = [*self._making, *self._beginning]
            done, _ = wait(waiting, timeout=PATIENCE_S, return_when=FIRST_COMPLETED)
            for future in filter(done.__contains__, waiting):
                if future in self._beginning:
                    self._begin(self._beginning.pop(future), future)
                else:
                    self._finish(*self._making.pop(future), future)
            for place in sorted(self._idle):
                self._hand_over(place)
            if not done:
                self._look()
        if self._error is not None:
            raise self._error

    def _engage(self, place: int) -> None:
        self._ends[place] = end = self._stack.enter_context(ExitStack())
        self._workers[place] = worker = end.enter_context(self._starts[place]())
        self._beginning[worker.begun()] = place

    def _begin(self, place: int, future: Future[Any]) -> None:
        try:
            self._workers[place].result(future)
        except WorkerLost as error:
            self._retire(place, self._workers[place].hopeless() or str(error))
        else:
            self._hand_over(place)

    def _look(self) -> None:
        """After a while without a sign of any."""
        for future, place in list(self._beginning.items()):
            if (reason := self._workers[place].hopeless()) is not None:
                del self._beginning[future]
                self._retire(place, reason)
        if not self._making:
            logger.warning("waiting for the first of %d workers: what they need is not free", len(self._starts))

    def _retire(self, place: int, reason: str) -> None:
        del self._workers[place]
        self._ends.pop(place).close()
        if not self._workers:
            raise RunError(f"{reason}: nothing is left to make the other runs, run the command again")
        logger.warning("%s; its runs are made elsewhere", reason)

    def _hand_over(self, place: int) -> None:
        experiment = None if self._error is not None else self._assignment.take(place)
        if experiment is None:
            self._idle.add(place)
            return
        self._idle.discard(place)
        self._hooks.on_start(experiment)
        self._making[self._workers[place].submit(experiment)] = place, experiment

    def _finish(self, place: int, experiment: Experiment, future: Future[Any]) -> None:
        try:
            made = self._workers[place].result(future)
        except WorkerLost as error:
            self._replace(place, experiment, error)
        except Exception as error:
            self._failed(experiment, error)
            self._hand_over(place)
        else:
            # It is at the next while this one is stored.
            self._hand_over(place)
            self._stored(experiment, made)

    def _stored(self, experiment: Experiment, made: Made) -> None:
        try:
            self._hooks.on_done(experiment, made)
        except Exception as error:
            self._failed(experiment, error)

    def _replace(self, place: int, experiment: Experiment, error: WorkerLost) -> None:
        for lost in self._assignment.lost(place, experiment):
            self._failed(lost, WorkerLost(f"{error}; it was tried {MOST_LOSSES} times"))
        del self._workers[place]
        self._ends.pop(place).close()
        if self._assignment.is_left and self._error is None:
            logger.warning("%s while it made %s, which is made again", error, experiment.cell.folder_name)
            self._engage(place)

    def _failed(self, experiment: Experiment, error: Exception) -> None:
        try:
            self._hooks.on_error(experiment, error)
        except Exception as ending:
            self._error = self._error or ending
