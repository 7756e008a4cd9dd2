"""``repro gpu-suite``: everything that is to be measured on a GPU, a bounded call at a time."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from engines.errors import UserError
from repro.cli import options as opt
from repro.cli.output import print_json, print_table


def gpu_suite(
    budget: Annotated[float, typer.Option(help="Seconds this call may take; the next job has to fit.")] = 520.0,
    result_dir: Annotated[Path | None, typer.Option(help="Where results go [default: results/PLATFORM].")] = None,
    platform: Annotated[
        str, typer.Option(help="h200, l40s or rtx4090; cpu-tiny runs the stages small, on this CPU.")
    ] = "h200",
    stage: Annotated[list[str] | None, typer.Option(help="Only this stage; several times.")] = None,
    dry_run: Annotated[bool, typer.Option(help="List the jobs with their estimates, on any machine.")] = False,
    json: opt.Json = False,
) -> None:
    """Tests, goldens, agreement, throughput, growth, benchmarks and figures on a card; goes on where the last call stopped."""
    began = time.monotonic()
    from repro.gpu_suite.jobs import all_jobs, scale_of
    from repro.gpu_suite.suite import Suite
    from repro.paths import REPO, RESULTS

    if budget <= 0:
        raise UserError(f"budget={budget:g} must be a positive number of seconds")
    scale = scale_of(platform)
    if scale.device == "cuda" and not dry_run and (missing := _missing_cuda()):
        print(
            f"gpu-suite: not run, {missing}. It needs\n"
            "  an NVIDIA GPU with its driver (nvidia-smi must work); 24 GB for LLaDA-8B\n"
            "  a CUDA build of torch: make clean, then make setup TORCH=torch\n"
            "'repro doctor' says what this machine can run; 'repro gpu-suite --dry-run' lists the jobs, docs/gpu.md says what they are."
        )
        return
    root = result_dir or RESULTS / platform
    jobs = all_jobs(scale, root)
    stages = list(dict.fromkeys(job.stage for job in jobs))
    if unknown := sorted(set(stage or ()) - set(stages)):
        raise UserError(f"stage={unknown[0]!r} is unknown: use one of {', '.join(stages)}")
    if stage:
        kept = {job.name for job in jobs if job.stage in stage}
        # A drawing needs runs that another stage may list.
        jobs = [
            job for job in jobs if job.name in kept or any(job.name in each.needs for each in jobs if each.name in kept)
        ]
    # As it was given: a machine's own path would be of use nowhere else.
    shown = str(root.relative_to(REPO)) if root.is_relative_to(REPO) else str(root)
    command = " ".join(
        [
            "python3 -m repro gpu-suite",
            f"--budget {budget:g}",
            f"--platform {platform}",
            f"--result-dir {shown}",
            *(f"--stage {name}" for name in stage or ()),
        ]
    )
    suite = Suite(
        jobs=jobs, root=root, platform=platform, command=command, on_line=lambda line: print(line, file=sys.stderr)
    )
    if dry_run:
        rows = [(job.stage, job.name, f"{suite.expected_s(job):.0f}", suite.entries[job.name].status) for job in jobs]
        total = sum(suite.expected_s(job) for job in jobs if suite.entries[job.name].status != "done")
        if json:
            print_json(
                {
                    "jobs": [{"stage": s, "name": n, "expected_s": float(e), "status": v} for s, n, e, v in rows],
                    "left_s": total,
                }
            )
        else:
            print_table(f"GPU suite on {scale.platform.title}", ("stage", "job", "expected s", "status"), rows)
            print(f"{len(rows)} jobs, about {total:.0f} s left")
        return
    outcome = suite.run(budget, began=began)
    if json:
        print_json(
            {
                "ran": outcome.ran,
                "failed": outcome.failed,
                "left": outcome.left,
                "left_s": outcome.left_s,
                "stopped": outcome.stopped,
                "command": command,
            }
        )
    else:
        print(
            f"{outcome.ran} jobs ran, {len(outcome.failed)} failed, {len(outcome.left)} are left (about {outcome.left_s:.0f} s): "
            f"{outcome.stopped}"
        )
        for name in outcome.failed:
            print(f"failed {name}: {suite.entries[name].note}")
        if outcome.left or outcome.failed:
            print(f"to go on: {command}")
        print(f"summary: {root / 'README.md'}")
    if outcome.failed:
        raise typer.Exit(1)


def _missing_cuda() -> str | None:
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"torch cannot be loaded ({type(error).__name__})"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"
