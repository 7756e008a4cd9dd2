"""``repro gpu-suite``: everything that is to be measured on a GPU, a bounded call at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from engines.errors import UserError
from repro.cli import options as opt
from repro.cli.output import counted, print_json, print_table, say

if TYPE_CHECKING:
    from repro.checks.doctor import FoundGpu
    from repro.gpu_suite.stages import Scale
    from repro.gpu_suite.suite import JobOutcome, Suite

LISTED = "h200"
"""Platform whose jobs are listed where none is given and no card tells."""
EXPECTED = "gpu-suite-expected"
"""Folder below the results of this machine: simulated runs of every cell."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    budget: float = 520.0
    """Seconds this call may take; the next job has to fit."""
    result_dir: Path | None = None
    """Where results go [default: results/PLATFORM]."""
    export: Path | None = None
    """Folder for one archive of the results, written anew after every job."""
    platform: str | None = None
    """The card's, which is read off it; cpu-tiny runs the stages small, on this CPU."""
    stage: list[str] | None = None
    """Only this stage; several times."""
    first: bool = False
    """Only the stages of the first minutes on a card."""
    dry_run: bool = False
    """List the jobs with their estimates, on any machine."""

    def check(self) -> None:
        from repro.paths import IS_INSTALLED

        if not self.budget > 0:
            raise UserError(f"budget={self.budget:g} must be a positive number of seconds")
        if IS_INSTALLED and not self.dry_run:
            raise UserError(
                "gpu-suite runs the tests and benchmarks of a checkout: clone the repository, and run it there"
            )
        if self.first and self.stage:
            raise UserError(f"stage={self.stage[0]!r} and first: give one of them")

    def wanted(self, known: Sequence[str]) -> Sequence[str]:
        """The stages that are run."""
        from repro.gpu_suite import stages as plan

        wanted = [name for name in plan.FIRST if name in known] if self.first else self.stage or known
        if unknown := sorted(set(wanted) - set(known)):
            raise UserError(f"stage={unknown[0]!r} is unknown: use one of {', '.join(known)}")
        return wanted

    def command(self, platform: str, root: Path) -> str:
        """What goes on where this call stops."""
        from repro.paths import REPO

        # As it was given: a machine's own path would be of use nowhere else.
        shown = str(root.relative_to(REPO)) if root.is_relative_to(REPO) else str(root)
        words = [f"python3 -m repro gpu-suite --budget {self.budget:g} --platform {platform} --result-dir {shown}"]
        return " ".join(
            [*words, *(["--first"] if self.first else []), *(f"--stage {each}" for each in self.stage or ())]
        )


def gpu_suite(*, asked: Asked, json: opt.Json = False) -> None:
    """Tests, throughput, steps, figures and checks on a card, in order of worth; goes on where the last call stopped."""
    began = time.monotonic()
    from repro.files import writable_folder
    from repro.gpu_suite import stages as plan
    from repro.gpu_suite.summary import draw
    from repro.paths import RESULTS

    asked.check()
    card, platform = _place(asked)
    scale = plan.scale_of(platform, None if card is None else card.memory_bytes)
    root = asked.result_dir or RESULTS / platform
    suite = _suite(asked, scale, platform, root)
    if asked.dry_run:
        _list_jobs(suite, scale.where.title, json=json)
        return
    for option, folder in opt.given(export=asked.export, result_dir=root).items():
        writable_folder(option, folder)
    outcome = suite.run(asked.budget, began=began)
    drawn = draw(suite, plan.figures(scale)) if "figures" in (suite.stages or ()) else []
    if json:
        print_json({**asdict(outcome), "drawn": drawn, "command": suite.command})
    else:
        _say_outcome(suite, outcome, drawn, is_first=asked.first)
    if outcome.failed or (outcome.left and not outcome.ran):
        raise typer.Exit(1)


