"""How LAPS's figures look, what their captions say, and the rows of their CSV files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paper_figures.common.caption import contended_note, device_text
from paper_figures.laps.compare import MEAN, P90, Of, Pairs, in_bucket, late, late_of, rps, ttft
from paper_figures.laps.contenders import CONTENDERS, Contender
from repro.reports.claims import Finding, How
from repro.reports.figures import View
from repro.runs.cell import COMPARISON, Cell
from repro.runs.store import StoredRun
from repro.systems.laps.metrics import BUCKETS
from repro.systems.laps.part import part_of
from repro.systems.platforms import Platform, platform

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CSV_COLUMNS = (
    "model",
    "instances",
    "clients",
    "rate_turns_s",
    "contender",
    "kappa",
    "knobs",
    "seed",
    "rps",
    "ttft_mean_ms",
    "ttft_p90_ms",
    "ttft_max_ms",
    "violations_percent",
    "violations_short_percent",
    "violations_long_percent",
    *(
        f"{part}_{name}"
        for name, _, _ in BUCKETS
        for part in ("ttft_mean_ms", "ttft_p90_ms", "ttft_max_ms", "violations_percent")
    ),
    "in_system",
    "graph_share",
    "padding",
    "moves_per_minute",
    "obtained",
    "valid",
    "run",
)
_SHOWN = frozenset({"model", "num_instances", "clients", "kappa", "basis", COMPARISON})
_VALUES: tuple[Of, ...] = (
    rps,
    MEAN,
    P90,
    ttft("max"),
    late,
    late_of("short"),
    late_of("long"),
    *(in_bucket(name, part) for name, _, _ in BUCKETS for part in ("mean", "p90", "max", "violations")),
    lambda run: run.summary["in_system"],
    lambda run: run.summary["graph_share"],
    lambda run: run.summary["padding"],
    lambda run: run.summary["moves_per_minute"],
)


def csv_rows(runs: Sequence[StoredRun]) -> list[tuple[object, ...]]:
    """A row a run: every mean beside what became of each length of prompt."""
    return [_csv_row(run) for run in runs]


def _csv_row(run: StoredRun) -> tuple[object, ...]:
    knobs = run.cell.knob_values
    others = " ".join(f"{name}={value}" for name, value in sorted(knobs.items()) if name not in _SHOWN)
    name = next((each.name for each in CONTENDERS.values() if each.system == run.cell.system), run.cell.system)
    return (
        knobs.get("model", part_of(platform(run.cell.platform)).model),
        knobs.get("num_instances", 1),
        knobs.get("clients"),
        run.cell.rate,
        name,
        knobs.get("kappa", 0.0),
        others,
        run.cell.seed,
        *(of(run) for of in _VALUES),
        run.obtained,
        run.validity.valid,
        run.cell.key,
    )


def draw_line(
    axes: Axes, pairs: Pairs, contender: Contender, places: Sequence[float], cells: Sequence[Cell], of: Of, **look: Any
) -> None:
    """Means over seeds with their 95 % intervals; a place without a valid run stays empty."""
    at = [pairs.at(cell, of) for cell in cells]
    axes.errorbar(
        places,
        [float("nan") if each.mean is None else each.mean for each in at],
        yerr=[each.half_width or 0.0 for each in at],
        capsize=2,
        **{**contender.line, "label": contender.title, **look},
    )


def log_axis(axes: Axes, places: Sequence[float]) -> None:
    """A logarithmic x-axis with these ticks alone."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(places), [f"{place:g}" for place in places])
    axes.minorticks_off()


def place_of(where: Platform) -> str:
    return part_of(where).title


def title_of(title: str, view: View) -> str:
    kind = "simulated, uncalibrated" if view.obtained == "simulated" else "measured"
    return f"{title}\n{kind}: {place_of(view.platform)}"


def how_obtained(runs: Sequence[StoredRun], view: View) -> list[str]:
    """What the numbers rest on, and how many of the runs something else disturbed."""
    if view.obtained == "simulated":
        return [obtained_sentence()]
    part = part_of(view.platform)
    devices = " and ".join(dict.fromkeys(device_text(run) for run in runs))
    return [
        f"Measured on one core ({devices}): each step of a decoder of 12 layers of 64 with random weights is run and timed once; clients, queues and policies "
        f"are on a clock that the steps put forward. Lengths are {part.length_scale:g} and times {part.time_scale:g} of the paper's: "
        f"objective {1e3 * part.slo_s:g} ms.",
        *contended_note(runs),
    ]


def obtained_sentence() -> str:
    return (
        "All runs simulated on a discrete-event cluster with constants that nothing was fitted to; no GPU was measured. The mixing "
        "penalty kappa is 0 where nothing else is said."
    )


def seeds_sentence(view: View) -> str:
    return f"{len(view.seeds)} paired seeds: mean, and bars for its 95 % interval (Student's t)."


def finding(
    claim: str,
    value: float | tuple[float, ...],
    how: str,
    *,
    obtained: How = "simulated",
    holds: bool | None = None,
    of: tuple[str, ...] = (),
) -> Finding:
    return Finding(claim=claim, value=value, obtained=obtained, how=how, holds=holds, of=of)
