"""A system without a model: requests through the scripted engine on a virtual clock. Nothing in the harness knows it."""

import hashlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from support.driven import FakeEngine, make_requests

from engines.dllm.plan import Request
from engines.errors import UserError, require
from repro.families.dllm.record import DLLM, drive_engine
from repro.runs.cell import Cell
from repro.runs.experiment import Experiment, prepare
from repro.runs.family import Family
from repro.runs.record import Obtained, OnProgress, RunRecord
from repro.runs.step_driver import VirtualClock

NAME = "support.fake_system:FAKE"
KNOBS = frozenset({"num_prompts", "service_s"})


def nothing() -> None:
    """Done before a run."""


@dataclass(frozen=True, kw_only=True)
class FakeProvenance:
    name: str
    checksum: str


@dataclass(frozen=True, kw_only=True)
class FakeWorkload:
    requests: Sequence[Request]
    provenance: FakeProvenance


@dataclass(frozen=True, kw_only=True)
class FakeDeployment:
    service_s: float
    obtained: Obtained = "simulated"
    before: Callable[[], object] = nothing
    """Called when a run begins: raises, sleeps or takes a note. It pickles where the run does."""
    after: Callable[[RunRecord], RunRecord] | None = None
    """Makes another record of the run's."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    lacks: str | None = None
    """What a machine has to have and none has."""
    basis: ClassVar[str] = ""
    modules: ClassVar[tuple[str, ...]] = ("support.fake_system",)

    def check_machine(self) -> None:
        require(self.lacks is None, f"this machine has no {self.lacks}")

    def run(self, workload: FakeWorkload, on_progress: OnProgress | None = None) -> RunRecord:
        self.before()
        clock = VirtualClock()
        engine = FakeEngine(clock, service_s=self.service_s)
        record = drive_engine(engine, workload.requests, clock, on_progress=on_progress)
        record = record.with_manifest(
            obtained=self.obtained, dataset=asdict(workload.provenance), facts=dict(self.facts), calibration=None
        )
        return record if self.after is None else self.after(record)


@dataclass(frozen=True)
class FakeSystem:
    name: ClassVar[str] = NAME
    title: ClassVar[str] = "Fake"
    family: ClassVar[Family] = DLLM

    def prepare(self, cell: Cell) -> tuple[FakeDeployment, FakeWorkload]:
        """Poisson arrivals, or all at once; an executor other than virtual says that it measured."""
        knobs: dict[str, Any] = {name: value for name, value in cell.knobs if name != "basis"}
        if unknown := sorted(knobs.keys() - KNOBS):
            raise UserError(f"{unknown[0]}={knobs[unknown[0]]!r} has no effect with system={NAME!r}")
        arrivals = np.zeros(knobs.get("num_prompts", 30))
        if cell.rate is not None:
            arrivals = np.random.default_rng(cell.seed).exponential(1 / cell.rate, size=len(arrivals)).cumsum()
        checksum = hashlib.sha256(arrivals.tobytes()).hexdigest()
        workload = FakeWorkload(
            requests=make_requests(arrivals.tolist()), provenance=FakeProvenance(name=cell.dataset, checksum=checksum)
        )
        obtained: Obtained = "simulated" if cell.executor == "virtual" else "measured"
        return FakeDeployment(service_s=knobs.get("service_s", 1.0), obtained=obtained), workload


FAKE = FakeSystem()
OTHER = FakeSystem()
"""The same under another name."""


def fake_cell(
    rate: float | None = 0.5, seed: int = 0, *, system: str = NAME, executor: str = "virtual", **knobs: Any
) -> Cell:
    return Cell(
        figure="fig",
        system=system,
        dataset="poisson",
        platform="cpu",
        executor=executor,
        rate=rate,
        seed=seed,
        knobs=tuple(knobs.items()),
    )


def deployed(experiment: Experiment, **changes: Any) -> Experiment:
    """The same cell with another deployment: one that breaks, say."""
    return replace(experiment, deployment=replace(experiment.deployment, **changes))


def breaking(cell: Cell, error: Exception) -> Experiment:
    return deployed(prepare(cell), before=partial(fail_with, error))


def die_until(folder: Path, num_deaths: int) -> None:
    """The process is killed, as the kernel does where memory runs out, until so many were."""
    if len(list(folder.iterdir())) < num_deaths:
        (folder / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def hang_once(folder: Path) -> None:
    """Says that it began, and the first time does not end."""
    is_first = not list(folder.iterdir())
    (folder / str(os.getpid())).touch()
    if is_first:
        time.sleep(600)


def fail_with(error: Exception) -> None:
    raise error
