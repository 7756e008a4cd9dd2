"""How cost grows (ours): throughput against concurrency, length, retention and logit budget, and what memory that takes."""

from __future__ import annotations

from collections.abc import Sequence

from paper_figures.common.caption import (
    held_out_note,
    how_obtained,
    invalid_notes,
    missing_note,
    obtained_text,
    seeds_sentence,
    validity_text,
)
from paper_figures.common.figure import Columns, Page, Picture, Table, cell_by_cell
from paper_figures.common.panel import Axis, Layer, Line, Panel, Points, Text
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.style import Look, system_look
from paper_figures.common.words import shown
from paper_figures.dllm_serve.comparison import OURS
from paper_figures.dllm_serve.curve import MEAN_LATENCY, THROUGHPUT
from paper_figures.dllm_serve.growth_points import (
    AXES,
    INPUT,
    OUTPUT,
    RETENTION_LEN,
    GrowthPoint,
    Varied,
    cell_of,
    exponent,
    memory_of,
    points_of,
    scaled,
)
from paper_figures.dllm_serve.layout import dllm_figure
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import mean_interval
from repro.runs.store import StoredRun

SOURCE = "ours; what dLLM-Serve (arXiv:2512.17077) §3 and §4 say grows, measured or simulated"
COLUMNS: Columns[StoredRun] = {
    "seed": lambda run: run.cell.seed,
    "num_requests": lambda run: run.num_requests,
    "input_len": lambda run: run.cell.knob_values["input_len"],
    "gen_length": lambda run: run.cell.knob_values["gen_length"],
    "throughput_tok_s": THROUGHPUT,
    "cost_s_per_token": lambda run: 1 / run.summary["throughput_tok_s"] if run.summary["throughput_tok_s"] else None,
    "mean_latency_s": MEAN_LATENCY,
    "mean_running": Measure(path="mean_running"),
    "num_steps": Measure(path="num_steps"),
    "kv_rows": lambda run: run.facts.get("kv_rows"),
    "weights_bytes": lambda run: memory_of(run).get("weights"),
    "activation_bytes": lambda run: memory_of(run).get("activations"),
    "logits_bytes": lambda run: memory_of(run).get("logits"),
    "kv_bytes": lambda run: memory_of(run).get("kv"),
    "obtained": lambda run: run.obtained,
    "valid": lambda run: run.validity.valid,
    "run_folder": lambda run: run.cell.folder_name,
}


def cells(view: View) -> list[Cell]:
    """All requests of a run at once; one system, so that nothing but the axis changes."""
    return cell_by_cell((cell_of(view, axis, value) for axis in AXES for value in axis.values(view.platform)), view)


def page(runs: Runs) -> Page:
    where, found = runs.view.platform, points_of(runs)
    sentences = [
        f"All requests of a run at once; {scaled(where, INPUT)} + {scaled(where, OUTPUT)} tokens where the axis is "
        f"another one, {scaled(where, RETENTION_LEN)} in all on the axis of retention.",
        seeds_sentence(runs.all),
        *how_obtained(runs.all),
        "Exponent in the table: slope on logarithmic axes from the axis's first value to this one, so its last is the slope between the "
        "ends; of seconds per generated token, and of bytes of logits.",
    ]
    missing = [f"{point.axis.name} {point.value:g}" for point in found if not point.runs]
    complete = [point for point in found if point.runs]
    return Page(
        table=Table(
            columns=(
                *("axis", "value", "tok/s", "s per token", "exponent", "mean s", "running", "logits MB"),
                *("logits exponent", "KV rows", "obtained", "valid"),
            ),
            rows=[table_row(point, complete) for point in complete],
        ),
        csv=Table(
            columns=("platform", "axis", "value", *COLUMNS),
            rows=[
                (where.name, point.axis.name, point.value, *(of(run) for of in COLUMNS.values()))
                for point in complete
                for run in point.runs
            ],
        ),
        picture=Picture(panels=[panel(axis, complete) for axis in AXES], caption=sentences),
        notes=[
            *invalid_notes(runs.all),
            *missing_note(missing, len(found)),
            *sentences,
            *(held_out_note(where) if runs.view.obtained == "simulated" else []),
        ],
        after_heading=f" - {where.title}",
    )


def panel(axis: Varied, complete: Sequence[GrowthPoint]) -> Panel:
    own = [point for point in complete if point.axis is axis]
    usable = [point for point in own if point.throughput.mean is not None]
    values = [point.value for point in usable]
    is_log = axis.name != "retention_ratio" and bool(usable)
    y = Axis(label="throughput (tok/s)" if axis is AXES[0] else None)
    layers: list[Layer] = [Text(text="no valid runs")]
    if usable and axis.name == "max_num_logits":
        layers, y = memory_layers(own), Axis(label="MB", scale="plain log")
    elif usable:
        look, at = system_look(OURS), [point.throughput for point in usable]
        layers = [Line(label=look.title, places=values, at=at, look=look)]
        top = 1.15 * max((each.mean or 0.0) + (each.half_width or 0.0) for each in at)
        y = Axis(label=y.label, limits=(0, top))
    x = Axis(label=axis.label, scale="log2", ticks=values, size=6) if is_log else Axis(label=axis.label)
    return Panel(title=f"({'abcd'[AXES.index(axis)]}) {axis.title}", layers=layers, x=x, y=y)


def memory_layers(points: Sequence[GrowthPoint]) -> list[Layer]:
    known = {point.value: memory for point in points if (memory := memory_of(point.runs[0]))}
    places = list(known)
    logits, activations = ([memory[part] / 1e6 for memory in known.values()] for part in ("logits", "activations"))
    orange, green = Look(color="#D55E00", marker="s"), Look(color="#009E73", marker="^")
    return [
        Points(label="logits (d, MB)", places=places, values=logits, look=orange, zorder=2),
        Points(label="activations (d, MB)", places=places, values=activations, look=green, zorder=2),
    ]


def table_row(point: GrowthPoint, complete: Sequence[GrowthPoint]) -> tuple[str, ...]:
    first = next(each for each in complete if each.axis is point.axis)

    def mean(of: Measure) -> float | None:
        values = [of(run) for run in point.runs if run.validity.valid]
        return mean_interval([value for value in values if value is not None]).mean

    logits, first_logits = (memory_of(each.runs[0]).get("logits") for each in (point, first))
    costs = exponent((first.value, first.cost), (point.value, point.cost))
    return (
        point.axis.name,
        f"{point.value:g}",
        shown(point.throughput.mean),
        shown(point.cost),
        shown(costs, "+.2f"),
        shown(mean(MEAN_LATENCY)),
        shown(mean(Measure(path="mean_running"))),
        "-" if logits is None else f"{logits / 1e6:.4g}",
        shown(exponent((first.value, first_logits), (point.value, logits)), "+.2f"),
        shown(point.runs[0].facts.get("kv_rows"), ""),
        obtained_text(point.runs),
        validity_text(point.runs),
    )


FIGURE = dllm_figure(
    "growth", SOURCE, platforms=("cpu-tiny", "rtx4090", "l40s", "h200"), page=page, cells=cells, decides_on=()
)
