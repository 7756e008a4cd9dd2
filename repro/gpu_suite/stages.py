"""The work of the GPU suite: the cells and checks of ``suite.yaml`` in order of worth, each with its expected seconds.

The expected time and throughput of a cell on a card come from its simulated run, which is stored like any other.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from engines.cost.roofline import GB, Calibration, gpu
from engines.dllm.config import EngineConfig
from engines.dllm.memory import divide_memory
from engines.knobs import knobs_of
from engines.models.shape import model_shape
from repro.families.dllm.deployment import DllmDeployment
from repro.families.dllm.system import DllmSystem
from repro.families.platforms import DllmPart, Platform, platform
from repro.gpu_suite.checks import check_cell
from repro.reports.figures import View, default_reading, figure
from repro.runs.cell import Cell, Scalar
from repro.runs.experiment import Experiment, prepare
from repro.runs.store import Store
from repro.runs.sweep import Sweep
from repro.runs.system import SYSTEMS

SLOWER = 1.2
"""A measured step is expected to take this many times the simulated one. An H200 took 1.03 times where the device decides."""
STEP_OVERHEAD_S, PREPARATION_S = 0.02, 15.0
"""Expected extra seconds: per step, for launches outside graphs; and per cell, before its first step."""

MEASURED_ALONE = ("weights", "device", "dtype", "profile_every")
"""Knobs that a simulated run does not have."""


class Prediction(NamedTuple):
    """The expected time and throughput of a run on the card, from its simulation."""

    seconds: float
    throughput_tok_s: float | None


def simulated(cell: Cell, calibration: Calibration | None = None) -> Experiment:
    """The same cell on a virtual clock. Steps are priced by the card's measured kernels if known, by datasheet peaks otherwise, or by the
    roofline of a given calibration. The stored calibration is ignored, so nothing changes once there is one."""
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
    constants = calibration or Calibration.datasheet(gpu(card))
    return replace(experiment, deployment=replace(experiment.deployment, calibration=constants))


def predict(cells: Sequence[Cell], store: Store) -> list[Prediction]:
    """The simulator's expectation for each cell. ``store`` holds runs that the same code simulated before."""
    sweep = Sweep([simulated(cell) for cell in cells], store)
    sweep.run()
    predictions = []
    for run, experiment in zip(sweep.runs, sweep.experiments, strict=True):
        busy_s = SLOWER * run.summary["busy_s"] + STEP_OVERHEAD_S * run.summary["num_steps"]
        seconds = round(PREPARATION_S + max(*(each.arrival_s for each in experiment.workload.requests), busy_s), 1)
        predictions.append(Prediction(seconds, run.summary["throughput_tok_s"]))
    return predictions


STEP_BATCHES, STEP_LENGTH = (1, 16, 64, 128), 256
"""Batch sizes of the timed steps, and the tokens of each request."""

OURS = "dllm-serve"
COMPARED = (OURS, "fast-dllm", "sparse-dllm", "dllm-cache")
"""The compared systems. Fast-dLLM uses its default, the dual cache."""
ONE_REFRESH: Mapping[str, Scalar] = {"refresh_delay": 0}
"""dLLM-Serve with a single refresh of each block, the faster variant by the simulator; measured beside the published one."""
SAME_ENGINE: Mapping[str, Scalar] = {"reading": "policy"}
"""A baseline's rule on dLLM-Serve's engine. It shows what remains of a gain if the baseline has no static batches."""
BLOCK = "block-diffusion"
ON_OUR_ENGINE = "fast-dllm"
"""The baseline that is also measured on our engine: the nearest one by the simulator."""

FIRST = ("tests", "mixing", "throughput", "step", "small-card", "goldens", "profile", "shapes", "block")
"""Stages of the first minutes on a card, in this order. The verdict rests on them, and the suite also runs them first."""

Knobs = Mapping[str, Scalar]


