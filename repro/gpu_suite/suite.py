"""The GPU suite: the cells and checks of ``suite.yaml`` in order of worth, each with its expected seconds, run within a budget of seconds.

The expected time and throughput of a cell on a card come from its simulated run, which is stored like any other. The next call continues
where the last one stopped: everything is a stored run below ``runs``. ``suite.json`` holds the progress and time of each, and ``README.md``
the results. After every job the folder is complete as far as it goes, and ``export`` holds it as one archive.

This module also writes one page on what the suite did: the machine, the results of checks, and what is left.
"""

import json
import math
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from engines.cost.roofline import GB, Calibration, gpu
from engines.dllm.config import EngineConfig
from engines.dllm.memory import divide_memory
from engines.errors import UserError
from engines.knobs import Checked, Range, Seconds, knobs_of
from engines.models.shape import model_shape
from repro.families.dllm.deployment import DllmDeployment
from repro.families.dllm.system import DllmSystem
from repro.families.platforms import DllmPart, Platform, platform
from repro.files import replace_text, rewriting
from repro.gpu_suite.checks import CHECK, Check, check_cell
from repro.reports.figures import View, default_reading, figure
from repro.runs.cell import Cell, Scalar
from repro.runs.experiment import Experiment, prepare
from repro.runs.provenance import GitState, collect, git_state, utc_now
from repro.runs.record import DriveProgress
from repro.runs.store import Store, StoredRun
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


SCHEMA_VERSION = 2
STATE, ARCHIVE = "suite.json", "gpu-suite.tar.gz"
MARGIN = 1.2
"""Safety factor on the time that finished jobs of the same system took."""

Status = Literal["new", "started", "done", "failed"]


class OverTimeError(RuntimeError):
    """A job took longer than allowed; other jobs get the rest of the call."""


@dataclass(frozen=True, kw_only=True)
class Job:
    stage: str
    experiment: Experiment
    estimate_s: float
    predicted_tok_s: float | None = None
    """Throughput that the simulator expects of the cell on this card (``expected.simulated``); None if it is not simulated."""

    @property
    def name(self) -> str:
        return self.experiment.cell.folder_name

    @property
    def label(self) -> str:
        """A readable name: the check and its subject, or the system and its load."""
        cell = self.experiment.cell
        if not isinstance(self.experiment.deployment, Check):
            return f"{title_of(cell)}, {cell.dataset}{'' if cell.rate is None else f' at {cell.rate:g}/s'}"
        knobs = cell.knob_values
        parts = [str(knobs[name]) for name in ("script", "options", "model") if knobs.get(name)]
        return " ".join(parts) or cell.system.rpartition(":")[2].lower().replace("_", " ")


@dataclass(kw_only=True)
class JobState(Checked):
    """The state of a job. ``attempts`` counts starts that did not finish."""

    stage: str
    status: Status = "new"
    attempts: Annotated[int, Range(0, 10**6)] = 0
    estimate_s: Seconds = 0.0
    elapsed_s: Seconds | None = None
    finished_utc: str | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    ran: int
    failed: tuple[str, ...]
    left: tuple[str, ...]
    left_s: float
    stopped: str
    """Why nothing more was run, in one sentence."""


