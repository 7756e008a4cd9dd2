"""What a cell should take and make on a card: what its simulated run says, kept so that it is simulated once per code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from engines.hardware.catalogue import gpu
from engines.hardware.roofline import Calibration
from repro.files import replace_text
from repro.runs.cell import Cell
from repro.runs.experiment import Experiment, prepare
from repro.runs.store import Store
from repro.runs.sweep import Sweep
from repro.runs.system import SYSTEMS
from repro.systems.dllm.deployment import Deployment
from repro.systems.dllm.system import DllmSystem

SLOWER_THAN_PEAK = 2.0
"""Times datasheet peaks that a step is expected to take."""
STEP_OVERHEAD_S, PREPARATION_S = 0.01, 15.0
"""Expected of a step besides what the roofline charges, and of a cell before its first step."""

MEASURED_ALONE = ("weights", "device", "dtype", "profile_every")
"""Knobs that a simulated run has no use for."""


class Prediction(NamedTuple):
    seconds: float
    throughput_tok_s: float | None
    """By datasheet peaks, whose shares no card reaches; ratios of systems rest on them less."""


def simulated(cell: Cell, calibration: Calibration | None = None) -> Experiment:
    """The same cell on its platform's roofline, by datasheet peaks unless a calibration is given; the stored one is not
    looked at, so that nothing changes once there is one."""
    knobs = tuple(knob for knob in cell.knobs if knob[0] not in (*MEASURED_ALONE, "basis"))
    system = SYSTEMS.get(cell.system)
    if isinstance(system, DllmSystem) and system.has_readings and "reading" not in cell.knob_values:
        knobs += (("reading", "efficient"),)  # what is measured is our implementation
    experiment = prepare(replace(cell, executor="roofline", knobs=knobs))
    assert isinstance(experiment.deployment, Deployment)
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
                last_arrival = max(request.arrival_s for request in experiment.workload.requests)
                busy = SLOWER_THAN_PEAK * summary["busy_s"] + STEP_OVERHEAD_S * summary["num_steps"]
                seconds = round(PREPARATION_S + max(last_arrival, busy), 1)
                known[key] = Prediction(seconds, summary["throughput_tok_s"])
        replace_text(cache, json.dumps(_read(cache) | known, indent=1) + "\n")
    return [known[key] for key in keys]


def _read(cache: Path) -> dict[str, Prediction]:
    try:
        found = json.loads(cache.read_text(encoding="utf-8"))
        return {
            str(key): Prediction(float(seconds), None if speed is None else float(speed))
            for key, (seconds, speed) in found.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
