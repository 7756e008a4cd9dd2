"""Runs experiments, each at most once, here or in fresh processes; a stop loses only those in flight."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import partial

from repro.runs.drivers.steps import DriveProgress, OnProgress
from repro.runs.experiment import Experiment
from repro.runs.provenance import Timing, utc_now
from repro.runs.record import RunRecord
from repro.runs.session import Session
from repro.runs.workers import begin_worker, ending_with_its_workers

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
    experiments: Sequence[Experiment], jobs: int, on_start: OnStart, on_done: OnDone, on_error: OnError
) -> None:
    """``jobs`` at a time in fresh processes, for simulated runs only: measured ones would disturb each other. After an
    error that ends the sweep, runs under way still finish and are kept."""
    failures: dict[int, Exception] = {}
    with ending_with_its_workers(_pool(jobs)) as pool:
        index: dict[Future[tuple[RunRecord, Timing]], int] = {}
        for i, experiment in enumerate(experiments):
            on_start(experiment)
            index[pool.submit(timed, experiment)] = i
        for future in as_completed(index):
            number = index.pop(future)  # with the last reference to it goes its record, a hundred megabytes and more
            if future.cancelled():
                continue
            experiment = experiments[number]
            try:
                on_done(experiment, *future.result())
            except Exception as error:
                if not on_error(experiment, error):
                    failures[number] = error
                    for other in index:
                        other.cancel()
    if failures:
        raise failures[min(failures)]


def _pool(jobs: int) -> ProcessPoolExecutor:
    # Spawned, not forked: forking a process that runs threads (torch, pyarrow) can deadlock.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=begin_worker, initargs=(os.getpid(),))
