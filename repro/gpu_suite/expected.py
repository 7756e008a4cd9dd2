"""What a cell should take and make on a card: what its simulated run says, kept so that it is simulated once per code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from engines.cost.roofline import Calibration, gpu
from repro.files import replace_text
from repro.runs.cell import Cell
from repro.runs.experiment import Experiment, prepare
from repro.runs.store import Store
from repro.runs.sweep import Sweep
from repro.runs.system import SYSTEMS
from repro.systems.dllm.deployment import DllmDeployment
from repro.systems.dllm.system import DllmSystem

SLOWER = 1.2
"""Times what a simulated step takes that one is expected to; an H200 took 1.03 of it where the device decides."""
STEP_OVERHEAD_S, PREPARATION_S = 0.02, 15.0
"""Expected of a step besides, what launches take that no graph holds, and of a cell before its first step."""

MEASURED_ALONE = ("weights", "device", "dtype", "profile_every")
"""Knobs that a simulated run has no use for."""


class Prediction(NamedTuple):
    """What a simulated run says, of which nothing hangs on the constants here: it is kept."""

    busy_s: float
    num_steps: int
    last_arrival_s: float
    throughput_tok_s: float | None

    @property
    def seconds(self) -> float:
        busy_s = SLOWER * self.busy_s + STEP_OVERHEAD_S * self.num_steps
        return round(PREPARATION_S + max(self.last_arrival_s, busy_s), 1)


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


def expected(cells: Sequence[Cell], cache: Path) -> list[Prediction]:
    """What the simulator expects of each cell. ``cache`` holds what was expected before, by the cell and by the code that simulates it; one that
    cannot be read is made again."""
    experiments = [simulated(cell) for cell in cells]
    keys = [f"{each.cell.key} {each.code.digest}" for each in experiments]
    known = {key: found for key, found in _read(cache).items() if key in keys}
    missing = {key: each for key, each in zip(keys, experiments, strict=True) if key not in known}
    if missing:
        with TemporaryDirectory(prefix="repro-expected-") as folder:
            outcomes = Sweep(list(missing.values()), Store(Path(folder))).run()
            for (key, experiment), outcome in zip(missing.items(), outcomes, strict=True):
                assert outcome.run is not None
                summary = outcome.run.summary
                known[key] = Prediction(
                    busy_s=summary["busy_s"],
                    num_steps=summary["num_steps"],
                    last_arrival_s=max(request.arrival_s for request in experiment.workload.requests),
                    throughput_tok_s=summary["throughput_tok_s"],
                )
        replace_text(cache, json.dumps(_read(cache) | known, indent=1) + "\n")
    return [known[key] for key in keys]


def _read(cache: Path) -> dict[str, Prediction]:
    try:
        found = json.loads(cache.read_text(encoding="utf-8"))
        return {
            str(key): Prediction(float(busy_s), int(steps), float(last), None if speed is None else float(speed))
            for key, (busy_s, steps, last, speed) in found.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
