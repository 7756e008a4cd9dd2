"""One page on what the GPU suite did: the machine, what the checks said, and what is left."""

from collections.abc import Sequence

from repro.files import replace_text
from repro.gpu_suite.checks import CHECK
from repro.gpu_suite.stages import Drawn
from repro.gpu_suite.suite import Suite
from repro.reports.figures import figure
from repro.runs.experiment import prepare
from repro.runs.provenance import Timing, collect, utc_now
from repro.runs.sweep import Sweep

README = "README.md"


def write_summary(suite: Suite) -> None:
    replace_text(suite.root / README, "\n".join(_lines(suite)))


def draw(suite: Suite, figures: Sequence[Drawn]) -> list[str]:
    """Draw every figure whose runs are all there; their names."""
    names = []
    for drawn in figures:
        sweep = Sweep([prepare(cell) for cell in drawn.cells], suite.store)
        if not sweep.missing:
            figure(drawn.name).load().render(sweep.runs, drawn.view, suite.root / "figures")
            names.append(drawn.name)
    return names


def _lines(suite: Suite) -> list[str]:
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
    left = [job for job in suite.chosen if suite.entries[job.name].status in ("new", "started")]
    left_s = sum(suite.expected_s(job) for job in left)
    # What checks said, and every job that failed.
    said = [
        f"- {job.stage}: {entry.status}, {entry.note}"
        for job in suite.jobs
        if (entry := suite.entries[job.name]).note and (job.experiment.family is CHECK or entry.status == "failed")
    ]
    return [
        *lines,
        "",
        "## Correct",
        "",
        *(said or ["Nothing was checked yet."]),
        "",
        "Throughput and steps are in verdict.md.",
        "",
        f"Left: {len(left)} jobs, about {left_s:.0f} s. To go on:",
        "",
        f"    {suite.command}",
        "",
    ]
