"""``repro gpu-suite``: everything that is to be measured on a GPU, a bounded call at a time."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engines.errors import UserError
from repro.cli import options as opt
from repro.cli.output import counted, print_json, print_table, say

if TYPE_CHECKING:
    from repro.gpu_suite.suite import Suite

LISTED = "h200"
"""Platform whose jobs are listed where none is given and no card tells."""
EXPECTED = "gpu-suite-expected.json"
"""Below the results of this machine: what its simulations expect of every cell."""


def gpu_suite(
    budget: Annotated[float, typer.Option(help="Seconds this call may take; the next job has to fit.")] = 520.0,
    result_dir: Annotated[Path | None, typer.Option(help="Where results go [default: results/PLATFORM].")] = None,
    export: Annotated[
        Path | None, typer.Option(help="Folder for one archive of the results, written anew after every job.")
    ] = None,
    platform: Annotated[
        str | None, typer.Option(help="The card's, which is read off it; cpu-tiny runs the stages small, on this CPU.")
    ] = None,
    stage: Annotated[list[str] | None, typer.Option(help="Only this stage; several times.")] = None,
    first: Annotated[bool, typer.Option("--first", help="Only the stages of the first minutes on a card.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the jobs with their estimates, on any machine.")
    ] = False,
    json: opt.Json = False,
) -> None:
    """Tests, throughput, steps, figures and checks on a card, in order of worth; goes on where the last call stopped."""
    began = time.monotonic()
    from repro.files import writable_folder
    from repro.gpu_suite import stages as plan
    from repro.gpu_suite.calibration import Calibrating
    from repro.gpu_suite.card import driver_card, platform_on, torch_card
    from repro.gpu_suite.suite import Suite, jobs_of
    from repro.gpu_suite.summary import README, draw, write_summary
    from repro.gpu_suite.verdict import VERDICT, write_verdict
    from repro.paths import IS_INSTALLED, LOCAL, REPO, RESULTS
    from repro.systems.dllm.part import DllmPart
    from repro.systems.platforms import platform as find_platform

    if not budget > 0:
        raise UserError(f"budget={budget:g} must be a positive number of seconds")
    if IS_INSTALLED and not dry_run:
        raise UserError("gpu-suite runs the tests and benchmarks of a checkout: clone the repository, and run it there")
    if first and stage:
        raise UserError(f"stage={stage[0]!r} and first: give one of them")
    card = driver_card()
    if dry_run:
        platform = platform or (LISTED if card is None else platform_on(card, None))
    elif platform is not None or card is not None:
        platform = platform_on(card, platform)  # a card that is another is said at once, before torch is loaded
    needs_card = platform is None or find_platform(platform).part(DllmPart).device != "cpu"
    if needs_card and not dry_run:
        found = torch_card()
        if isinstance(found, str):
            say(f"gpu-suite: nothing was run, {found}. It needs")
            say("an NVIDIA GPU with its driver (nvidia-smi must work); 24 GB for LLaDA-8B", "  ")
            say("a CUDA build of torch: make clean, then make setup TORCH=torch", "  ")
            say(
                "'repro doctor' says what this machine can run; 'repro gpu-suite --dry-run' lists the jobs, docs/gpu.md says "
                "what they are."
            )
            raise typer.Exit(1)
        card, platform = found, platform_on(found, platform)
    assert platform is not None
    scale = plan.scale_of(platform, None if card is None else card.memory_bytes)
    root = result_dir or RESULTS / platform
    asked = plan.stages(scale)
    known = list(dict.fromkeys(each.stage for each in asked))
    wanted = [name for name in plan.FIRST if name in known] if first else stage or known
    if unknown := sorted(set(wanted) - set(known)):
        raise UserError(f"stage={unknown[0]!r} is unknown: use one of {', '.join(known)}")
    told = {*wanted, *(() if dry_run else plan.FIRST)}  # the pages speak of the first stages, whatever is run
    jobs = jobs_of([each for each in asked if each.stage in told], LOCAL / EXPECTED)
    # As it was given: a machine's own path would be of use nowhere else.
    shown = str(root.relative_to(REPO)) if root.is_relative_to(REPO) else str(root)
    command = " ".join(
        [
            "python3 -m repro gpu-suite",
            f"--budget {budget:g}",
            f"--platform {platform}",
            f"--result-dir {shown}",
            *(["--first"] if first else []),
            *(f"--stage {name}" for name in stage or ()),
        ]
    )
    calibrating = Calibrating()

    def write_pages(suite: Suite) -> None:
        write_summary(suite)
        try:
            write_verdict(suite, calibrating)
        except Exception as error:  # minutes on a card are not lost to a page that any machine writes again
            say(f"{VERDICT} is not written ({type(error).__name__}: {error})", file=sys.stderr)

    suite = Suite(
        jobs=jobs,
        root=root,
        platform=platform,
        command=command,
        export=export,
        on_line=lambda line: say(line, file=sys.stderr),
        on_done=write_pages,
        stages=frozenset(wanted),
    )
    if dry_run:
        _list_jobs(suite, scale.where.title, json=json)
        return
    for option, folder in opt.given(export=export, result_dir=root).items():
        writable_folder(option, folder)
    outcome = suite.run(budget, began=began)
    drawn = draw(suite, plan.figures(scale)) if "figures" in wanted else []
    if json:
        print_json(
            {
                "ran": outcome.ran,
                "failed": outcome.failed,
                "left": outcome.left,
                "left_s": outcome.left_s,
                "stopped": outcome.stopped,
                "drawn": drawn,
                "command": command,
            }
        )
    else:
        say(
            f"{counted(outcome.ran, 'job')} ran, {len(outcome.failed)} failed, {len(outcome.left)} are left (about "
            f"{outcome.left_s:.0f} s): {outcome.stopped}"
        )
        for name in outcome.failed:
            say(f"failed {name}: {suite.entries[name].note}")
        if drawn:
            say(f"drawn: {', '.join(drawn)}")
        if outcome.left or outcome.failed:
            print(f"to go on: {command}")
        if first and (root / VERDICT).is_file():
            print("", (root / VERDICT).read_text(encoding="utf-8"), sep="\n")
        say(f"summary: {root / README}, verdict: {root / VERDICT}")
    if outcome.failed or (outcome.left and not outcome.ran):
        raise typer.Exit(1)


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
