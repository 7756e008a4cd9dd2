"""dLLM-Serve growth: throughput and memory by concurrency, length, retention and logit budget.

How cost grows (ours): throughput against concurrency, length, retention and logit budget, and what memory that takes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from paper_figures.dllm_serve.layout import dllm_figure
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Interval, mean_interval
from repro.runs.store import StoredRun, over_repeats
from repro.systems.platforms import DllmPart, Platform

SOURCE = "ours; what dLLM-Serve (arXiv:2512.17077) §3 and §4 say grows, measured or simulated"
DATASET = "burst"
"""Only its texts are used: lengths are fixed."""
INPUT, OUTPUT = 300, 128
"""Tokens of every request where the axis is another one; a platform scales both. A short output keeps a run of
256 requests on a card below two minutes."""

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOTAL_LEN = (256, 512, 1024, 2048)
RETENTION = (0.1, 0.25, 0.5, 0.75, 1.0)
MAX_NUM_LOGITS = (256, 512, 1024, 2048, 4096)

SMALL = {"total_len": 8, "retention_ratio": 16, "max_num_logits": 16}
LARGE = {"total_len": 8, "retention_ratio": 64, "max_num_logits": 64}
"""Requests at once on an axis, of the embedded model and of a card."""
RETENTION_LEN = 1024
"""Long enough for retained rows to weigh."""


@dataclass(frozen=True, kw_only=True)
class Varied:
    """One table: what is varied, at which values, and what each run is asked for there."""

    name: str
    title: str
    label: str
    values: Callable[[Platform], tuple[float, ...]]
    knobs: Callable[[Platform, float], dict[str, Scalar]]


@dataclass(frozen=True, kw_only=True)
class GrowthPoint:
    """The repeats of one value of an axis, by seed."""

    axis: Varied
    value: float
    runs: tuple[StoredRun, ...]

    @property
    def throughput(self) -> Interval:
        return over_repeats(self.runs, "throughput_tok_s")

    @property
    def cost(self) -> float | None:
        """Seconds per generated token."""
        mean = self.throughput.mean
        return 1 / mean if mean else None


def scaled(where: Platform, length: int) -> int:
    return round(length * where.part(DllmPart).length_scale)


def _counts(where: Platform) -> Mapping[str, int]:
    return SMALL if where.gpu is None else LARGE


def _lengths(where: Platform) -> tuple[float, ...]:
    return tuple(
        scaled(where, length) for length in TOTAL_LEN if scaled(where, length) <= where.part(DllmPart).max_model_len
    )


def _shape(where: Platform, total_len: int) -> dict[str, Scalar]:
    output = scaled(where, OUTPUT)
    return {"input_len": total_len - output, "gen_length": output, "steps": output, "length_scale": 1.0}


def _usual(where: Platform) -> dict[str, Scalar]:
    return _shape(where, scaled(where, INPUT) + scaled(where, OUTPUT))


AXES = (
    Varied(
        name="concurrency",
        title="concurrency",
        label="requests at once",
        values=lambda where: tuple(n for n in CONCURRENCY if n <= where.part(DllmPart).max_num_seqs),
        knobs=lambda where, n: {**_usual(where), "num_prompts": int(n), "max_num_seqs": int(n)},
    ),
    Varied(
        name="total_len",
        title="request length",
        label="tokens of a request",
        values=_lengths,
        knobs=lambda where, n: {**_shape(where, int(n)), "num_prompts": _counts(where)["total_len"]},
    ),
    Varied(
        name="retention_ratio",
        title="retention",
        label="retention ratio",
        values=lambda where: RETENTION,
        knobs=lambda where, share: {
            **_shape(where, scaled(where, RETENTION_LEN)),
            "num_prompts": _counts(where)["retention_ratio"],
            "retention_ratio": share,
        },
    ),
    Varied(
        name="max_num_logits",
        title="memory by logit budget",
        label="logit rows at once",
        values=lambda where: tuple(
            n
            for n in (scaled(where, rows) for rows in MAX_NUM_LOGITS)
            if n <= where.part(DllmPart).max_num_batched_tokens
        ),
        knobs=lambda where, rows: {
            **_usual(where),
            "num_prompts": _counts(where)["max_num_logits"],
            "max_num_logits": int(rows),
        },
    ),
)


def cell_of(view: View, axis: Varied, value: float) -> Cell:
    knobs = (*axis.knobs(view.platform, value).items(), *view.together("growth"))
    return view.cell(None, OURS, DATASET, knobs=knobs)


def points_of(runs: Runs) -> list[GrowthPoint]:
    """Every point asked for, by axis and value; without runs where none is stored. Axes may share a run."""
    return [
        GrowthPoint(axis=axis, value=value, runs=runs.of(cell_of(runs.view, axis, value)))
        for axis in AXES
        for value in axis.values(runs.view.platform)
    ]


def memory_of(run: StoredRun) -> Mapping[str, int]:
    """Bytes by part: planned from shapes, activations and logits measured where the run was; nothing without a plan."""
    facts: Mapping[str, Any] = run.facts
    plan = facts.get("memory_plan")
    if plan is None:
        return {}
    return {
        "weights": plan["weights_bytes"],
        "activations": facts.get("measured_activation_bytes", plan["activation_bytes"]),
        "logits": facts.get("measured_logits_bytes", plan["logits_bytes"]),
        "kv": plan["kv_bytes"],
    }


def exponent(first: tuple[float, float | None], last: tuple[float, float | None]) -> float | None:
    """x of y ~ value^x through two points (value, y); None for one point, or a y that is not positive."""
    (x0, y0), (x1, y1) = first, last
    if not y0 or not y1 or x0 == x1 or min(y0, y1) <= 0:
        return None
    return math.log(y1 / y0) / math.log(x1 / x0)


# -- what is shown ----------------------------------------------------------------------------------------

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
        picture=Picture(
            panels=[panel(axis, complete) for axis in AXES], caption=sentences, always=seeds_sentence(runs.all)
        ),
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
