"""What a cell should take and make on a card, by its simulated run, which is stored like any other."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from engines.cost.roofline import Calibration, gpu
from repro.families.dllm.deployment import DllmDeployment
from repro.families.dllm.system import DllmSystem
from repro.runs.cell import Cell
from repro.runs.experiment import Experiment, prepare
from repro.runs.store import Store, StoredRun
from repro.runs.sweep import Sweep
from repro.runs.system import SYSTEMS

SLOWER = 1.2
"""Times what a simulated step takes that one is expected to; an H200 took 1.03 of it where the device decides."""
STEP_OVERHEAD_S, PREPARATION_S = 0.02, 15.0
"""Expected of a step besides, what launches take that no graph holds, and of a cell before its first step."""

MEASURED_ALONE = ("weights", "device", "dtype", "profile_every")
"""Knobs that a simulated run has no use for."""


class Prediction(NamedTuple):
    """What a simulated run says of one on the card."""

    seconds: float
    throughput_tok_s: float | None


def simulated(cell: Cell, calibration: Calibration | None = None) -> Experiment:
    """The same cell on a virtual clock: of the card's measured kernels where they are known, else by datasheet peaks; or by
    the roofline of a calibration. The stored one is not looked at, so that nothing changes once there is one."""
    knobs = tuple(knob for knob in cell.knobs if knob[0] not in (*MEASURED_ALONE, "basis"))
    system = SYSTEMS.get(cell.system)
    if isinstance(system, DllmSystem) and system.has_readings and "reading" not in cell.knob_values:
        knobs += (("reading", "efficient"),)  # what is measured is our implementation
    if calibration is not None:
        knobs += (("cost", "roofline"),)
    experiment = prepare(replace(cell, executor="roofline", knobs=knobs))
    assert isinstance(experiment.deployment, DllmDeployment)
    card = experiment.deployment.settings.platform.gpu
    assert card is not None, "settings refuse the roofline where there is no GPU model"
    given = calibration or Calibration.datasheet(gpu(card))
    return replace(experiment, deployment=replace(experiment.deployment, calibration=given))


def expected(cells: Sequence[Cell], store: Store) -> list[Prediction]:
    """What the simulator expects of each cell. ``store`` holds the runs that the same code simulated before."""
    sweep = Sweep([simulated(cell) for cell in cells], store)
    sweep.run()
    return [Prediction(_seconds(run), run.summary["throughput_tok_s"]) for run in sweep.runs]


def _seconds(run: StoredRun) -> float:
    busy_s = SLOWER * run.summary["busy_s"] + STEP_OVERHEAD_S * run.summary["num_steps"]
    return round(PREPARATION_S + max(*run.record.requests["arrival_s"], busy_s), 1)
