"""LAPS §3.2 on eight instances without graphs: pools that stay as they are against a controller that moves instances (ours)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from paper_figures.common.caption import invalid_notes
from paper_figures.common.table import save_table
from paper_figures.laps.compare import MEAN, Of, Pairs, late, number, said
from paper_figures.laps.contenders import CAPACITY, CONTENDERS, LMSYS, MIDDLE, PAIRED_SEEDS, seeded
from paper_figures.laps.layout import CSV_COLUMNS, csv_rows, obtained_sentence, place_of, seeds_sentence
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.runs.cell import Cell, Scalar
from repro.runs.store import StoredRun

NAME = "pools"
TITLE = "LAPS pools: static ones against the controller"
SOURCE = "ours; LAPS §3.2, Algorithm 2"
PLATFORMS = ("h200",)
place = place_of
NUM_RUNS = PAIRED_SEEDS
DATASETS = (LMSYS,)
"""ShareGPT's card has the same lengths: without a file of either its runs are these, turn for turn."""
INSTANCES = 8
LOADS = (0.7, 0.9)
TURNS = 12_000
"""Some twenty seconds: twice as long as the controller averages."""
POOLS: Mapping[str, Mapping[str, Scalar]] = MappingProxyType(
    {
        "static, n_s = 1": {"controller": "off", "num_short": 1},
        "static, n_s = 2": {"controller": "off", "num_short": 2},
        "static, n_s = 3": {"controller": "off", "num_short": 3},
        "controller, mended": {"controller": "mended"},
        "controller, printed": {"controller": "printed"},
    }
)
"""A controller starts from a quarter of the instances, n_s = 2."""


def cell(view: View, pools: str, dataset: str, load: float, figure: str | None = None) -> Cell:
    knobs = {"model": MIDDLE, "num_instances": INSTANCES, "num_prompts": TURNS, "transient": True, **POOLS[pools]}
    rate = round(load * INSTANCES * CAPACITY[MIDDLE], 3)
    return CONTENDERS["apart"].cell(figure, view, dataset, knobs, rate=rate)


def cells(view: View) -> list[Cell]:
    return seeded(
        [cell(view, pools, dataset, load, NAME) for dataset in DATASETS for load in LOADS for pools in POOLS], view
    )


def moves(run: StoredRun) -> float | None:
    value: float | None = run.summary["moves_per_minute"]
    return value


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    pairs = Pairs(runs, view)

    def shown(pools: str, dataset: str, load: float) -> tuple[str, ...]:
        asked = cell(view, pools, dataset, load)
        measures: tuple[tuple[Of, int], ...] = ((late, 1), (MEAN, 0), (moves, 1))
        return tuple(said(pairs.at(asked, of), digits=digits) for of, digits in measures)

    rows = [
        (dataset, f"{load:g}", pools, *shown(pools, dataset, load))
        for dataset in DATASETS
        for load in LOADS
        for pools in POOLS
    ]
    return save_table(
        out,
        f"{NAME}-{view.stem}",
        title=TITLE,
        columns=("conversations", "load", "pools", "TTFT over 0.4 s (%)", "mean TTFT (ms)", "moves a minute"),
        rows=rows,
        notes=(
            *conclusions(pairs, view),
            "ShareGPT's card has the lengths of LMSYS-Chat-1M's, the only ones the paper prints: its runs would be these, turn for turn.",
            f"LAPS, disaggregation only, with {MIDDLE} on {INSTANCES} instances, {TURNS:,} Poisson turns; load 1 is {CAPACITY[MIDDLE]:g} turns/s an instance. "
            f"{obtained_sentence()} {seeds_sentence(view)}",
            *invalid_notes(runs),
        ),
        csv_columns=CSV_COLUMNS,
        csv_rows=csv_rows(runs),
    )


def conclusions(pairs: Pairs, view: View) -> list[str]:
    found = []
    for dataset in DATASETS:
        load = LOADS[-1]
        by_pools = {pools: pairs.at(cell(view, pools, dataset, load), late) for pools in POOLS}
        best = min((pools for pools in POOLS if pools.startswith("static")), key=lambda pools: number(by_pools[pools]))
        texts = [f"{said(by_pools[pools], '%')} with the {pools.replace(',', '')}" for pools in list(POOLS)[3:]]
        found.append(
            f"{dataset} at a load of {load:g}: {said(by_pools[best], '%')} late with the best static pools ({best.removeprefix('static, ')}), "
            f"{', '.join(texts)}."
        )
    return found


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    """The paper compares no pools."""
    return []
