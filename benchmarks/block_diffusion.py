"""Holds block diffusion against full diffusion on embedded models of equal size: python benchmarks/block_diffusion.py --help

Both were trained by `repro train-tiny` on the same tasks, and serve the same held-out problems, all at once and at most so many at a
time, in steps of equal budget and by the same threshold of parallel decoding. Sides take turns repeat by repeat; compared is what a processor second solves,
which others on the machine hardly touch, paired by repeat. Answers end with the block that has their end of text.

    accuracy     share of the problems, Wilson's 95 % interval over all repeats
    forwards     packed steps of a repeat, each one forward; mean
    k rows       rows of all forwards of a repeat, in thousands; mean
    problems/s   problems per processor second; mean
    times        that over block diffusion in mixed steps's, and the ends of Student's 95 % interval of the paired logarithms

One thread on the CPU. Runs are stored in --result-dir, and reused; --csv has a row of each, which documents quote.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

from common import Rows, add_counts, cpu_cell, parser_of, run, shown, table

from repro.api import sweep
from repro.runs.cell import Scalar
from repro.runs.statistics import paired_ratio, wilson_interval
from repro.runs.store import StoredRun

_FULL = {"stop_at_eos": True}
SIDES: Mapping[str, tuple[str, Mapping[str, Scalar]]] = {
    "block, mixed steps": ("block-diffusion", {}),
    "block, synchronous": ("block-diffusion", {"batching": "synchronous"}),
    "dLLM-Serve, all context rows": ("dllm-serve", {"selection": "dense", **_FULL}),
    "Fast-dLLM, dual cache": ("fast-dllm", {"cache": "dual", "reading": "policy", **_FULL}),
    "no cache": ("fast-dllm", {"cache": "none", "reading": "policy", **_FULL}),
}
"""The first is what others are compared with."""
TASKS = ("mini-gsm", "mini-code")


@dataclass(frozen=True, kw_only=True)
class Row:
    task: str = shown("task")
    side: str = shown("side")
    accuracy: float = shown("accuracy %", ".1f", 100)
    low: float = shown("from", ".1f", 100)
    high: float = shown("to", ".1f", 100)
    num_problems: int = shown("n")
    forwards: float = shown("forwards", ".0f")
    rows: float = shown("k rows", ".1f", 1e-3)
    problems_per_s: float = shown("problems/s", ".1f")
    times: float | None = shown("times", ".2f")
    times_low: float | None = shown("from", ".2f")
    times_high: float | None = shown("to", ".2f")


def main() -> None:
    parser = parser_of(__doc__)
    add_counts(
        parser,
        problems=(64, "of each task, others in every repeat"),
        at_once=(16, "requests running at once"),
        rows=(4096, "budget of a step"),
        repeats=(3, "of everything, with seeds 0, 1, ..."),
    )
    parser.add_argument("--threshold", type=float, default=0.9, help="confidence above which tokens are taken")
    parser.add_argument("--result-dir", type=Path, default=Path("results/local/block-diffusion"))
    parser.add_argument("--csv", type=Path, help="write a row of each run here")
    options = parser.parse_args()
    shared = {
        "num_prompts": options.problems,
        "max_num_seqs": options.at_once,
        "max_num_batched_tokens": options.rows,
        "threshold": options.threshold,
    }
    cells = {
        (task, side, seed): cpu_cell(system, task, seed, {**shared, **own})
        for task in TASKS
        for side, (system, own) in SIDES.items()
        for seed in range(options.repeats)
    }
    runs = dict(zip(cells, sweep(list(cells.values()), interleave=True, result_dir=options.result_dir), strict=True))
    if options.csv is not None:
        write_csv(options.csv, runs)
    rows = Rows(options.json, {"threshold": options.threshold, "at_once": options.at_once})
    for task in TASKS:
        first = _speeds([runs[task, next(iter(SIDES)), seed] for seed in range(options.repeats)])
        for side in SIDES:
            rows.add(_row(task, side, [runs[task, side, seed] for seed in range(options.repeats)], first))
    print(table(rows.rows))


COLUMNS = (
    "task",
    "side",
    "seed",
    "solved",
    "n",
    "forwards",
    "rows",
    "processor_s",
    "problems_per_s",
    "obtained",
    "valid",
)


def write_csv(path: Path, runs: Mapping[tuple[str, str, int], StoredRun]) -> None:
    """A row of each run, by task, side and seed."""
    with path.open("w", newline="", encoding="utf-8") as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow(COLUMNS)
        for (task, side, seed), run in runs.items():
            n, spent = run.summary["accuracy"]["n"], run.facts["processor_s"]
            solved = round(run.summary["accuracy"]["value"] * n)
            counts = (solved, n, run.summary["num_steps"], _rows_of(run), spent, n / spent)
            table.writerow((task, side, seed, *counts, run.obtained, str(run.validity.valid).lower()))


def _row(task: str, side: str, own: Sequence[StoredRun], first: Mapping[int, float]) -> Row:
    n = sum(run.summary["accuracy"]["n"] for run in own)
    solved = round(sum(run.summary["accuracy"]["value"] * run.summary["accuracy"]["n"] for run in own))
    low, high = wilson_interval(solved, n)
    speeds = _speeds(own)
    ratio = paired_ratio(speeds, first)
    return Row(
        task=task,
        side=side,
        accuracy=solved / n,
        low=low,
        high=high,
        num_problems=n,
        forwards=fmean(run.summary["num_steps"] for run in own),
        rows=fmean(_rows_of(run) for run in own),
        problems_per_s=fmean(speeds.values()),
        times=ratio.mean,
        times_low=ratio.low,
        times_high=ratio.high,
    )


def _speeds(own: Sequence[StoredRun]) -> dict[int, float]:
    """Problems per processor second, by seed."""
    return {run.cell.seed: run.summary["accuracy"]["n"] / run.facts["processor_s"] for run in own}


def _rows_of(run: StoredRun) -> int:
    steps = run.record.tables["steps"]
    return sum(steps["num_rows" if "num_rows" in steps else "query_tokens"])


if __name__ == "__main__":
    run(main)
