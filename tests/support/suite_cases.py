"""A GPU suite of jobs without a model, and ways to end its process at any of them."""

import os
import signal
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from support.fake_system import deployed, fake_cell, nothing
from support.quiet_machine import keep_quiet

from repro.gpu_suite.suite import Job, Suite, write_summary
from repro.runs.experiment import prepare
from repro.runs.provenance import GitState

NUM_JOBS = 4
PLACES = ("run", "done", "archive")
"""In a job's run, once it is stored, and while the archive is written."""

AT = GitState(commit="abcdef0", dirty=False)
"""What a suite is told: to find it out, each would ask three processes."""


def make_jobs(at: int | None = None, before: Callable[[], object] = nothing) -> list[Job]:
    """Job ``at`` begins with ``before``."""
    experiments = [prepare(fake_cell(seed=i, executor="torch", num_prompts=3)) for i in range(NUM_JOBS)]
    return [
        Job(
            stage=f"stage {i // 2}",
            experiment=deployed(experiment, before=before) if i == at else experiment,
            estimate_s=1.0,
        )
        for i, experiment in enumerate(experiments)
    ]


def make_suite(jobs: list[Job], root: Path, on_done: Callable[[Suite], object] = write_summary, **more: Any) -> Suite:
    return Suite(
        jobs=jobs,
        root=root / "suite",
        platform="cpu-tiny",
        command="go on",
        export=root / "export",
        on_line=lambda _: None,
        on_done=on_done,
        git=AT,
        **more,
    )


class Count:
    """Counts down, and does something when it is over."""

    def __init__(self, n: int, end: Callable[[], object]) -> None:
        self._left, self._end = n, end

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._end()


def run_ended(root: Path, at: int, place: str, end: Callable[[], object]) -> None:
    """Run the suite until ``end`` ends it at job ``at``. Files are written once before the first job."""
    count, opened = Count(at + 2, end), tarfile.open

    def summarize(suite: Suite) -> None:
        count()
        write_summary(suite)

    def open_and_write(*arguments: Any, **named: Any) -> tarfile.TarFile:
        archive = opened(*arguments, **named)
        count()
        return archive

    if place == "run":
        make_suite(make_jobs(at, end), root).run(1000.0)
    elif place == "done":
        make_suite(make_jobs(), root, on_done=summarize).run(1000.0)
    else:
        tarfile.open = open_and_write
        try:
            make_suite(make_jobs(), root).run(1000.0)
        finally:
            tarfile.open = opened


def run_killed(root: Path, at: int, place: str) -> None:
    """In a process of its own, which does not survive it."""
    keep_quiet()
    run_ended(root, at, place, partial(os.kill, os.getpid(), signal.SIGKILL))
