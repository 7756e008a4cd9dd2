"""LAPS pools: static ones against the controller."""

from collections.abc import Mapping
from types import MappingProxyType

from paper_figures.common.figure import Page, Table
from paper_figures.common.runs import Runs
from paper_figures.common.words import number, said
from paper_figures.laps.contenders import CAPACITY, CONTENDERS, LMSYS, MIDDLE, rate_of
from paper_figures.laps.layout import OBTAINED, laps_figure, seeds_sentence
from paper_figures.laps.measures import LATE, MEAN, MOVES, csv_of
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar

INSTANCES = 8
LOADS = (0.7, 0.9, 1.0)
NEAR = 0.9
"""A load near capacity, where the best static pools still keep up."""
TURNS = 12_000
"""About twenty seconds, twice the time over which the controller averages."""
POOLS: Mapping[str, Mapping[str, Scalar]] = MappingProxyType(
    {
        "static, n_s = 1": {"controller": "off", "num_short": 1},
        "static, n_s = 2": {"controller": "off", "num_short": 2},
        "static, n_s = 3": {"controller": "off", "num_short": 3},
        "controller, mended": {"controller": "mended"},
        "controller, printed": {"controller": "printed"},
    }
)
"""Pools by name. A controller starts with a quarter of the instances, n_s = 2."""


def cell(view: View, pools: str, load: float) -> Cell:
    """ShareGPT's card has the same lengths: without a file, its runs equal these, turn for turn."""
    knobs = {"model": MIDDLE, "num_instances": INSTANCES, "num_prompts": TURNS, "transient": True, **POOLS[pools]}
    return CONTENDERS["apart"].cell(view, LMSYS, knobs, rate=rate_of(load, instances=INSTANCES))


def cells(view: View) -> list[Cell]:
    return [cell(view, pools, load) for load in LOADS for pools in POOLS]


def conclusion(runs: Runs) -> str:
    late = {pools: runs.at(cell(runs.view, pools, NEAR), LATE) for pools in POOLS}
    best = min((pools for pools in POOLS if pools.startswith("static")), key=lambda pools: number(late[pools]))
    texts = [f"{said(late[pools], '%')} with the {pools.replace(',', '')}" for pools in list(POOLS)[3:]]
    return (
        f"{LMSYS} at a load of {NEAR:g}: {said(late[best], '%')} late with the best static pools ({best.removeprefix('static, ')}), "
        f"{', '.join(texts)}."
    )


def where_it_moved(runs: Runs) -> str:
    """Compare the mended controller with the pools it starts from, in the runs in which it moved an instance."""
    texts = []
    for load in LOADS:
        moves, late, static = (
            runs.values(cell(runs.view, pools, load), of)
            for pools, of in (("controller, mended", MOVES), ("controller, mended", LATE), ("static, n_s = 2", LATE))
        )
        moved = [seed for seed, count in moves.items() if count > 0 and seed in static]
        if moved:
            ours, theirs = (sum(values[seed] for seed in moved) / len(moved) for values in (late, static))
            worse = sum(late[seed] > static[seed] for seed in moved)
            texts.append(
                f"at {load:g} in {len(moved)} of {len(moves)} runs, worse in {worse}: {ours:.1f} % late against {theirs:.1f} %"
            )
    return (
        f"The mended controller moves an instance {'; '.join(texts) or 'in none'} (static, n_s = 2, of the same runs)."
    )


def page(runs: Runs) -> Page:
    measures = ((LATE, 1), (MEAN, 0), (MOVES, 1))
    return Page(
        table=Table(
            columns=("conversations", "load", "pools", LATE.label, MEAN.label, "moves a minute"),
            rows=[
                (
                    *(LMSYS, f"{load:g}", pools),
                    *(said(runs.at(cell(runs.view, pools, load), of), digits=digits) for of, digits in measures),
                )
                for load in LOADS
                for pools in POOLS
            ],
        ),
        notes=[
            conclusion(runs),
            where_it_moved(runs),
            "ShareGPT's card has the lengths of LMSYS-Chat-1M's, the only ones the paper prints: its runs would be these, turn for turn.",
            f"LAPS, disaggregation only, with {MIDDLE} on {INSTANCES} instances, {TURNS:,} Poisson turns; load 1 is {CAPACITY[MIDDLE]:g} turns/s an instance. "
            f"{OBTAINED} {seeds_sentence(runs.view)}",
        ],
        csv=csv_of(runs),
    )


FIGURE = laps_figure("pools", "ours; LAPS §3.2, Algorithm 2", page=page, cells=cells)
