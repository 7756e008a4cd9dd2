"""Runs experiments, each at most once, here or in fresh processes; a stop loses only those in flight."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from repro.runs.drivers.steps import DriveProgress, OnProgress
from repro.runs.experiment import Experiment
from repro.runs.provenance import Timing, utc_now
from repro.runs.record import RunRecord
from repro.runs.session import Session
from repro.runs.workers import begin_worker, ending_with_its_workers

AHEAD = 2
"""Runs that a process is given at once: it is at the next while the one before is stored."""

OnStart = Callable[[Experiment], None]
OnDone = Callable[[Experiment, RunRecord, Timing], None]
OnStep = Callable[[Experiment, DriveProgress], None]
OnError = Callable[[Experiment, Exception], bool]
"""Whether to go on."""


def timed(
    experiment: Experiment, on_progress: OnProgress | None = None, session: Session | None = None
) -> tuple[RunRecord, Timing]:
    """A run in a session says besides how busy the machine was."""
    started, began, load = utc_now(), time.perf_counter(), None
    if session is None:
        record = experiment.run(on_progress)
    else:
        record, load = session.measure(partial(experiment.run, on_progress))
    elapsed = time.perf_counter() - began
    return record, Timing(started_utc=started, finished_utc=utc_now(), elapsed_s=elapsed, load=load)


def run_here(
    experiments: Iterable[Experiment],
    on_start: OnStart,
    on_done: OnDone,
    on_error: OnError,
    on_step: OnStep | None = None,
    session: Session | None = None,
) -> None:
    """One after the other; raises the error that is not to be gone on after."""
    for experiment in experiments:
        on_start(experiment)
        try:
            heard = None if on_step is None else partial(on_step, experiment)
            on_done(experiment, *timed(experiment, heard, session))
        except Exception as error:
            if not on_error(experiment, error):
                raise


def run_in_pool(
    experiments: Sequence[Experiment],
    jobs: int,
    on_start: OnStart,
    on_done: Callable[..., None],
    on_error: OnError,
    work: Callable[[Experiment], tuple[Any, ...]] = timed,
) -> None:
    """``jobs`` at a time in fresh processes, for simulated runs only: measured ones would disturb each other. Repeats of a
    cell go to one process. After an error that ends the sweep, runs under way still finish and are kept.

    ``on_done`` gets the experiment and what ``work`` made of it in its process. Packing a run takes about as long as a short
    simulation: done here, one after the other, the processes would wait for it.
    """
    failures: dict[int, Exception] = {}
    turns = Turns(map(repeated, experiments), jobs)
    index: dict[Future[tuple[Any, ...]], tuple[int, int]] = {}
    with ExitStack() as stack:
        pools = [stack.enter_context(ending_with_its_workers(_process())) for _ in range(jobs)]

        def hand_over(worker: int) -> None:
            if failures or (number := turns.take(worker)) is None:
                return
            on_start(experiments[number])
            try:
                future = pools[worker].submit(work, experiments[number])
            except BrokenProcessPool:  # the run before took its process with it, for want of memory say
                pools[worker] = stack.enter_context(ending_with_its_workers(_process()))
                future = pools[worker].submit(work, experiments[number])
            index[future] = number, worker

        for worker in [*range(jobs)] * AHEAD:
            hand_over(worker)
        while index:
            future = next(iter(wait(index, return_when=FIRST_COMPLETED).done))
            number, worker = index.pop(
                future
            )  # with the last reference to it goes its record, a hundred megabytes and more
            hand_over(worker)
            try:
                on_done(experiments[number], *future.result())
            except Exception as error:
                if not on_error(experiments[number], error):
                    failures[number] = error
    if failures:
        raise failures[min(failures)]


class Turns:
    """Which of the experiments a process takes next: the first that is kin to those it had, or, up to its share of all
    kins, to none that anyone had. One with nothing left takes over what has most left to do."""

    def __init__(self, kins: Iterable[Hashable], num_workers: int) -> None:
        self._left = dict(enumerate(kins))
        self._owner: dict[Hashable, int] = {}
        self._share = math.ceil(len(set(self._left.values())) / num_workers)

    def take(self, worker: int) -> int | None:
        """Its place in the list; None at the end."""
        if not self._left:
            return None
        may_begin = sum(owner == worker for owner in self._owner.values()) < self._share
        nobody = worker if may_begin else None
        number = next((n for n, kin in self._left.items() if self._owner.get(kin, nobody) == worker), None)
        if number is None:
            ((kin, _),) = Counter(self._left.values()).most_common(1)
            number = next(n for n, other in self._left.items() if other == kin)
        self._owner[self._left.pop(number)] = worker
        return number


def repeated(experiment: Experiment) -> Hashable:
    """What the repeats of a cell share, whose seeds differ, and so their requests: what a deployment finds out before it
    runs (AMPD's search simulates a dozen runs), it keeps for the next."""
    cell = experiment.cell
    return replace(cell, figure=None, seed=0, knobs=tuple(knob for knob in cell.knobs if knob[0] != "basis"))


def _process() -> ProcessPoolExecutor:
    # Spawned, not forked: forking a process that runs threads (torch, pyarrow) can deadlock.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=begin_worker, initargs=(os.getpid(),))
