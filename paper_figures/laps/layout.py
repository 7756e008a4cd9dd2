"""Code that LAPS's figures share: how they are asked for, how they look, and what their captions say."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from paper_figures.common.caption import contended_note, device_text, on_a_cluster
from paper_figures.common.figure import Page, Picture, figure, seed_by_seed
from paper_figures.common.panel import Axis, Line, Panel
from paper_figures.common.runs import Measure, Of, Runs
from paper_figures.laps.contenders import CONTENDERS, PAIRED_SEEDS
from paper_figures.laps.measures import LATE, bounds, csv_of
from repro.families.platforms import PrefillPart
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import mean_interval


def laps_page(
    runs: Runs,
    *,
    panels: Sequence[Panel],
    conclusions: Sequence[str],
    about: str,
    notes: Sequence[str] = (),
    **layout: Any,
) -> Page:
    """Make a page. Conclusions go to the terminal, and into the caption before ``about``, which says what the runs are. ``layout`` sets
    other fields of a picture."""
    picture = Picture(panels=panels, caption=[*conclusions, about], **layout)
    return Page(picture=picture, csv=csv_of(runs), notes=[*conclusions, *notes])


def line(
    runs: Runs, name: str, places: Sequence[float], cells: Sequence[Cell], of: Of, label: str = "", **look: str
) -> Line:
    """Draw a contender's means over seeds, with their 95 % intervals."""
    intervals, style = [runs.at(cell, of) for cell in cells], replace(CONTENDERS[name].look, **look)
    return Line(label=label or CONTENDERS[name].title, places=places, at=intervals, look=style, within=bounds(of))


def doubling(places: Sequence[float], label: str | None = None) -> Axis:
    """Make a logarithmic axis with only these ticks."""
    return Axis(scale="log2", ticks=places, label=label)


PRINTED = "nearest, one bucket"
GRAPHS: Mapping[str, Mapping[str, Scalar]] = MappingProxyType(
    {
        PRINTED: {"graphs": "nearest", "joins": "same"},
        "nearest": {"graphs": "nearest"},
        "cheapest": {"graphs": "cheapest"},
    }
)
"""Ways to choose a graph. The printed way takes all prompts of a batch from one bucket of length. With nearest alone, longer prompts may
join, and the batch is padded to them. With cheapest, a graph runs only if it is predicted to be faster."""
_COLORS = {PRINTED: "#009E73", "nearest": "#D55E00", "cheapest": "#0072B2"}
Column = TypeVar("Column")


def basis_of(runs: Runs) -> str:
    kind = "simulated, uncalibrated" if runs.view.obtained == "simulated" else runs.view.obtained
    title = runs.view.platform.part(PrefillPart).title
    return f"{kind}: {title if runs.view.is_simulated else title.replace(HERE, devices(runs))}"


HERE = "this CPU"
"""The platform's word for the machine that it is measured on."""


def devices(runs: Runs) -> str:
    return " and ".join(dict.fromkeys(device_text(run) for run in runs.all)) or HERE


def origin(runs: Runs) -> list[str]:
    return [*how_obtained(runs), seeds_sentence(runs.view), *contended_note(runs.all)]


laps_figure = partial(
    figure,
    paper="laps",
    platforms=("h200",),
    num_runs=PAIRED_SEEDS,
    in_order=seed_by_seed,
    place=lambda where: where.part(PrefillPart).title,
    under_title=basis_of,
    origin=origin,
)
"""``cells`` hold one seed only."""


def how_obtained(runs: Runs) -> list[str]:
    """Tell how the numbers were obtained."""
    if runs.view.obtained == "composed":
        return [on_a_cluster(runs)]
    if runs.view.is_simulated:
        return [OBTAINED]
    part = runs.view.platform.part(PrefillPart)
    return [
        f"Measured on one core ({devices(runs)}): each step of a decoder of 12 layers of 64 with random weights is run and timed once; clients, queues and policies "
        f"are on a clock that the steps put forward. Lengths are {part.length_scale:g} and times {part.time_scale:g} of the paper's: "
        f"objective {1e3 * part.slo_s:g} ms."
    ]


OBTAINED = (
    "All runs simulated on a discrete-event cluster with constants that nothing was fitted to; no GPU was measured. The mixing "
    "penalty kappa is 0 where nothing else is said."
)


def seeds_sentence(view: View) -> str:
    return f"{len(view.seeds)} paired seeds: mean, and bars for its 95 % interval (Student's t)."


def choices(
    runs: Runs,
    measures: Sequence[Measure],
    columns: Mapping[Column, str],
    cells: Callable[[Column, str], Sequence[Cell]],
    ticks: Sequence[str],
    ways: Iterable[str],
    *,
    x_label: str = "",
) -> list[Panel]:
    """Draw panels of LAPS for these ways to choose a graph: a row per measure, a column per setting. ``cells`` returns one cell per tick
    for a column and a way; ``columns`` holds their titles."""
    places = range(len(ticks))
    return [
        Panel(
            title=title,
            layers=[
                line(runs, "laps", places, cells(column, graphs), measure, f"graphs: {graphs}", color=_COLORS[graphs])
                for graphs in ways
            ],
            x=Axis(label=x_label, ticks=places, names=ticks),
            y=Axis(label=measure.label, better=measure.better, limits=(0, None)),
        )
        for measure in measures
        for column, title in columns.items()
    ]


# -- the load at which attainment falls to 90 % ----------------------------------------------------------


MOST_LATE = 10.0
"""Percent of turns that may be late."""


def crossing(places: Sequence[float], values: Sequence[float], level: float = MOST_LATE) -> float | None:
    """Return the first place at which the level is reached, interpolated between simulated ones; None if it is never reached."""
    i = next((i for i, value in enumerate(values) if value >= level), None)
    if i is None:
        return None
    return places[0] if i == 0 else float(np.interp(level, values[i - 1 : i + 1], places[i - 1 : i + 1]))


def knee(runs: Runs, cell_at: Callable[[float], Cell], loads: Sequence[float]) -> str:
    """Tell the load at which too many turns are late, over the seeds that were run at every load."""
    by_load = [runs.values(cell_at(load), LATE) for load in loads]
    seeds = sorted(set.intersection(*(set(values) for values in by_load)))
    crossings = [crossing(loads, [values[seed] for values in by_load]) for seed in seeds]
    reached = [place for place in crossings if place is not None]
    if not crossings:
        return "-"
    if len(reached) < len(crossings):
        return f"above {loads[-1]:g}"
    interval = mean_interval(reached)
    spread = "" if interval.half_width is None else f" ± {interval.half_width:.2f}"
    return f"{'at most ' if max(reached) == loads[0] else ''}{interval.mean:.2f}{spread}"
