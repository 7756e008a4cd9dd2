"""How cost grows (ours): throughput against concurrency, length, retention and logit budget, and what memory that takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paper_figures.common import style
from paper_figures.common.caption import (
    figure_title,
    held_out_note,
    how_obtained,
    invalid_notes,
    missing_note,
    obtained_text,
    require_runs,
    seeds_sentence,
    validity_text,
)
from paper_figures.dllm_serve.comparison import OURS
from paper_figures.dllm_serve.growth_points import (
    AXES,
    INPUT,
    OUTPUT,
    RETENTION_LEN,
    Axis,
    GrowthPoint,
    cell_of,
    exponent,
    memory_of,
    points_of,
    scaled,
)
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.runs.cell import Cell
from repro.runs.store import StoredRun, over_repeats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "growth"
TITLE = "dLLM-Serve growth: throughput and memory by concurrency, length, retention and logit budget"
SOURCE = "ours; what dLLM-Serve (arXiv:2512.17077) §3 and §4 say grows, measured or simulated"
PLATFORMS = ("cpu-tiny", "rtx4090", "l40s", "h200")
DECIDES_ON: tuple[str, ...] = ()

CSV_COLUMNS = (
    "platform",
    "axis",
    "value",
    "seed",
    "num_requests",
    "input_len",
    "gen_length",
    "throughput_tok_s",
    "cost_s_per_token",
    "mean_latency_s",
    "mean_running",
    "num_steps",
    "kv_rows",
    "weights_bytes",
    "activation_bytes",
    "logits_bytes",
    "kv_bytes",
    "obtained",
    "valid",
    "run_folder",
)
TABLE_COLUMNS = (
    "axis",
    "value",
    "tok/s",
    "s per token",
    "exponent",
    "mean s",
    "running",
    "logits MB",
    "logits exponent",
    "KV rows",
    "obtained",
    "valid",
)


def cells(view: View) -> list[Cell]:
    """All requests of a run at once; one system, so that nothing but the axis changes."""
    grid = [
        cell_of(view, axis, value, seed) for axis in AXES for value in axis.values(view.platform) for seed in view.seeds
    ]
    return list({cell.key: cell for cell in grid}.values())


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    require_runs(NAME, runs, view.platform)
    found = points_of(runs, view)
    stem = f"{NAME}-{view.stem}"
    sentences = [
        f"All requests of a run at once; {scaled(view.platform, INPUT)} + {scaled(view.platform, OUTPUT)} tokens where the axis is "
        f"another one, {scaled(view.platform, RETENTION_LEN)} in all on the axis of retention.",
        seeds_sentence(runs),
        *how_obtained(runs, ["runs"] * len(runs)),
        "Exponent in the table: slope on logarithmic axes from the axis's first value to this one, so its last is the slope between the "
        "ends; of seconds per generated token, and of bytes of logits.",
    ]
    missing = [f"{point.axis.name} {point.value:g}" for point in found if not point.runs]
    notes = [*invalid_notes(runs), *missing_note(missing, len(found)), *sentences]
    if view.obtained == "simulated":
        notes += held_out_note(view.platform)
    complete = [point for point in found if point.runs]
    csv_rows = [_csv_row(point, run, view) for point in complete for run in point.runs]
    return Rendered(
        files=(
            *_draw(complete, figure_title(TITLE, runs, view), sentences, out, stem),
            style.save_markdown(
                out / f"{stem}.md", f"{TITLE} - {view.platform.title}", TABLE_COLUMNS, _table(complete), notes
            ),
            style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, csv_rows),
        ),
        columns=TABLE_COLUMNS,
        rows=tuple(_table(complete)),
        notes=tuple(notes),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    """No claim of the paper rests on it."""
    return []


# -- drawing ----------------------------------------------------------------------------------------------


def _draw(
    points: Sequence[GrowthPoint], title: str, caption: Sequence[str], out: Path, stem: str
) -> tuple[Path, Path, Path]:
    with style.drawing():
        figure, panels = style.row_of_panels(
            [f"({letter}) {axis.title}" for letter, axis in zip("abcd", AXES, strict=True)]
        )
        for axes, axis in zip(panels, AXES, strict=True):
            own = [point for point in points if point.axis is axis]
            _draw_panel(axes, axis, own)
        panels[0].set_ylabel("throughput (tok/s)")
        return style.publish(figure, panels, out, stem, title=title, caption=caption)


def _draw_panel(axes: Axes, axis: Axis, points: Sequence[GrowthPoint]) -> None:
    look = style.system_look(OURS)
    axes.set_xlabel(axis.label)
    is_memory = axis.name == "max_num_logits"
    usable = [(point.value, point.throughput) for point in points if point.throughput.mean is not None]
    if not usable:
        axes.text(0.5, 0.5, "no valid runs", transform=axes.transAxes, ha="center", color=style.GUIDE_COLOR)
        return
    if axis.name != "retention_ratio":
        axes.set_xscale("log", base=2)
        axes.set_xticks([value for value, _ in usable], [f"{value:g}" for value, _ in usable], fontsize=6)
        axes.minorticks_off()
    if is_memory:
        known = [(point.value, point.memory) for point in points]
        for part, marker, color in (("logits", "s", "#D55E00"), ("activations", "^", "#009E73")):
            heights = [(value, getattr(memory, part) / 1e6) for value, memory in known if memory is not None]
            axes.plot(*zip(*heights, strict=True), marker=marker, color=color, label=f"{part} (d, MB)")
        style.log_scale(axes)
        axes.set_ylabel("MB")
        return
    spread = [interval.half_width or 0.0 for _, interval in usable]
    axes.errorbar(
        [value for value, _ in usable],
        [interval.mean or 0.0 for _, interval in usable],
        yerr=spread if any(spread) else None,
        marker=look.marker,
        color=look.color,
        capsize=2,
        label=look.title,
    )
    axes.set_ylim(0, 1.15 * max((interval.mean or 0.0) + (interval.half_width or 0.0) for _, interval in usable))


# -- table and CSV ----------------------------------------------------------------------------------------


def _table(points: Sequence[GrowthPoint]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for axis in AXES:
        own = [point for point in points if point.axis is axis]
        for point in own:
            memory, first = point.memory, own[0]
            first_logits = None if first.memory is None else float(first.memory.logits)
            logits = None if memory is None else float(memory.logits)
            slopes = (
                exponent((first.value, first.cost), (point.value, point.cost)),
                exponent((first.value, first_logits), (point.value, logits)),
            )
            cost, latency = point.cost, over_repeats(point.runs, "e2el_s", "mean").mean
            running, kv_rows = over_repeats(point.runs, "mean_running").mean, _fact(point.runs[0], "kv_rows")
            rows.append(
                (
                    axis.name,
                    f"{point.value:g}",
                    _text(point.throughput.mean),
                    _text(cost),
                    _slope(slopes[0]),
                    _text(latency),
                    _text(running),
                    "-" if logits is None else f"{logits / 1e6:.4g}",
                    _slope(slopes[1]),
                    "-" if kv_rows is None else str(kv_rows),
                    obtained_text(point.runs),
                    validity_text(point.runs),
                )
            )
    return rows


def _csv_row(point: GrowthPoint, run: StoredRun, view: View) -> tuple[object, ...]:
    knobs, summary, memory = run.cell.knob_values, run.summary, memory_of(run)
    parts = (None,) * 4 if memory is None else (memory.weights, memory.activations, memory.logits, memory.kv)
    throughput = summary["throughput_tok_s"]
    return (
        view.platform.name,
        point.axis.name,
        point.value,
        run.cell.seed,
        run.num_requests,
        knobs["input_len"],
        knobs["gen_length"],
        throughput,
        1 / throughput if throughput else None,
        summary["e2el_s"]["mean"],
        summary["mean_running"],
        summary["num_steps"],
        _fact(run, "kv_rows"),
        *parts,
        run.obtained,
        run.validity.valid,
        run.cell.folder_name,
    )


def _fact(run: StoredRun, name: str) -> Any:
    return run.facts.get(name)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _slope(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"
