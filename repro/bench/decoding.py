"""Holds ways to decode against each other on embedded models: python -m repro.bench.decoding --help

All models were trained by `repro train-tiny` on the same tasks. They serve the same held-out problems, which arrive together and run at
most --at-once at a time, in steps of equal budget. Sides take turns, repeat by repeat. We compare problems answered per processor second,
paired by repeat, because other work on the machine hardly affects it. An answer ends with the block or canvas that has its end of text. No
embedded model is autoregressive: the block model with one token per forward, from the left, stands for one.

    solved     problems solved, of all, with Wilson's 95 % interval of the share in percent
    forwards   packed steps per repeat; mean
    tokens     answer tokens per forward of its request, commit forwards included; unknown for full diffusion
    problems/s answered per processor second; mean
    times      problems/s over the first side's, with Student's 95 % interval of the paired logarithms

One thread on the CPU. Runs are stored in --result-dir, and reused. --csv writes a row per run, which documents quote.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from repro.api import sweep
from repro.bench.common import Rows, add_counts, parser_of, run, table
from repro.files import replace_text
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import paired_ratio, wilson_interval
from repro.runs.store import StoredRun

_BLOCK, _FULL, _SURE = "block-diffusion", {"stop_at_eos": True}, {"threshold": 0.9}
SIDES: Mapping[str, tuple[str, Mapping[str, Scalar]]] = {
    "block": (_BLOCK, _SURE),
    "block, one token a forward": (_BLOCK, {"rule": "sequential", "steps": 16}),
    "canvas": (_BLOCK, {"model": "tiny-canvas"}),
    "canvas, one forward may do": (_BLOCK, {"model": "tiny-canvas", "stability": 0}),
    "canvas, synchronous": (_BLOCK, {"model": "tiny-canvas", "batching": "synchronous"}),
    "dLLM-Serve": ("dllm-serve", {"selection": "dense", **_FULL, **_SURE}),
    "Fast-dLLM": ("fast-dllm", {"cache": "dual", "reading": "policy", **_FULL, **_SURE}),
}
"""The first side is the one that others are compared with."""
TASKS = ("mini-gsm", "mini-code")


def main() -> None:
    parser = parser_of(__doc__)
    add_counts(
        parser,
        problems=(64, "of each task, others in every repeat"),
        at_once=(16, "requests running at once"),
        rows=(4096, "budget of a step"),
        repeats=(3, "of everything, with seeds 0, 1, ..."),
    )
    parser.add_argument("--result-dir", type=Path, default=Path("results/local/decoding"))
    parser.add_argument("--csv", type=Path, help="write a row of each run here")
    options = parser.parse_args()
    shared = {"num_prompts": options.problems, "max_num_seqs": options.at_once, "max_num_batched_tokens": options.rows}
    cells = {
        (task, side, seed): Cell(
            system=system,
            dataset=task,
            platform="cpu-tiny",
            executor="torch",
            rate=None,
            seed=seed,
            knobs=tuple({**shared, **knobs}.items()),
        )
        for task in TASKS
        for side, (system, knobs) in SIDES.items()
        for seed in range(options.repeats)
    }
    runs = dict(zip(cells, sweep(list(cells.values()), interleave=True, result_dir=options.result_dir), strict=True))
    if options.csv is not None:
        write_csv(options.csv, runs)
    rows = Rows(options.json, dict(shared))
    for task in TASKS:
        of_side = {side: [runs[task, side, seed] for seed in range(options.repeats)] for side in SIDES}
        for side, side_runs in of_side.items():
            rows.add({"task": task, "side": side, **comparison_row(side_runs, next(iter(of_side.values())))})
    print(table(rows.rows))


def counts_of(stored: StoredRun) -> dict[str, Any]:
    accuracy, processor_s = stored.summary["accuracy"], stored.facts["processor_s"]
    n = accuracy["n"]
    return {
        "solved": round(accuracy["value"] * n),
        "n": n,
        "forwards": stored.summary["num_steps"],
        "tokens_per_forward": stored.summary.get("tokens_per_forward", ""),
        "processor_s": processor_s,
        "problems_per_s": n / processor_s,
    }


def write_csv(path: Path, runs: Mapping[tuple[str, str, int], StoredRun]) -> None:
    """Write a row for each run, by task, side and seed."""
    buffer = io.StringIO()
    rows = csv.writer(buffer, lineterminator="\n")
    for i, ((task, side, seed), stored) in enumerate(runs.items()):
        counts = counts_of(stored)
        if not i:
            rows.writerow(("task", "side", "seed", *counts, "obtained", "valid"))
        rows.writerow((task, side, seed, *counts.values(), stored.obtained, str(stored.validity.valid).lower()))
    replace_text(path, buffer.getvalue())


def comparison_row(runs: Sequence[StoredRun], first: Sequence[StoredRun]) -> dict[str, Any]:
    counts = [counts_of(stored) for stored in runs]
    solved, n = (int(sum(row[name] for row in counts)) for name in ("solved", "n"))
    speeds, base = ({each.cell.seed: counts_of(each)["problems_per_s"] for each in group} for group in (runs, first))
    ratio = paired_ratio(speeds, base)
    low, high = wilson_interval(solved, n)
    means = {name: fmean(row[name] for row in counts) for name in ("forwards", "problems_per_s")}
    tokens = [row["tokens_per_forward"] for row in counts if row["tokens_per_forward"]]
    return {
        "solved": f"{solved} of {n}",
        "from %": 100 * low,
        "to %": 100 * high,
        "tokens": fmean(tokens) if tokens else None,
        **means,
        "times": ratio.mean,
        "times from": ratio.low,
        "times to": ratio.high,
    }


if __name__ == "__main__":
    run(main)