def title_of(cell: Cell) -> str:
    """The system's name, and what distinguishes this variant of it."""
    knobs = cell.knob_values.items()
    variants = [
        text
        for setting, text in (
            (ONE_REFRESH, "one refresh"),
            (SAME_ENGINE, "on our engine"),
            ({"autoregressive": True}, "autoregressive"),
            ({"batching": "first-done"}, "first done"),
        )
        if setting.items() <= knobs
    ]
    model = [str(cell.knob_values["model"])] if cell.system == BLOCK else []
    return ", ".join((cell.system, *model, *variants))


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A cell of a stage. ``estimate_s`` None means that its simulated run gives the estimate."""

    stage: str
    cell: Cell
    estimate_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A figure to draw once all its runs exist."""

    name: str
    view: View
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class SuiteLine:
    """A line of ``suite.yaml``. It asks for one of check, script, load and figure."""

    stage: str
    check: str | None = None
    script: str | None = None
    options: str = ""
    load: str | None = None
    systems: Sequence[str] = ()
    """Systems that serve the load; empty means all compared ones, and ours with a single refresh too."""
    own: Mapping[str, Knobs] = field(default_factory=dict)
    """Knobs of single systems."""
    figure: str | None = None
    rates: Sequence[float] = ()
    rates_at: Sequence[int] = ()
    """Indices into the platform's rates."""
    knobs: Knobs = field(default_factory=dict)
    seconds: float | None = None
    """Expected seconds of a cell; None: its simulated run gives them."""
    from_gb: float = 0
    below_gb: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The suite on one platform."""

    where: Platform
    knobs: Knobs
    """Knobs set in every cell that serves requests."""
    asked: tuple[SuiteLine, ...]

    @property
    def part(self) -> DllmPart:
        return self.where.part(DllmPart)


def scale_of(name: str, memory_bytes: int | None = None) -> Scale:
    """The suite's scale on a platform. ``memory_bytes`` is the memory of the actual card, which limits a platform that assumes more."""
    import yaml

    machine = platform(name)
    text = Path(__file__).with_name("suite.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)["cpu" if machine.gpu is None else "card"]
    knobs = dict(config["knobs"])
    if machine.gpu is not None and memory_bytes is not None and memory_bytes < machine.part(DllmPart).memory_bytes:
        machine = machine.with_part(DllmPart, memory_bytes=memory_bytes)
        knobs["memory_limit"] = memory_bytes
    gb = machine.part(DllmPart).memory_bytes / GB
    lines = (SuiteLine(**line) for line in config["cells"])
    return Scale(where=machine, knobs=knobs, asked=tuple(line for line in lines if line.from_gb <= gb < line.below_gb))


def _step_batches(part: DllmPart) -> list[int]:
    """Batch sizes whose pool and activations fit on the card beside the weights."""
    shape, sizes = model_shape("llada-8b"), []
    for size in STEP_BATCHES:
        config = EngineConfig(
            max_num_batched_tokens=size * STEP_LENGTH,
            max_num_logits=part.max_num_logits,
            max_model_len=STEP_LENGTH,
            max_num_seqs=size,
        )
        rows = size * (config.sparsity.kept_rows(STEP_LENGTH - part.block_length) + part.block_length)
        if divide_memory(shape, part.memory_bytes, config, logit_rows="decomposed").kv_rows >= rows:
            sizes.append(size)
    return sizes


def stages(scale: Scale) -> list[Planned]:
    """All cells in order of worth. A cell that several stages ask for runs in the first of them."""
    first: dict[str, Planned] = {}
    for line in scale.asked:
        seconds = None if line.seconds is None else float(line.seconds)
        for cell in _cells(scale, line):
            first.setdefault(cell.key, Planned(stage=line.stage, cell=cell, estimate_s=seconds))
    return list(first.values())


def _cells(scale: Scale, line: SuiteLine) -> Iterator[Cell]:
    if line.check is not None:
        knobs = {
            name: value.format(platform=scale.where.name) if isinstance(value, str) else value
            for name, value in line.knobs.items()
        }
        yield check_cell(line.check, scale.where.name, **knobs)
    elif line.script is not None:
        options = line.options
        if "{batches}" in options:
            options = options.format(batches=" ".join(map(str, _step_batches(scale.part))))
        yield check_cell("BENCHMARK", scale.where.name, script=line.script, options=options, **line.knobs)
    elif line.load is not None:
        # Every system, all in one run of the suite.
        for system in line.systems or COMPARED:
            system_knobs = {**line.knobs, **line.own.get(system, {})}
            yield _saturated_cell(scale, system, line.load, system_knobs)
            if system == OURS and not line.systems:
                yield _saturated_cell(scale, system, line.load, {**system_knobs, **ONE_REFRESH})
                rule = {**system_knobs, **line.own.get(ON_OUR_ENGINE, {}), **SAME_ENGINE}
                yield _saturated_cell(scale, ON_OUR_ENGINE, line.load, rule)
    else:
        yield from _drawn_figure(scale, line).cells


def _saturated_cell(scale: Scale, system: str, dataset: str, knobs: Knobs) -> Cell:
    """A cell with all requests at once. The scale's knobs are for diffusion LLMs; a system of another family gets those that it has."""
    common = scale.knobs
    if system == BLOCK:
        names = {name for kind in SYSTEMS.get(BLOCK).knobs for name in knobs_of(kind)}  # type: ignore[attr-defined]
        common = {name: value for name, value in common.items() if name in names - {"steps"}}  # which are of a block
    return Cell(
        figure="saturation",
        system=system,
        dataset=dataset,
        platform=scale.where.name,
        executor="torch",
        knobs=tuple({**common, **knobs}.items()),
    )


def figures(scale: Scale) -> Sequence[Drawn]:
    return [_drawn_figure(scale, line) for line in scale.asked if line.figure is not None]


def _drawn_figure(scale: Scale, line: SuiteLine) -> Drawn:
    """A figure that is measured on the platform, whatever the platform's default."""
    assert line.figure is not None
    machine = replace(scale.where, executor="torch")
    rates = tuple(line.rates) or tuple(scale.part.rates[index] for index in line.rates_at)
    view = View(
        platform=machine,
        reading=default_reading(machine),
        knobs=tuple({**line.knobs, **scale.knobs}.items()),
        rates=tuple(sorted(rates)),
        is_grouped=False,
    )
    order = {rate: i for i, rate in enumerate(rates)}
    cells = [view.applied(cell) for cell in figure(line.figure).load().cells(view)]
    cells.sort(key=lambda cell: 0 if cell.rate is None else order[cell.rate])
    return Drawn(name=line.figure, view=view, cells=tuple(cells))
