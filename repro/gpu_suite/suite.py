"""Runs the GPU suite's jobs in order, within a budget of seconds, and goes on next time where it stopped.

What is done is stored as it ends: a cell as a run below ``runs``, any other job as ``<name>.json``. ``suite.json`` and
``README.md`` say what was found, on which machine, and what is left.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from engines.errors import UserError
from repro.files import replace_text
from repro.gpu_suite.jobs import Job, JobFailedError, runs_of
from repro.runs.provenance import Timing, collect, utc_now
from repro.runs.store import Store

SCHEMA_VERSION = 1
STATE, README = "suite.json", "README.md"
MARGIN = 1.2
"""On what finished jobs of the kind say."""

Status = Literal["new", "started", "done", "failed"]


@dataclass(kw_only=True)
class Entry:
    """What is known of a job; ``attempts`` counts starts that did not come to an end."""

    stage: str
    kind: str
    status: Status = "new"
    attempts: int = 0
    estimate_s: float = 0.0
    elapsed_s: float | None = None
    finished_utc: str | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    ran: int
    failed: tuple[str, ...]
    left: tuple[str, ...]
    """Not done and not failed, in order."""
    left_s: float
    stopped: str
    """Why nothing more was run, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """``now`` is a clock in seconds."""

    jobs: Sequence[Job]
    root: Path
    platform: str
    command: str
    """That goes on."""
    on_line: Callable[[str], object] = print
    now: Callable[[], float] = time.monotonic
    entries: dict[str, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        path = self.root / STATE
        if path.is_file():
            self.entries.update(_read(path, self.platform))
        for job in self.jobs:
            entry = self.entries.setdefault(job.name, Entry(stage=job.stage, kind=job.kind))
            entry.estimate_s = job.estimate_s
            if self.is_done(job):
                entry.status = "done"
            elif entry.status == "done":
                entry.status = "new"

    def is_done(self, job: Job) -> bool:
        if job.cell is not None:
            return Store(runs_of(self.root)).is_done(job.cell)
        return self._result(job).get("ok") is True

    def expected_s(self, job: Job) -> float:
        """The estimate, as far off as the worst of the kind's finished jobs was; twice that for every attempt cut off."""
        ratios = [
            entry.elapsed_s / entry.estimate_s
            for entry in self.entries.values()
            if entry.kind == job.kind
            and entry.status == "done"
            and entry.elapsed_s is not None
            and entry.estimate_s > 0
        ]
        factor = MARGIN * max(ratios) if ratios else 1.0
        return job.estimate_s * factor * 2 ** self.entries[job.name].attempts

    def run(self, budget_s: float, *, began: float | None = None) -> Outcome:
        """Jobs that failed before come last. The first job that does not fit into what is left of the budget, which
        counts from ``began`` (on the suite's clock), ends the call."""
        began, ran = self.now() if began is None else began, 0
        failed: list[str] = []
        waiting: list[str] = []
        stopped = "everything is done"
        open_jobs = [job for job in self.jobs if self.entries[job.name].status != "done"]
        for job in sorted(open_jobs, key=lambda job: self.entries[job.name].status == "failed"):
            left = budget_s - (self.now() - began)
            expected = self.expected_s(job)
            if unmet := [name for name in job.needs if self.entries[name].status != "done"]:
                waiting.append(f"{job.name} waits for {len(unmet)} runs")
                continue
            if expected > budget_s:
                waiting.append(f"{job.name} is expected to take {expected:.0f} s: it needs a --budget of that")
                continue
            if expected > left:
                stopped = f"{job.name} is expected to take {expected:.0f} s and {left:.0f} s are left"
                break
            self.on_line(f"[{job.stage}] {job.name}: {expected:.0f} s expected")
            ran += 1
            reason = self._run_one(job, left)
            if reason is not None:
                failed.append(job.name)
                if "CUDA error" in reason:
                    stopped = "a CUDA error ends the process's use of the device; the same command goes on in a new one"
                    break
        else:
            if waiting:
                stopped = "; ".join(waiting)
            elif failed:
                stopped = "every job was tried"
        return self._close(ran, tuple(failed), stopped)

    def _run_one(self, job: Job, left_s: float) -> str | None:
        """None, or why it failed."""
        entry = self.entries[job.name]
        entry.attempts += 1
        entry.status = "started"
        self._save()
        began, started = self.now(), utc_now()
        reason: str | None = None
        try:
            facts: Mapping[str, Any] = job.run(left_s)
        except JobFailedError as error:
            reason, facts = str(error), error.facts
        except UserError as error:
            reason, facts = str(error), {}
        except Exception as error:
            reason, facts = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", {}
        elapsed = self.now() - began
        entry.attempts = 0
        entry.status = "done" if reason is None else "failed"
        entry.elapsed_s, entry.finished_utc = round(elapsed, 2), utc_now()
        entry.note = reason or str(facts.get("note", ""))
        if job.cell is None:
            timing = Timing(started_utc=started, finished_utc=entry.finished_utc, elapsed_s=elapsed)
            value = {
                "ok": reason is None,
                "reason": reason,
                **facts,
                "provenance": collect(obtained="measured", timing=timing),
            }
            replace_text(self._file(job), _text(value))
        self._save()
        self.on_line(
            f"[{job.stage}] {job.name}: {entry.status} in {elapsed:.1f} s{f', {entry.note}' if entry.note else ''}"
        )
        return reason

    def _close(self, ran: int, failed: tuple[str, ...], stopped: str) -> Outcome:
        left = [job for job in self.jobs if self.entries[job.name].status in ("new", "started")]
        left_s = sum(self.expected_s(job) for job in left)
        self._save()
        outcome = Outcome(ran=ran, failed=failed, left=tuple(job.name for job in left), left_s=left_s, stopped=stopped)
        replace_text(self.root / README, self._readme(outcome))
        return outcome

    def _file(self, job: Job) -> Path:
        return self.root / f"{job.name}.json"

    def _result(self, job: Job) -> Mapping[str, Any]:
        path = self._file(job)
        if not path.is_file():
            return {}
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def _save(self) -> None:
        now = utc_now()
        timing = Timing(started_utc=now, finished_utc=now, elapsed_s=0.0)
        value = {
            "schema_version": SCHEMA_VERSION,
            "platform": self.platform,
            "command": self.command,
            "provenance": collect(obtained="measured", timing=timing),
            "jobs": {name: asdict(entry) for name, entry in self.entries.items()},
        }
        replace_text(self.root / STATE, _text(value))

    # -- the summary ------------------------------------------------------------------------

    def _readme(self, outcome: Outcome) -> str:
        now = utc_now()
        origin = collect(obtained="measured", timing=Timing(started_utc=now, finished_utc=now, elapsed_s=0.0))
        gpu, git = origin["gpu"] or {}, origin["git"]
        machine = gpu.get("name") or origin["cpu"]["model"] or "an unnamed CPU"
        lines = [
            f"# GPU suite on platform {self.platform}",
            "",
            f"Written by `repro gpu-suite`, last on {now}. Every number is measured; each run's `provenance.json` names its own "
            f"machine and commit.",
            "",
            f"- machine: {machine}, driver {gpu.get('driver') or 'none'}, CUDA {gpu.get('cuda') or 'none'}",
            f"- torch {origin['libraries']['torch']}, Python {origin['python']}",
            f"- commit {git['commit'] or 'unknown'}{', with changes' if git['dirty'] else ''}",
            "- LLaDA-8B runs with random weights: its speed does not depend on them, its answers would",
            "",
            "| stage | done | failed | left | s |",
            "|---|---|---|---|---|",
        ]
        for stage in dict.fromkeys(job.stage for job in self.jobs):
            own = [self.entries[job.name] for job in self.jobs if job.stage == stage]
            counts = [
                sum(entry.status in names for entry in own) for names in (("done",), ("failed",), ("new", "started"))
            ]
            lines.append(
                f"| {stage} | {' | '.join(map(str, counts))} | {sum(entry.elapsed_s or 0 for entry in own):.0f} |"
            )
        lines += [
            "",
            *self._findings(),
            f"Left: {len(outcome.left)} jobs, about {outcome.left_s:.0f} s. To go on:",
            "",
            f"    {self.command}",
            "",
        ]
        return "\n".join(lines)

    def _findings(self) -> list[str]:
        """What jobs other than runs said, then throughput at saturation."""
        said = [
            f"- {job.name}: {self.entries[job.name].status}, {self.entries[job.name].note}"
            for job in self.jobs
            if (job.cell is None or self.entries[job.name].status == "failed") and self.entries[job.name].note
        ]
        rows = []
        for job in self.jobs:
            if job.stage == "throughput" and job.cell is not None and self.entries[job.name].status == "done":
                run = Store(runs_of(self.root)).load(job.cell, with_steps=False)
                limit = run.record.manifest["facts"].get("enforced_memory_bytes") or job.cell.knob_values.get(
                    "memory_bytes"
                )
                size = "all" if limit is None else f"{float(limit) / 1e9:.3g} GB"
                speed = run.summary["throughput_tok_s"]
                rows.append(
                    f"| {job.cell.dataset} | {size} | {job.cell.system} | {'-' if speed is None else f'{speed:.1f}'} | "
                    f"{run.record.num_requests} | {'yes' if run.validity.valid else 'NO'} |"
                )
        table = [
            "Throughput at saturation, all requests there at once:",
            "",
            "| data set | memory | system | tok/s | requests | valid |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
        return [*said, *([""] if said else []), *(table if rows else [])]


def _read(path: Path, platform: str) -> dict[str, Entry]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        version, holds = value["schema_version"], value["platform"]
        entries = {name: Entry(**entry) for name, entry in value["jobs"].items()} if version == SCHEMA_VERSION else {}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}): delete it, stored runs are kept") from error
    if holds != platform:
        raise UserError(f"result_dir={str(path.parent)!r} holds the suite of platform {holds}: give another folder")
    return entries


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
