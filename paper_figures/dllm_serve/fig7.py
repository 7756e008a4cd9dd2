"""dLLM-Serve Figure 7 (§6.5): throughput relative to Sparse-dLLM by input length and by output length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paper_figures.common import style
from paper_figures.common.caption import (
    figure_title,
    held_out_note,
    how_obtained,
    invalid_notes,
    obtained_text,
    require_runs,
    seeds_sentence,
    validity_text,
)
from paper_figures.common.repeats import Repeats
from paper_figures.dllm_serve.comparison import OURS, reading_sentence
from repro.reports.claims import Finding
from repro.reports.figures import Knobs, Rendered, View
from repro.reports.paper import load_figures
from repro.runs.cell import Cell
from repro.runs.statistics import Interval, mean_interval
from repro.runs.store import StoredRun, over_repeats
from repro.systems.platforms import Platform

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "fig7"
TITLE = "dLLM-Serve Figure 7: relative throughput by input and output length"
SOURCE = "dLLM-Serve (arXiv:2512.17077), Figure 7, §6.5"
PLATFORMS = ("cpu-tiny", "l40s")
PAPER_PLATFORMS = ("l40s",)
"""The paper names no card; its ratios are those of Table 4, so it is taken to be the L40S."""
DECIDES_ON = PAPER_PLATFORMS

BASE = "sparse-dllm"
DATASET = "burst"
"""Only its texts are used: lengths are fixed."""

INPUT_LENGTHS = (100, 200, 300, 400, 500, 600)
OUTPUT_LENGTHS = (128, 256, 384, 512)
FIXED_INPUT, FIXED_OUTPUT = 300, 256
"""Lengths while the other axis varies; the paper does not state them."""

NUM_REQUESTS = {"torch": 24, "roofline": 200}
CSV_COLUMNS = (
    "platform",
    "reading",
    "axis",
    "input_len",
    "output_len",
    "system",
    "seed",
    "throughput_tok_s",
    "mean_latency_s",
    "batch_size",
    "num_requests",
    "obtained",
    "valid",
    "run_folder",
)


@dataclass(frozen=True, kw_only=True)
class Length:
    """One point of an axis, in the paper's tokens; a platform scales both."""

    axis: str
    input_len: int
    output_len: int

    @property
    def value(self) -> int:
        return self.input_len if self.axis == "input" else self.output_len


AXES = (
    ("input", tuple(Length(axis="input", input_len=n, output_len=FIXED_OUTPUT) for n in INPUT_LENGTHS)),
    ("output", tuple(Length(axis="output", input_len=FIXED_INPUT, output_len=n) for n in OUTPUT_LENGTHS)),
)


def cells(view: View) -> list[Cell]:
    """All requests at once, so that both systems are saturated at every length. The axes share a point."""
    grid = [
        _cell(view, length, system, seed)
        for _, lengths in AXES
        for length in lengths
        for system in (OURS, BASE)
        for seed in view.seeds
    ]
    return list({cell.key: cell for cell in grid}.values())


