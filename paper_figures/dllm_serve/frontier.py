"""Accuracy against throughput (ours): which rows a step may leave out, beside how many tokens it commits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paper_figures.common.caption import (
    basis_of,
    how_obtained,
    invalid_notes,
    missing_note,
    obtained_text,
    seeds_sentence,
    validity_text,
)
from paper_figures.common.figure import Page, Picture, Table, cell_by_cell
from paper_figures.common.panel import Axis, Guide, Layer, Line, Panel, Text
from paper_figures.common.runs import Runs
from paper_figures.common.style import Look
from paper_figures.common.words import shown
from paper_figures.dllm_serve.accuracy import share
from paper_figures.dllm_serve.comparison import OURS
from paper_figures.dllm_serve.layout import dllm_figure
from repro.reports.accuracy import Solved
from repro.reports.figures import Knobs, View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval, mean_interval
from repro.runs.store import StoredRun
from repro.systems.block.settings import EMBEDDED, EMBEDDED_TASKS, NAME
from repro.systems.dllm.family import STEPS
from repro.systems.dllm.part import DllmPart
from repro.systems.platforms import Platform

SOURCE = "ours; whole blocks and whole Refreshes are Fast-dLLM's dual cache (arXiv:2505.22618)"
NUM_PROBLEMS = 50
"""A seed's, of each task."""
CARD_REQUESTS = 64
ONE_REFRESH: Knobs = (("selection", "dense"), ("refresh_delay", 0))


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which rows its steps compute."""

    name: str
    look: Look
    system: str = OURS
    knobs: Knobs = ONE_REFRESH
    paces: Mapping[str, Knobs] | None = None
    """Replace the platform's, for a system of its own."""


FAST_DLLM = Policy(
    name="Fast-dLLM's rule", system="fast-dllm", knobs=(("reading", "policy"),), look=Look(color="#E69F00", marker="s")
)
POLICIES = (
    FAST_DLLM,
    Policy(name="single Refresh", look=Look(color="#0072B2", marker="o")),
    Policy(name="settled", knobs=(*ONE_REFRESH, ("settle_after", 1)), look=Look(color="#CC79A7", marker="v")),
    Policy(
        name="settled, renewed",
        knobs=(*ONE_REFRESH, ("settle_after", 1), ("renew_at", 2)),
        look=Look(color="#56B4E9", marker="^"),
    ),
    Policy(
        name="settled, renewed, prompt once",
        knobs=(*ONE_REFRESH, ("settle_after", 1), ("renew_at", 2), ("full_every", 100)),
        look=Look(color="#009E73", marker="D"),
    ),
)
SETTINGS: Mapping[str, Knobs] = {
    "mini-gsm in blocks of 32": (("gen_length", 64), ("block_length", 32), ("steps", 64)),
    "mini-code in blocks of 8": (("gen_length", 40), ("block_length", 8), ("steps", 40)),
    "mini-chain in blocks of 16": (("gen_length", 96), ("block_length", 16), ("steps", 96), ("model", "tiny-long")),
}
"""The first leaves much of a block to settle, the second has several blocks to refresh, and of the third each block needs what the
one before came to."""
PACES: Mapping[str, Knobs] = {"one token a step": (), "threshold 0.9": (("threshold", 0.9),)}
BLOCK_DIFFUSION = Policy(
    name="block diffusion in blocks of 16",
    system=NAME,
    knobs=(("model", EMBEDDED),),
    paces={"one token a step": (("rule", "static"),), "threshold 0.95": (("threshold", 0.95),)},
    look=Look(color="#D55E00", marker="P"),
)
"""Another model of tiny's size (tiny-block), in an engine of its own; its steps take the same rows at most."""
CARD_PACES: Mapping[str, Knobs] = {
    "one token a step": (("steps", 256),),
    "four tokens a step": (("steps", 64),),
    "three steps a block": (("steps", 24),),
}
CARD_SETTING = "burst, 256 tokens in blocks of 32"
CSV_COLUMNS = (
    *("platform", "setting", "pace", "policy", "seed", "accuracy", "low", "high", "n", "rows_per_request"),
    *("throughput_tok_s", "processor_s", "obtained", "valid", "run_folder"),
)


