"""One page on what the GPU suite found: is it correct, is it fast, and what is left."""

from __future__ import annotations

from collections.abc import Sequence

from repro.files import replace_text
from repro.gpu_suite.checks import CHECK
from repro.gpu_suite.stages import OURS, Drawn, title_of
from repro.gpu_suite.suite import Job, Suite
from repro.reports.figures import figure
from repro.runs.experiment import prepare_all
from repro.runs.provenance import Timing, collect, utc_now
from repro.runs.store import StoredRun
from repro.runs.sweep import Sweep

README = "README.md"


def write_summary(suite: Suite) -> None:
    replace_text(suite.root / README, "\n".join(_lines(suite)))


def draw(suite: Suite, figures: Sequence[Drawn]) -> list[str]:
    """Draw every figure whose runs are all there; their names."""
    names = []
    for drawn in figures:
        sweep = Sweep(prepare_all(drawn.cells), suite.store)
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
    return [
        *lines,
        "",
        "## Correct",
        "",
        *_correctness(suite),
        "",
        "## Fast",
        "",
        *_speed(suite),
        "",
        f"Left: {len(left)} jobs, about {left_s:.0f} s. To go on:",
        "",
        f"    {suite.command}",
        "",
    ]


def _correctness(suite: Suite) -> list[str]:
    """What checks said, and every job that failed."""
    said = [
        f"- {job.stage}: {entry.status}, {entry.note}"
        for job in suite.jobs
        if (entry := suite.entries[job.name]).note and (job.experiment.family is CHECK or entry.status == "failed")
    ]
    return said or ["Nothing was checked yet."]


def _speed(suite: Suite) -> list[str]:
    """Throughput with all requests there at once, by what ran together."""
    found = [
        (job, run)
        for job in suite.jobs
        if job.stage in ("throughput", "small-card", "paper-length", "burst") and (run := suite.stored(job)) is not None
    ]
    if not found:
        return ["Nothing was measured yet."]
    rows = [
        "Throughput at saturation, all requests there at once. Roofline: the time in which the card's peaks could have done "
        "the same steps, over the time they took.",
        "",
        "| stage | model | memory | system | tok/s | of best baseline | roofline | outside forward | graphs | requests | valid |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    best: dict[tuple[str, str], float] = {}
    for job, run in found:
        speed = run.summary["throughput_tok_s"] or 0.0
        if job.experiment.cell.system != OURS and run.validity.valid:
            best[_group(job, run)] = max(speed, best.get(_group(job, run), 0.0))
    rows += [_row(job, run, best.get(_group(job, run))) for job, run in found]
    return rows


def _group(job: Job, run: StoredRun) -> tuple[str, str]:
    return job.stage, run.manifest["facts"]["model"]


def _row(job: Job, run: StoredRun, best: float | None) -> str:
    cell, summary = job.experiment.cell, run.summary
    limit = run.facts.get("enforced_memory_bytes") or cell.knob_values.get("memory_limit")
    size = "all" if limit is None else f"{float(limit) / 1e9:.3g} GB"
    speed = summary["throughput_tok_s"]
    ratio = f"{speed / best:.2f}x" if speed and best else "-"
    shares = [
        "-" if summary[name] is None else f"{100 * summary[name]:.0f} %"
        for name in ("roofline_share", "outside_forward_share", "graph_hit_rate")
    ]
    cells = (
        job.stage,
        run.manifest["facts"]["model"],
        size,
        title_of(cell),
        "-" if speed is None else f"{speed:.1f}",
        ratio,
        *shares,
        str(run.num_requests),
        "yes" if run.validity.valid else "NO",
    )
    return f"| {' | '.join(cells)} |"
