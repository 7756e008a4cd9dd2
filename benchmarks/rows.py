"""Holds policies that compute fewer rows against every row, problem by problem: python benchmarks/rows.py --help

The same held-out problems are asked of every policy of `repro reproduce frontier` that reads all context, of two settings beside `balanced`, and of block
diffusion where its embedded model was trained on the task, one token a step and by threshold; of a single Refresh that keeps part of the context
in blocks of 8, one token a step. Compared is which problems are solved, at one pace.

    solved       of so many problems; Wilson's 95 % interval, %
    rows         of all problems
    lost, won    problems that only the reference solves, and only this; their difference in points with its 95 % interval, and the p of
                 McNemar's exact test

Runs are stored in --result-dir, and reused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

from common import Rows, add_counts, parser_of, run, shown, table, write_csv

from paper_figures.dllm_serve.frontier import rows_per_request
from paper_figures.dllm_serve.row_policies import BLOCK_DIFFUSION, PACES, POLICIES, SETTINGS, task_of
from repro.api import sweep
from repro.reports.figures import Knobs
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import discordance, wilson_interval
from repro.runs.store import StoredRun
from repro.systems.block.settings import EMBEDDED_TASKS

EVERY, REFRESH = "every row", "single Refresh"
"""What others are compared with."""
_NO_CACHE: Knobs = (("cache", "none"), ("reading", "policy"))
_SETTLED: Knobs = (("selection", "dense"), ("refresh_delay", 0), ("settle_after", 1))
ASKED: Mapping[str, tuple[str, Knobs]] = {
    EVERY: ("fast-dllm", _NO_CACHE),
    **{policy.name: (policy.system, policy.knobs) for policy in POLICIES if policy.is_fixed},
    "settled, renewed, prompt every second block": ("dllm-serve", (*_SETTLED, ("renew_at", 2), ("full_every", 2))),
    "settled, renewed at four, prompt every fourth block": (
        "dllm-serve",
        (*_SETTLED, ("renew_at", 4), ("full_every", 4)),
    ),
}
WHERE: Mapping[str, Knobs] = {
    **SETTINGS,
    "mini-chain in blocks of 32": (*SETTINGS["mini-chain in blocks of 16"], ("block_length", 32)),
}


def _kept(selection: str, ratio: float, **more: int) -> tuple[str, Knobs]:
    name = ", ".join((f"{selection} {ratio:g}", *(f"{knob}={value}" for knob, value in more.items())))
    return name, (("refresh_delay", 0), ("selection", selection), ("retention_ratio", ratio), *more.items())


KEPT: Mapping[str, Knobs] = dict(
    (
        *(_kept("head", ratio) for ratio in (0.5, 0.98)),
        *(_kept("attended", ratio) for ratio in (0.5, 0.9, 0.95)),
        _kept("uniform", 0.5, whole_layer=1),
        *(_kept("head", ratio, whole_layer=1) for ratio in (0.5, 0.3)),
        *(_kept("attended", ratio, whole_layer=1) for ratio in (0.2, 0.15)),
        _kept("attended", 0.1, whole_layer=1, pool_kernel=1),
        _kept("attended", 0.1, whole_layer=1),
    )
)
"""Which context rows a single Refresh keeps."""


@dataclass(frozen=True, kw_only=True)
class Row:
    setting: str = shown("setting")
    pace: str = shown("pace")
    policy: str = shown("policy")
    solved: int = shown("solved")
    n: int = shown("n")
    low: float = shown("from", ".1f")
    high: float = shown("to", ".1f")
    rows: int = shown("rows")
    reference: str = shown("against")
    lost: int = shown("lost")
    won: int = shown("won")
    points: float = shown("points", "+.1f")
    points_low: float = shown("from", "+.1f")
    points_high: float = shown("to", "+.1f")
    p_value: float = shown("p", ".2f")

    @staticmethod
    def of(name: tuple[str, str, str], own: StoredRun, reference: str, other: StoredRun) -> Row:
        setting, pace, policy = name
        verdicts = own.record.requests["correct"]
        found = discordance(other.record.requests["correct"], verdicts)
        n, lost, won = found.n, found.only_first, found.only_second
        points, width = 100 * (won - lost) / n, 100 * half_width(lost, won, n)
        low, high = wilson_interval(sum(verdicts), n)
        return Row(
            setting=setting,
            pace=pace,
            policy=policy,
            solved=sum(verdicts),
            n=n,
            low=100 * low,
            high=100 * high,
            rows=round(rows_per_request(own) * n),
            reference=reference,
            lost=lost,
            won=won,
            points=points,
            points_low=points - width,
            points_high=points + width,
            p_value=found.p_value,
        )


def half_width(lost: int, won: int, n: int) -> float:
    """Half the length of the 95 % interval (Wald) of a difference of paired shares."""
    return 1.959963984540054 * math.sqrt(lost + won - (won - lost) ** 2 / n) / n


def cpu_cell(system: str, dataset: str, seed: int, knobs: Mapping[str, Scalar]) -> Cell:
    """All requests at once, measured on a CPU with an embedded model."""
    return Cell(
        system=system,
        dataset=dataset,
        platform="cpu-tiny",
        executor="torch",
        rate=None,
        seed=seed,
        knobs=tuple(knobs.items()),
    )


def main() -> None:
    parser = parser_of(__doc__)
    add_counts(parser, problems=(500, "of each task, the same for all"))
    parser.add_argument("--seed", type=int, default=1, help="of the problems")
    parser.add_argument("--settings", nargs="+", choices=tuple(WHERE), default=tuple(WHERE), help="all by default")
    parser.add_argument("--result-dir", type=Path, default=Path("results/local/rows"))
    parser.add_argument("--csv", type=Path, help="write a row of each comparison here")
    options = parser.parse_args()
    cells = {
        (setting, pace, policy): cell
        for setting in options.settings
        for pace, policy, cell in cells_of(setting, options.problems, options.seed)
    }
    runs = dict(zip(cells, sweep(list(cells.values()), result_dir=options.result_dir), strict=True))
    rows = Rows(options.json, {"seed": options.seed})
    for (setting, pace, policy), own in runs.items():
        for reference in (EVERY, REFRESH):
            if reference == REFRESH and policy in (EVERY, REFRESH):
                continue
            # Block diffusion's own threshold stands for theirs.
            at = pace if pace in PACES else "threshold 0.9"
            rows.add(Row.of((setting, pace, policy), own, reference, runs[setting, at, reference]))
    print(table(rows.rows))
    if options.csv is not None:
        write_csv(options.csv, rows.rows)


def cells_of(setting: str, num_problems: int, seed: int) -> Iterator[tuple[str, str, Cell]]:
    """Pace, policy and cell."""
    task, lengths = task_of(setting), dict(WHERE[setting])
    shared: Knobs = (("num_prompts", num_problems),)
    if lengths["block_length"] == 8:
        for rule, knobs in KEPT.items():
            yield next(iter(PACES)), rule, cpu_cell("dllm-serve", task, seed, {**lengths, **dict((*knobs, *shared))})
    for pace, own in PACES.items():
        for policy, (system, knobs) in ASKED.items():
            yield pace, policy, cpu_cell(system, task, seed, {**lengths, **dict((*own, *knobs, *shared))})
    if task in EMBEDDED_TASKS:
        short = {"gen_length": lengths["gen_length"]}
        for pace, own in (BLOCK_DIFFUSION.paces or {}).items():
            knobs = {**short, **dict((*own, *BLOCK_DIFFUSION.knobs, *shared))}
            yield pace, BLOCK_DIFFUSION.name, cpu_cell(BLOCK_DIFFUSION.system, task, seed, knobs)


if __name__ == "__main__":
    run(main)