@dataclass(frozen=True, kw_only=True)
class Point:
    setting: str
    pace: str
    policy: Policy
    runs: tuple[StoredRun, ...]
    against: tuple[StoredRun, ...]
    """Those of Fast-dLLM's rule at one token a step."""

    @property
    def solved(self) -> Solved | None:
        return share(self.runs)

    @property
    def rows(self) -> float | None:
        """Computed for a request."""
        return mean_interval([rows_per_request(run) for run in self.runs if run.validity.valid]).mean

    @property
    def speedup(self) -> Interval:
        """Mean over seeds' pairs; in processor time where the run has it, which other work on a machine disturbs less."""
        theirs = {run.cell.seed: run for run in self.against if run.validity.valid}
        pairs = [(run, theirs[run.cell.seed]) for run in self.runs if run.validity.valid and run.cell.seed in theirs]
        return mean_interval([seconds(other) / seconds(run) for run, other in pairs])


def rows_per_request(run: StoredRun) -> float:
    rows = "num_rows" if run.cell.system == NAME else "query_tokens"
    return float(sum(run.record.tables[STEPS][rows]) / run.num_requests)


def seconds(run: StoredRun) -> float:
    taken = run.facts.get("processor_s")
    return float(np.sum(run.record.tables[STEPS]["duration_s"]) if taken is None else taken)


def paces(where: Platform, policy: Policy = FAST_DLLM) -> Mapping[str, Knobs]:
    return policy.paces or (PACES if where.gpu is None else CARD_PACES)


def settings(where: Platform) -> tuple[str, ...]:
    return tuple(SETTINGS) if where.gpu is None else (CARD_SETTING,)


def task_of(setting: str) -> str:
    return setting.partition(" ")[0]


def asked(where: Platform) -> list[tuple[str, str, Policy]]:
    """Setting, pace and policy of every point. Block diffusion is asked of the tasks that its embedded model was trained on; on a card it
    would be a model of other weights, and rows say nothing of what its accuracy costs."""
    found = []
    for setting in settings(where):
        found += [(setting, pace, policy) for pace in paces(where) for policy in POLICIES]
        if where.gpu is None and task_of(setting) in EMBEDDED_TASKS:
            found += [(setting, pace, BLOCK_DIFFUSION) for pace in paces(where, BLOCK_DIFFUSION)]
    return found


def cell_of(view: View, setting: str, pace: str, policy: Policy) -> Cell:
    where, dataset = view.platform, task_of(setting)
    own: Knobs
    if where.gpu is not None:
        dataset, own = "burst", (("num_prompts", CARD_REQUESTS),)
    elif policy.system == NAME:
        own = (("gen_length", dict(SETTINGS[setting])["gen_length"]), ("num_prompts", NUM_PROBLEMS))
        own += (("max_num_batched_tokens", where.part(DllmPart).max_num_batched_tokens),)
    else:
        own = (*SETTINGS[setting], ("num_prompts", NUM_PROBLEMS))
    knobs = {**dict(own), **dict(paces(where, policy)[pace]), **dict(policy.knobs), **dict(view.together("frontier"))}
    return view.cell(None, policy.system, dataset, knobs=tuple(knobs.items()))


def points_of(runs: Runs) -> list[Point]:
    view, where = runs.view, runs.view.platform
    first = next(iter(paces(where)))
    return [
        Point(
            setting=setting,
            pace=pace,
            policy=policy,
            runs=runs.of(cell_of(view, setting, pace, policy)),
            against=runs.of(cell_of(view, setting, first, FAST_DLLM)),
        )
        for setting, pace, policy in asked(where)
    ]


def cells(view: View) -> list[Cell]:
    """All requests of a run at once."""
    return cell_by_cell((cell_of(view, *each) for each in asked(view.platform)), view)