def _place(asked: Asked) -> tuple[FoundGpu | None, str]:
    """The card, if there is one, and the platform that it is; ends the command where a card is missing."""
    from repro.gpu_suite.card import driver_card, platform_on, torch_card
    from repro.systems.platforms import DllmPart
    from repro.systems.platforms import platform as find_platform

    card, platform = driver_card(), asked.platform
    if asked.dry_run:
        return card, platform or (LISTED if card is None else platform_on(card, None))
    if platform is not None or card is not None:
        platform = platform_on(card, platform)  # a card that is another is said at once, before torch is loaded
    if platform is not None and find_platform(platform).part(DllmPart).device == "cpu":
        return card, platform
    found = torch_card()
    if not isinstance(found, str):
        return found, platform_on(found, platform)
    say(f"gpu-suite: nothing was run, {found}. It needs")
    say("an NVIDIA GPU with its driver (nvidia-smi must work); 24 GB for LLaDA-8B", "  ")
    say("a CUDA build of torch: make clean, then make setup TORCH=torch", "  ")
    say(
        "'repro doctor' says what this machine can run; 'repro gpu-suite --dry-run' lists the jobs, docs/gpu.md says what they "
        "are."
    )
    raise typer.Exit(1)


def _suite(asked: Asked, scale: Scale, platform: str, root: Path) -> Suite:
    from repro.gpu_suite import stages as plan
    from repro.gpu_suite.calibration import Calibrating
    from repro.gpu_suite.suite import Suite, jobs_of
    from repro.gpu_suite.summary import write_summary
    from repro.gpu_suite.verdict import VERDICT, write_verdict
    from repro.paths import LOCAL
    from repro.runs.store import Store

    stages, calibrating = plan.stages(scale), Calibrating()
    wanted = asked.wanted(list(dict.fromkeys(each.stage for each in stages)))
    told = {*wanted, *(() if asked.dry_run else plan.FIRST)}  # the pages speak of the first stages, whatever is run

    def write_pages(suite: Suite) -> None:
        write_summary(suite)
        try:
            write_verdict(suite, calibrating)
        except Exception as error:  # minutes on a card are not lost to a page that any machine writes again
            say(f"{VERDICT} is not written ({type(error).__name__}: {error})", file=sys.stderr)

    return Suite(
        jobs=jobs_of([each for each in stages if each.stage in told], Store(LOCAL / EXPECTED)),
        root=root,
        platform=platform,
        command=asked.command(platform, root),
        export=asked.export,
        on_line=lambda line: say(line, file=sys.stderr),
        on_done=write_pages,
        stages=frozenset(wanted),
    )


def _say_outcome(suite: Suite, outcome: JobOutcome, drawn: Sequence[str], *, is_first: bool) -> None:
    from repro.gpu_suite.summary import README
    from repro.gpu_suite.verdict import VERDICT

    say(
        f"{counted(outcome.ran, 'job')} ran, {len(outcome.failed)} failed, {len(outcome.left)} are left (about "
        f"{outcome.left_s:.0f} s): {outcome.stopped}"
    )
    for name in outcome.failed:
        say(f"failed {name}: {suite.entries[name].note}")
    if drawn:
        say(f"drawn: {', '.join(drawn)}")
    if outcome.left or outcome.failed:
        print(f"to go on: {suite.command}")
    verdict = suite.root / VERDICT
    if is_first and verdict.is_file():
        print("", verdict.read_text(encoding="utf-8"), sep="\n")
    say(f"summary: {suite.root / README}, verdict: {verdict}")


def _list_jobs(suite: Suite, title: str, *, json: bool) -> None:
    jobs = [
        {
            "stage": job.stage,
            "what": job.what,
            "name": job.name,
            "expected_s": round(suite.expected_s(job)),
            "status": suite.entries[job.name].status,
        }
        for job in suite.chosen
    ]
    left_s = sum(suite.expected_s(job) for job in suite.chosen if suite.entries[job.name].status != "done")
    if json:
        print_json({"platform": suite.platform, "jobs": jobs, "left_s": left_s})
        return
    rows = [tuple(str(job[name]) for name in ("stage", "what", "expected_s", "status")) for job in jobs]
    print_table(f"GPU suite on {title}", ("stage", "job", "expected s", "status"), rows)
    say(f"{counted(len(rows), 'job')}, about {left_s:.0f} s left")