def jobs_of(cells: Sequence[Planned], simulations: Store) -> list[Job]:
    """Prepare all jobs, so that errors are raised before any job runs. A cell without an estimate gets it from its simulated run."""
    jobs = [Job(stage=each.stage, experiment=prepare(each.cell), estimate_s=each.estimate_s or 0.0) for each in cells]
    unknown = [index for index, entry in enumerate(cells) if entry.estimate_s is None]
    for index, prediction in zip(unknown, predict([cells[index].cell for index in unknown], simulations), strict=True):
        jobs[index] = replace(jobs[index], estimate_s=prediction.seconds, predicted_tok_s=prediction.throughput_tok_s)
    return jobs


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A suite's jobs and their state. ``now`` is a clock in seconds. ``on_done`` is called after every job to report and draw results so
    far."""

    jobs: Sequence[Job]
    root: Path
    platform: str
    command: str
    """Command that resumes the suite."""
    export: Path | None = None
    on_line: Callable[[str], object] = print
    on_done: "Callable[[Suite], object]" = lambda suite: None
    now: Callable[[], float] = time.monotonic
    stages: frozenset[str] | None = None
    """Stages whose jobs are run; None for all. Other jobs still count in reports about the whole suite."""
    git: GitState = field(default_factory=git_state)
    """Git state of the loaded code. It is read once, because a page is written after every job."""
    entries: dict[str, JobState] = field(default_factory=dict)
    _found: dict[str, tuple[tuple[int, int] | None, StoredRun | None]] = field(default_factory=dict, init=False)
    """Name of a job -> when its cell was stored, and the run. A cache, because every page needs most runs."""

    def __post_init__(self) -> None:
        path = self.root / STATE
        if path.is_file():
            self.entries.update(_read_state(path, self.platform))
        for job in self.jobs:
            entry = self.entries.setdefault(job.name, JobState(stage=job.stage))
            entry.stage, entry.estimate_s = job.stage, job.estimate_s
            run = self.stored(job)
            if run is not None:
                entry.status = "done" if run.validity.valid else "failed"
            elif entry.status == "done":
                entry.status = "new"

    @property
    def store(self) -> Store:
        return Store(self.root / "runs")

    def stored(self, job: Job) -> StoredRun | None:
        written = self.store.written(job.experiment.cell)
        if job.name not in self._found or self._found[job.name][0] != written:
            self._found[job.name] = written, self.store.find(job.experiment).run
        return self._found[job.name][1]

    @property
    def chosen(self) -> list[Job]:
        return [job for job in self.jobs if self.stages is None or job.stage in self.stages]

    @property
    def left(self) -> list[Job]:
        """Jobs that are neither done nor failed, in order."""
        return [job for job in self.chosen if self.entries[job.name].status in ("new", "started")]

    def expected_s(self, job: Job) -> float:
        """The estimate, scaled by the worst ratio among the system's finished jobs, and doubled for every attempt that was cut off."""
        ratios = [
            entry.elapsed_s / entry.estimate_s
            for other in self.jobs
            if other.experiment.cell.system == job.experiment.cell.system
            and (entry := self.entries[other.name]).status == "done"
            and entry.elapsed_s is not None
            and entry.estimate_s > 0
        ]
        factor = MARGIN * max(ratios) if ratios else 1.0
        return job.estimate_s * factor * 2 ** self.entries[job.name].attempts

    def run(self, budget_s: float, *, began: float | None = None) -> JobOutcome:
        """Run jobs in order, with earlier failures last. A job that does not fit into the remaining time is skipped. The budget counts from
        ``began`` (on the suite's clock)."""
        began, num_ran = self.now() if began is None else began, 0
        failed: list[str] = []
        skipped: list[str] = []
        stopped = None
        self._close()
        todo = [job for job in self.chosen if self.entries[job.name].status != "done"]
        for job in sorted(todo, key=lambda job: self.entries[job.name].status == "failed"):
            left_s, expected = budget_s - (self.now() - began), self.expected_s(job)
            if expected > left_s:
                skipped.append(f"{job.name} is expected to take {expected:.0f} s and {max(0.0, left_s):.0f} s are left")
                continue
            self.on_line(f"[{job.stage}] {job.name}: {expected:.0f} s expected")
            num_ran += 1
            reason = self._run_one(job, left_s)
            self._close()
            if reason is not None:
                failed.append(job.name)
                deployment = job.experiment.deployment
                if "CUDA error" in reason and not (isinstance(deployment, Check) and deployment.is_apart):
                    stopped = "a CUDA error ends the process's use of the device; the same command goes on in a new one"
                    break
        if stopped is None:
            stopped = skipped[0] if skipped else "every job was tried" if failed else "everything is done"
            stopped += f", and {len(skipped) - 1} more" if len(skipped) > 1 else ""
        remaining = self.left
        return JobOutcome(
            ran=num_ran,
            failed=tuple(failed),
            left=tuple(job.name for job in remaining),
            left_s=sum(map(self.expected_s, remaining)),
            stopped=stopped,
        )

    def _run_one(self, job: Job, left_s: float) -> str | None:
        """Runs one job; returns why it failed, or None."""
        entry = self.entries[job.name]
        entry.attempts += 1
        entry.status = "started"
        self._save()
        start_s = self.now()

        def watch(experiment: Experiment, progress: DriveProgress) -> None:
            if self.now() - start_s > left_s:
                raise OverTimeError(
                    f"not over after {left_s:.0f} s, with {progress.num_closed} of {progress.num_total} requests"
                )

        experiment = job.experiment
        if isinstance(experiment.deployment, Check):
            experiment = replace(experiment, deployment=replace(experiment.deployment, limit_s=left_s))
        reason: str | None = None
        try:
            (outcome,) = Sweep([experiment], self.store, force=True).run(on_step=watch)
            assert outcome.run is not None
            entry.note = _note_text(outcome.run)
            reason = None if outcome.run.validity.valid else "; ".join(outcome.run.validity.reasons)
        except UserError as error:
            reason = str(error)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        elapsed = self.now() - start_s
        # A job that ran over its time gets twice the time on its next attempt.
        entry.attempts = entry.attempts if reason is not None and reason.startswith("OverTimeError") else 0
        entry.status = "done" if reason is None else "failed"
        entry.elapsed_s, entry.finished_utc = round(elapsed, 2), utc_now()
        entry.note = reason or entry.note
        self.on_line(
            f"[{job.stage}] {job.name}: {entry.status} in {elapsed:.1f} s{f', {entry.note}' if entry.note else ''}"
        )
        return reason

    def _close(self) -> None:
        """Saves the state, calls ``on_done``, and writes the archive if ``export`` is set."""
        self._save()
        self.on_done(self)
        if self.export is not None:
            with rewriting(self.export / ARCHIVE) as partial, tarfile.open(partial, "w:gz") as archive:
                archive.add(self.root, arcname=self.root.name, filter=_without_partial_files)

    def _save(self) -> None:
        value = {
            "schema_version": SCHEMA_VERSION,
            "platform": self.platform,
            "command": self.command,
            "jobs": {name: asdict(entry) for name, entry in self.entries.items()},
        }
        replace_text(self.root / STATE, json_text(value))


