"""Runs experiments, each at most once, here or by workers; a stop loses only those in flight."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from engines.errors import RunError
from repro.runs.drivers.steps import DriveProgress, OnProgress
from repro.runs.experiment import Experiment
from repro.runs.packing import Made
from repro.runs.turns import MOST_LOSSES, Turns

logger = logging.getLogger(__name__)

AHEAD = 2
"""Runs that a worker is given at once: it is at the next while the one before is stored."""
PATIENCE_S = 30.0
"""Without a sign of any worker, after which it is said that one is waited for."""


class WorkerLost(RunError):
    """A worker ended before it had made what it was given."""


class Worker(Protocol):
    """Makes one run after the other, in the order in which they are submitted."""

    @property
    def where(self) -> str:
        """For messages: which process, which node."""

    def begun(self) -> Future[Any]:
        """Done once it can work."""

    def hopeless(self) -> str | None:
        """Why it can never begin, and no other in its place: what it needs is gone. None where it may."""

    def submit(self, experiment: Experiment) -> Future[Any]: ...

    def result(self, future: Future[Any]) -> Any:
        """Of a future that is done. Raises WorkerLost where the worker is gone, else what the run has raised."""


Make = Callable[[Experiment, OnProgress | None], Made]
OnStart = Callable[[Experiment], None]
OnDone = Callable[[Experiment, Made], None]
OnStep = Callable[[Experiment, DriveProgress], None]
OnError = Callable[[Experiment, Exception], bool]
"""Whether to go on."""
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
    """One after the other; raises the error that is not to be gone on after."""
    for experiment in experiments:
        hooks.on_start(experiment)
        try:
            heard = None if hooks.on_step is None else partial(hooks.on_step, experiment)
            hooks.on_done(experiment, make(experiment, heard))
        except Exception as error:
            if not hooks.on_error(experiment, error):
                raise


def run_in_pool(
    experiments: Sequence[Experiment], turns: Turns, starts: Sequence[Start], hooks: Hooks, *, ahead: int = AHEAD
) -> None:
    """By a worker of each of ``starts``, which is given ``ahead`` runs at once. One that is lost is replaced, and its runs
    are made again. After an error that ends the sweep, runs under way still finish and are kept."""
    with ExitStack() as stack:
        _Crew(experiments, turns, starts, hooks, ahead, stack).work()


class _Crew:
    def __init__(
        self,
        experiments: Sequence[Experiment],
        turns: Turns,
        starts: Sequence[Start],
        hooks: Hooks,
        ahead: int,
        stack: ExitStack,
    ) -> None:
        self._experiments = experiments
        self._turns = turns
        self._starts = starts
        self._hooks = hooks
        self._ahead = ahead
        self._stack = stack
        self._workers: dict[int, Worker] = {}
        self._ends: dict[int, ExitStack] = {}
        self._flying: dict[int, deque[tuple[int, Future[Any]]]] = {}
        """Of the workers that have begun: their runs, in the order in which they are made."""
        self._beginning: dict[int, Future[Any]] = {}
        self._num_stillborn = 0
        """Workers in a row that were lost before they began."""
        self._failures: dict[int, Exception] = {}
        self._suspects: set[int] = set()
        """Runs that a worker was lost with, one of several in its hands: which of them it was making cannot be told, as the
        answer of one that it had made may be lost with it. They are made one at a time."""

    def work(self) -> None:
        for place in range(len(self._starts)):
            self._engage(place)
        while any(self._flying.values()) or (self._turns.is_left and not self._failures):
            waiting = [*self._beginning.values(), *(future for own in self._flying.values() for _, future in own)]
            if not wait(waiting, timeout=PATIENCE_S, return_when=FIRST_COMPLETED).done:
                self._look()
            for place in [place for place, future in self._beginning.items() if future.done()]:
                self._begin(place)
            self._hand_over()
            for place in [place for place, own in self._flying.items() if own and own[0][1].done()]:
                self._finish(place)
            self._hand_over()
        if self._failures:
            raise self._failures[min(self._failures)]

    def _engage(self, place: int) -> None:
        if place in self._ends:
            self._ends[place].close()
        self._ends[place] = end = self._stack.enter_context(ExitStack())
        self._workers[place] = worker = end.enter_context(self._starts[place]())
        self._beginning[place] = worker.begun()

    def _look(self) -> None:
        """After a while without a sign of any."""
        for place in list(self._beginning):
            if (reason := self._workers[place].hopeless()) is not None:
                del self._beginning[place]
                self._retire(place, reason)
        if not self._flying:
            logger.warning("waiting for the first of %d workers: what they need is not free", len(self._starts))

    def _retire(self, place: int, reason: str) -> None:
        self._ends[place].close()
        if not self._beginning and not self._flying:
            raise RunError(f"{reason}: nothing is left to make the other runs, run the command again")
        logger.warning("%s; its runs are made elsewhere", reason)

    def _begin(self, place: int) -> None:
        try:
            self._workers[place].result(self._beginning.pop(place))
        except WorkerLost:
            if (reason := self._workers[place].hopeless()) is not None:
                self._retire(place, reason)
                return
            self._num_stillborn += 1
            if self._num_stillborn >= MOST_LOSSES * len(self._starts):
                raise
            self._engage(place)
        else:
            self._num_stillborn = 0
            self._flying[place] = deque()

    def _hand_over(self) -> None:
        """One each, and then another each, as long as there are any."""
        for num in range(1, (1 if self._suspects else self._ahead) + 1):
            for place in [place for place, own in self._flying.items() if len(own) < num]:
                if self._failures or (number := self._turns.take(place)) is None:
                    continue
                experiment = self._experiments[number]
                self._hooks.on_start(experiment)
                self._flying[place].append((number, self._workers[place].submit(experiment)))

    def _finish(self, place: int) -> None:
        number, future = self._flying[place].popleft()
        in_hand = [number, *(other for other, _ in self._flying[place])]
        if self._ahead > 1:
            self._hand_over()
        try:
            made = self._workers[place].result(future)
            # With the last reference to it go the files of its run.
            del future
            self._hooks.on_done(self._experiments[number], made)
        except WorkerLost as error:
            self._replace(place, number, in_hand, error)
        except Exception as error:
            self._failed(number, error)
        else:
            self._suspects.discard(number)

    def _replace(self, place: int, number: int, in_hand: Sequence[int], error: WorkerLost) -> None:
        """``in_hand``: the runs that the worker may have been making, ``number`` the first of them."""
        culprit = number if len(in_hand) == 1 else None
        self._suspects.update(in_hand)
        rest = [other for other, _ in self._flying.pop(place)]
        for lost in self._turns.lost(place, [number, *rest], culprit):
            self._failed(lost, WorkerLost(f"{error}; it was tried alone {MOST_LOSSES} times"))
        if self._turns.is_left and not self._failures:
            logger.warning("%s; its runs are made again", error)
            self._engage(place)

    def _failed(self, number: int, error: Exception) -> None:
        self._suspects.discard(number)
        if not self._hooks.on_error(self._experiments[number], error):
            self._failures[number] = error