def _cell(view: View, length: Length, system: str, seed: int) -> Cell:
    output = round(length.output_len * view.dllm.length_scale)
    knobs: Knobs = (
        ("input_len", round(length.input_len * view.dllm.length_scale)),
        ("gen_length", output),
        ("steps", output),
        ("length_scale", 1.0),
        ("num_prompts", NUM_REQUESTS[view.platform.executor]),
        *view.together(NAME),
    )
    return view.cell(NAME, system, DATASET, seed=seed, knobs=knobs if system == OURS else knobs + view.baseline_knobs())


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    require_runs(NAME, runs, view.platform)
    found = runs_by_length(runs, view)
    printed = paper_values(view.platform)
    stem = f"{NAME}-{view.stem}"
    sentences = [
        reading_sentence(view),
        f"All {NUM_REQUESTS[view.platform.executor]} requests at once, every one of the same lengths; (a) {_scaled(view, FIXED_OUTPUT)} "
        f"tokens generated, (b) prompts of {_scaled(view, FIXED_INPUT)} tokens. {seeds_sentence(runs)}",
    ]
    if view.dllm.length_scale != 1:
        sentences.append(f"Lengths are the paper's x {view.dllm.length_scale:g}.")
    if printed:
        sentences.insert(1, "Hollow: the paper's, which states neither card, rate nor the other axis's length.")
        sentences.append(f"The paper's values are those of {SOURCE}.")
    sentences += how_obtained(runs, ["runs"] * len(runs))
    files = _draw(found, printed, view, figure_title(TITLE, runs, view), sentences, out, stem)
    notes = [*invalid_notes(runs), *sentences]
    if any(run.record.obtained == "simulated" for run in runs):
        notes += held_out_note(view.platform)
    rows = [_csv_row(length, run, view) for length, systems in found.items() for own in systems.values() for run in own]
    return Rendered(
        files=(*files, style.save_csv(out / f"{stem}.csv", CSV_COLUMNS, rows)),
        columns=("axis", "tokens", "dLLM-Serve tok/s", "Sparse-dLLM tok/s", "relative", "paper", "obtained", "valid"),
        rows=tuple(_table_row(length, found, printed, view) for length in found),
        notes=tuple(notes),
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    if view.platform.name not in PAPER_PLATFORMS or view.reading != "published":
        return []
    found = runs_by_length(runs, view)
    gains = {axis: [relative(found, length).mean for length in lengths] for axis, lengths in AXES}
    if any(gain is None for values in gains.values() for gain in values):
        return []
    known = {axis: [gain for gain in values if gain is not None] for axis, values in gains.items()}
    results = []
    for axis, short, (_, lengths) in (("input", "in", AXES[0]), ("output", "out", AXES[1])):
        values = known[axis]
        how = f"Sparse-dLLM as published, all requests at once; {axis} of"
        results += [
            Finding(
                claim=f"dllm-{short}-short",
                value=values[0],
                obtained=view.obtained,
                how=f"{how} {lengths[0].value} tokens",
            ),
            Finding(
                claim=f"dllm-{short}-long",
                value=values[-1],
                obtained=view.obtained,
                how=f"{how} {lengths[-1].value} tokens",
            ),
            Finding(
                claim=f"dllm-{short}-trend",
                value=values[-1] - values[0],
                obtained=view.obtained,
                how=f"gain at {lengths[-1].value} less gain at {lengths[0].value} tokens",
                holds=values[-1] < values[0],
            ),
        ]
    return results


Found = dict[Length, dict[str, tuple[StoredRun, ...]]]


def runs_by_length(runs: Sequence[StoredRun], view: View) -> Found:
    repeats = Repeats(runs, view)
    return {
        length: {system: repeats.of(_cell(view, length, system, 0)) for system in (OURS, BASE)}
        for _, lengths in AXES
        for length in lengths
    }


def relative(found: Found, length: Length) -> Interval:
    """dLLM-Serve's throughput over Sparse-dLLM's, by repeat."""

    def by_seed(system: str) -> dict[int, float]:
        own = [run for run in found[length][system] if run.validity.valid]
        return {run.cell.seed: value for run in own if (value := run.summary["throughput_tok_s"])}

    ours, base = by_seed(OURS), by_seed(BASE)
    return mean_interval([ours[seed] / base[seed] for seed in sorted(ours.keys() & base.keys())])


def paper_values(platform: Platform) -> dict[tuple[str, int], float]:
    """(axis, tokens) -> ratio; the text prints the ends of both curves."""
    if platform.name not in PAPER_PLATFORMS:
        return {}
    values = next(entry for entry in load_figures("dllm-serve") if entry.id == "dllm-serve/fig7").values
    return {
        ("input", INPUT_LENGTHS[0]): values["input"]["short (100)"],
        ("input", INPUT_LENGTHS[-1]): values["input"]["600"],
        ("output", OUTPUT_LENGTHS[0]): values["output"]["short (128)"],
        ("output", OUTPUT_LENGTHS[-1]): values["output"]["long (512)"],
    }


def _scaled(view: View, length: int) -> int:
    return round(length * view.dllm.length_scale)


def _draw(
    found: Found,
    printed: dict[tuple[str, int], float],
    view: View,
    title: str,
    caption: Sequence[str],
    out: Path,
    stem: str,
) -> tuple[Path, Path, Path]:
    with style.drawing():
        figure, panels = style.row_of_panels(["(a) by input length", "(b) by output length"])
        for axes, (axis, lengths) in zip(panels, AXES, strict=True):
            _draw_panel(axes, found, lengths, {n: v for (a, n), v in printed.items() if a == axis}, view)
            axes.set_xlabel(f"{axis} length (tokens)")
        top = max(axes.get_ylim()[1] for axes in panels)
        for axes in panels:
            axes.set_ylim(0, top)
        panels[0].set_ylabel("throughput relative\nto Sparse-dLLM (x)")
        return style.publish(figure, panels, out, stem, title=title, caption=caption)


def _draw_panel(axes: Axes, found: Found, lengths: Sequence[Length], printed: dict[int, float], view: View) -> None:
    look = style.system_look(OURS)
    points = [(_scaled(view, length.value), relative(found, length)) for length in lengths]
    usable = [(x, interval) for x, interval in points if interval.mean is not None]
    spread = [interval.half_width or 0.0 for _, interval in usable]
    axes.errorbar(
        [x for x, _ in usable],
        [interval.mean or 0.0 for _, interval in usable],
        yerr=spread if any(spread) else None,
        marker=look.marker,
        color=look.color,
        capsize=2,
        label=f"{look.title} / Sparse-dLLM",
    )
    axes.set_xticks([x for x, _ in points])
    axes.axhline(1, linestyle="--", linewidth=1, color=style.GUIDE_COLOR, label="Sparse-dLLM")
    for length, value in printed.items():
        style.paper_marker(axes, length, value, color=look.color, marker=look.marker, label="paper")
    axes.margins(y=0.12)


def _csv_row(length: Length, run: StoredRun, view: View) -> tuple[object, ...]:
    knobs = run.cell.knob_values
    return (
        view.platform.name,
        view.reading if run.cell.system == BASE else None,
        length.axis,
        knobs["input_len"],
        knobs["gen_length"],
        run.cell.system,
        run.cell.seed,
        run.summary["throughput_tok_s"],
        run.summary["e2el_s"]["mean"],
        run.facts.get("batch_size"),
        run.num_requests,
        run.obtained,
        run.validity.valid,
        run.cell.folder_name,
    )


def _table_row(length: Length, found: Found, printed: dict[tuple[str, int], float], view: View) -> tuple[str, ...]:
    own = [run for runs in found[length].values() for run in runs]
    throughput = [over_repeats(found[length][s], "throughput_tok_s").mean for s in (OURS, BASE)]
    gain, paper = relative(found, length).mean, printed.get((length.axis, length.value))
    return (
        length.axis,
        str(_scaled(view, length.value)),
        *("-" if value is None else f"{value:.1f}" for value in throughput),
        "-" if gain is None else f"{gain:.2f}x",
        "-" if paper is None else f"{paper:.2f}x",
        obtained_text(own),
        validity_text(own),
    )