def page(runs: Runs) -> Page:
    where, found = runs.view.platform, points_of(runs)
    complete = [point for point in found if point.runs]
    missing = [f"{point.setting} {point.pace} {point.policy.name}" for point in found if not point.runs]
    sentences = [
        "The engine, scheduler and batching are the same for all"
        + (" but block diffusion" if where.gpu is None else "")
        + ", dLLM-Serve's. Speed-up: over Fast-dLLM's rule at one token a step, "
        + ("in processor time, " if where.gpu is None else "")
        + "mean of pairs of a seed with its 95 % interval.",
        *(
            [
                "Accuracy: problems of all seeds, with Wilson's 95 % interval. mini-chain is asked of tiny-long, block diffusion of "
                "tiny-block, the others of tiny. Block diffusion ends with the block that has its end of text; the others denoise all "
                "tokens that are asked for."
            ]
            if where.gpu is None
            else ["On a card nothing is answered: tokens a step are fixed, and rows say what accuracy costs."]
        ),
        seeds_sentence(runs.all),
        *how_obtained(runs.all),
    ]
    return Page(
        table=Table(
            columns=("setting", "pace", "rows computed", "accuracy %", "rows/request", "speed-up", "obtained", "valid"),
            rows=[table_row(point) for point in complete],
        ),
        csv=Table(columns=CSV_COLUMNS, rows=[csv_row(where, point, run) for point in complete for run in point.runs]),
        picture=Picture(
            panels=[panel(setting, complete, where) for setting in settings(where)],
            caption=sentences,
            always=seeds_sentence(runs.all),
        ),
        notes=[*invalid_notes(runs.all), *missing_note(missing, len(found)), *sentences],
        after_heading=f" - {where.title}",
    )


def table_row(point: Point) -> tuple[str, ...]:
    faster = point.speedup
    width = "" if faster.half_width is None else f" ± {faster.half_width:.2f}"
    return (
        point.setting,
        point.pace,
        point.policy.name,
        "-" if point.solved is None else str(point.solved),
        shown(point.rows, ".0f"),
        f"{shown(faster.mean, '.2f')}{width}",
        obtained_text(point.runs),
        validity_text(point.runs),
    )


def csv_row(where: Platform, point: Point, run: StoredRun) -> tuple[object, ...]:
    solved = share((run,))
    graded = (None,) * 4 if solved is None else (solved.share, solved.low, solved.high, solved.n)
    return (
        *(where.name, point.setting, point.pace, point.policy.name, run.cell.seed, *graded, rows_per_request(run)),
        *(run.summary["throughput_tok_s"], run.facts.get("processor_s"), run.obtained, run.validity.valid),
        run.cell.folder_name,
    )


def panel(setting: str, complete: Sequence[Point], where: Platform) -> Panel:
    """Accuracy over the speed-up; on a card, where nothing is answered, the speed-up over the rows left."""
    own = [point for point in complete if point.setting == setting and point.speedup.mean is not None]
    layers: list[Layer] = [Text(text="no valid runs")] if not own else [Guide(value=1.0, is_upright=where.gpu is None)]
    for policy in (*POLICIES, BLOCK_DIFFUSION):
        line = [point for point in own if point.policy is policy]
        if not line:
            continue
        if where.gpu is None:
            places, at = [point.speedup.mean or 0.0 for point in line], [percent(point.solved) for point in line]
        else:
            places, at = [point.rows or 0.0 for point in line], [point.speedup for point in line]
        layers.append(Line(label=policy.name, places=places, at=at, look=policy.look))
    if where.gpu is None:
        return Panel(
            title=setting, layers=layers, x=Axis(label="speed-up over Fast-dLLM's rule"), y=Axis(label="accuracy (%)")
        )
    return Panel(title=setting, layers=layers, x=Axis(label="rows a request computes"), y=Axis(label="speed-up"))


def percent(solved: Solved | None) -> Interval:
    if solved is None:
        return mean_interval([])
    low, high = 100 * solved.low, 100 * solved.high
    return Interval(
        mean=100 * solved.share, half_width=(high - low) / 2, n=solved.n, confidence=0.95, bounds=(low, high)
    )


FIGURE = dllm_figure(
    "frontier",
    SOURCE,
    platforms=("cpu-tiny", "rtx4090", "h200"),
    page=page,
    cells=cells,
    num_runs=3,
    decides_on=(),
    under_title=basis_of,
)
