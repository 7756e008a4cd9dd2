"""A cell made concrete: its deployment, its requests, and the code that will decide its numbers."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engines.data import KINDS, installed
from engines.errors import RunError
from engines.knobs import knobs_of
from repro.runs.cell import BASIS, COMPARISON, Cell
from repro.runs.environment import check_instructions
from repro.runs.family import Family, request_times
from repro.runs.record import OnProgress, RunRecord
from repro.runs.system import SYSTEMS, TUNE, Deployment, reseeded, settings_of

if TYPE_CHECKING:
    from repro.runs.provenance import Code


@dataclass(frozen=True, kw_only=True)
class Experiment:
    cell: Cell
    """With a ``basis``: a digest of the requests, and of the checkpoint or calibration behind the numbers. Stored runs
    are then never reused for other data, another model or another fit."""
    deployment: Deployment
    workload: Any
    place: Mapping[str, Any] | None = None
    """Identity of the machine that measures the run, if it is not this one."""

    @property
    def family(self) -> Family:
        return SYSTEMS.get(self.cell.system).family

    @property
    def code(self) -> "Code":
        from repro.runs.provenance import code_of, plugged_in

        plug_ins = tuple(plugged_in(self.cell).values())
        plug_in_modules = {plug_in.partition(":")[0] for plug_in in plug_ins}
        modules = tuple(name for name in getattr(self.deployment, "modules", ()) if name not in plug_in_modules)
        return code_of(self.family.name, modules, plug_ins)

    @property
    def is_measured(self) -> bool:
        return self.deployment.obtained == "measured"

    @property
    def machine(self) -> Mapping[str, Any] | None:
        """Identity of the machine that a measured run depends on besides its code; None for a simulated run."""
        if not self.is_measured:
            return None
        if self.place is not None:
            return self.place
        from repro.runs.provenance import machine_identity

        return machine_identity(self.device)

    @property
    def device(self) -> str:
        return getattr(self.deployment, "device", "cpu")

    def check_machine(self) -> None:
        """Raises UserError if this machine lacks something that the run needs, or if this process uses other instructions than its
        environment says."""
        if self.is_measured and self.device == "cpu":
            check_instructions()
        self.deployment.check_machine()

    @property
    def is_tied_here(self) -> bool:
        """Whether only this machine can make the run."""
        return getattr(self.deployment, "is_tied_here", False)

    @property
    def num_gpus(self) -> int:
        """GPUs that the run needs on the machine that makes it."""
        if not self.is_measured or not self.device.startswith("cuda"):
            return 0
        return int(self.cell.knob_values.get("tensor_parallel") or 1)

    def run(self, on_progress: OnProgress | None = None) -> RunRecord:
        record = self.deployment.run(self.workload, on_progress)
        if record.obtained != self.deployment.obtained:
            raise RunError(
                f"system={self.cell.system!r} says of its run that it is {record.obtained}, and of itself {self.deployment.obtained}"
            )
        if not self.family.serves:
            return record
        # A policy that starves a request shows in the longest wait and latency, not in a mean.
        facts = {}
        for name, times in (("wait_s", "queue_wait_s"), ("latency_s", "e2el_s")):
            seconds = request_times(record, times)
            facts[name] = {"mean": float(seconds.mean()), "longest": float(seconds.max())} if seconds.size else None
        return record.with_manifest(facts={**record.facts, **facts})


def _with_module_names(cell: Cell) -> Cell:
    """Replaces names that installed packages give to knob values by their ``module:NAME``. The run is the same, and is tied to their
    code."""
    places = {
        name: installed(name)[value]
        for name, value in cell.knobs
        if name in KINDS and isinstance(value, str) and value in installed(name)
    }
    if not places:
        return cell
    knobs = {name: knob for kind in settings_of(cell.system) for name, knob in knobs_of(kind).items()}
    places = {
        name: place
        for name, place in places.items()
        if name in knobs and cell.knob_values[name] not in knobs[name].words
    }
    return replace(cell, knobs=tuple({**cell.knob_values, **places}.items())) if places else cell


def check_device(cell: Cell) -> None:
    """Raises UserError if the cell's device is absent, before anything is prepared."""
    check = getattr(SYSTEMS.get(cell.system), "check_device", None)
    if check is not None:
        check(cell.without(COMPARISON).without(TUNE))


def prepare(cell: Cell, sibling: Experiment | None = None) -> Experiment:
    """Resolve and check a cell. Every error that a user can cause is raised here, before any run. ``sibling`` is the experiment of a cell
    that differs only in its seed."""
    try:
        cell = _with_module_names(cell)
        system = SYSTEMS.get(cell.system)
        if not isinstance(system.family, Family) or not isinstance(system.title, str):
            raise TypeError("its family is no Family, or its title no text")
        requested = cell.without(COMPARISON)
        reused = reseeded(system, None if sibling is None else sibling.deployment, requested)
        if reused is not None:
            deployment, workload = reused
        elif requested.knob_values.get(TUNE) is None:
            deployment, workload = system.prepare(requested)
        else:
            from repro.runs.tuning import tuned

            deployment, workload = tuned(system, requested)
        digest = hashlib.sha256(f"{workload.provenance.checksum} {deployment.basis}".encode()).hexdigest()[:12]
    except BaseException as error:
        from repro.runs.provenance import fault_of

        if (fault := fault_of(cell, error)) is error:
            raise
        raise fault from error
    knobs = {**cell.knob_values, **getattr(deployment, "defaults", {}), BASIS: digest}
    return Experiment(cell=replace(cell, knobs=tuple(knobs.items())), deployment=deployment, workload=workload)


def prepare_all(
    cells: Sequence[Cell], watched: Callable[[Sequence[Cell]], Iterable[Cell]] = lambda cells: cells
) -> list[Experiment]:
    """Return the experiments in the order of the cells. Cells with the same seed share requests and are prepared one after the other, so
    that cached requests are drawn once. ``watched`` yields each cell as its preparation begins."""
    order = sorted(range(len(cells)), key=lambda place: cells[place].seed)
    ordered = watched([cells[place] for place in order])
    firsts: dict[Cell, Experiment] = {}

    def prepare_one(cell: Cell) -> Experiment:
        seedless = cell.with_seed(0)
        experiment = prepare(cell, firsts.get(seedless))
        firsts.setdefault(seedless, experiment)
        return experiment

    experiments = dict(zip(order, map(prepare_one, ordered), strict=True))
    return [experiments[place] for place in range(len(cells))]
