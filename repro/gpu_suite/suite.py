"""Runs the GPU suite's cells and checks within a budget of seconds, and next time continues where it stopped.

Everything is a stored run below ``runs``. ``suite.json`` holds the progress and time of each, and ``README.md`` the results. After every
job the folder is complete as far as it goes, and ``export`` holds it as one archive.

This module also writes one page on what the suite did: the machine, the results of checks, and what is left.
"""

import json
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from engines.errors import UserError
from engines.knobs import Checked, Range, Seconds
from repro.files import replace_text, rewriting
from repro.gpu_suite.checks import CHECK, Check
from repro.gpu_suite.stages import Drawn, Planned, predict, title_of
from repro.reports.figures import figure
from repro.runs.experiment import Experiment, prepare
from repro.runs.provenance import GitState, Timing, collect, git_state, utc_now
from repro.runs.record import DriveProgress
from repro.runs.store import Store, StoredRun
from repro.runs.sweep import Sweep

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
    now = utc_now()
    timing = Timing(started_utc=now, finished_utc=now, elapsed_s=0.0)
    origin = collect(obtained="measured", timing=timing, git=suite.git)
    gpu, git = origin["gpu"] or {}, origin["git"]
    machine = gpu.get("name") or origin["cpu"]["model"] or "an unnamed CPU"
    lines = [
        f"# GPU suite on platform {suite.platform}",
        "",
        f"Written by `repro gpu-suite`, last on {now}. Every number is measured; each run's provenance names its own "
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