def json_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _note_text(run: StoredRun) -> str:
    summary = run.summary
    if "note" in summary:
        return str(summary["note"])
    speed = summary["throughput_tok_s"]
    return "-" if speed is None else f"{speed:.1f} tok/s"


def _without_partial_files(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leaves out files that are only partly written."""
    return None if Path(member.name).name.startswith(".") else member


def _read_state(path: Path, platform: str) -> dict[str, JobState]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version, name = value["schema_version"], value["platform"]
        entries = (
            {name: JobState(**entry) for name, entry in value["jobs"].items()} if version == SCHEMA_VERSION else {}
        )
    except (UserError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}): delete it, stored runs are kept") from error
    if name != platform:
        raise UserError(f"result_dir={str(path.parent)!r} holds the suite of platform {name}: give another folder")
    return entries


README = "README.md"


def draw(suite: Suite, figures: Sequence[Drawn]) -> list[str]:
    """Draw every figure whose runs all exist, and return their names."""
    names = []
    for entry in figures:
        sweep = Sweep([prepare(cell) for cell in entry.cells], suite.store)
        if not sweep.missing:
            figure(entry.name).load().render(sweep.runs, entry.view, suite.root / "figures")
            names.append(entry.name)
    return names


def write_summary(suite: Suite) -> None:
    origin = collect(obtained="measured", git=suite.git)
    gpu, git = origin["gpu"] or {}, origin["git"]
    machine = gpu.get("name") or origin["cpu"]["model"] or "an unnamed CPU"
    lines = [
        f"# GPU suite on platform {suite.platform}",
        "",
        f"Written by `repro gpu-suite`, last on {origin['finished_utc']}. Every number is measured; each run's provenance names its own "
        f"machine and commit.",
        "",
        f"- machine: {machine}, driver {gpu.get('driver') or 'none'}, CUDA {gpu.get('cuda') or 'none'}",
        f"- torch {origin['libraries']['torch']}, Python {origin['python']}",
        f"- commit {git['commit'] or 'unknown'}{', with changes' if git['dirty'] else ''}",
        "- full-size models run with random weights: their speed does not depend on them, their answers would",
        "",
        "| stage | done | failed | left | s |",
        "|---|---|---|---|---|",
    ]
    for stage in dict.fromkeys(job.stage for job in suite.jobs):
        own = [suite.entries[job.name] for job in suite.jobs if job.stage == stage]
        counts = [sum(entry.status in names for entry in own) for names in (("done",), ("failed",), ("new", "started"))]
        seconds = sum(entry.elapsed_s or 0 for entry in own)
        lines.append(f"| {stage} | {' | '.join(map(str, counts))} | {seconds:.0f} |")
    # Results of checks, and every job that failed.
    results = [
        f"- {job.stage}: {entry.status}, {entry.note}"
        for job in suite.jobs
        if (entry := suite.entries[job.name]).note and (job.experiment.family is CHECK or entry.status == "failed")
    ]
    lines += [
        "",
        "## Correct",
        "",
        *(results or ["Nothing was checked yet."]),
        "",
        "Throughput and steps are in verdict.md.",
        "",
        f"Left: {len(suite.left)} jobs, about {sum(map(suite.expected_s, suite.left)):.0f} s. To go on:",
        "",
        f"    {suite.command}",
        "",
    ]
    replace_text(suite.root / README, "\n".join(lines))
