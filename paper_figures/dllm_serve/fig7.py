"""dLLM-Serve Figure 7: relative throughput by input and output length."""

from dataclasses import dataclass, replace

from paper_figures.common.figure import Columns, Page, Picture, Table, cell_by_cell
from paper_figures.common.panel import Axis, Guide, Line, Mark, Panel
from paper_figures.common.runs import Of, Runs
from paper_figures.dllm_serve import comparison
from paper_figures.dllm_serve.comparison import BASELINES, OURS, contender_of, look_of, ours_of
from paper_figures.dllm_serve.curve import MEAN_LATENCY, THROUGHPUT, per_processor_second
from paper_figures.dllm_serve.layout import CARDS, PAPER, PROCESSOR_COLOR, compared_figure, printed_in
from repro.reports.claims import Finding
from repro.reports.figures import Knobs, View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun

SOURCE = f"{PAPER}, Figure 7, §6.5"
BASE = "sparse-dllm"
DATASET = "burst"
"""We use only its texts, as lengths are fixed."""
FIXED_INPUT, FIXED_OUTPUT = 300, 256
"""Lengths while the other axis varies; the paper does not state them."""
NUM_REQUESTS = {"torch": 24, "roofline": 200}


@dataclass(frozen=True, kw_only=True)
class Length:
    """One point of an axis, in the paper's tokens; a platform scales both."""

    axis: str
    input_len: int
    output_len: int

    @property
    def value(self) -> int:
        return self.input_len if self.axis == "input" else self.output_len

    def cell(self, view: View, contender: str) -> Cell:
        output = scaled(view, self.output_len)
        knobs: Knobs = (
            ("input_len", scaled(view, self.input_len)),
            ("gen_length", output),
            ("steps", output),
            ("length_scale", 1.0),
            ("num_prompts", NUM_REQUESTS[view.platform.executor]),
            *view.together("fig7"),
        )
        all_knobs = (*knobs, *comparison.contender_knobs(view, contender))
        return view.cell(None, comparison.system_of(contender), DATASET, knobs=all_knobs)


INPUTS = [Length(axis="input", input_len=n, output_len=FIXED_OUTPUT) for n in (100, 200, 300, 400, 500, 600)]
OUTPUTS = [Length(axis="output", input_len=FIXED_INPUT, output_len=n) for n in (128, 256, 384, 512)]
PRINTED = {INPUTS[0]: "short (100)", INPUTS[-1]: "600", OUTPUTS[0]: "short (128)", OUTPUTS[-1]: "long (512)"}
"""The paper's text prints the ends of both curves."""
COLUMNS: Columns[StoredRun] = {
    "input_len": lambda run: run.cell.knob_values["input_len"],
    "output_len": lambda run: run.cell.knob_values["gen_length"],
    "system": lambda run: contender_of(run.cell),
    "seed": lambda run: run.cell.seed,
    "throughput_tok_s": THROUGHPUT,
    "tokens_per_processor_s": per_processor_second,
    "mean_latency_s": MEAN_LATENCY,
    "batch_size": lambda run: run.facts.get("batch_size"),
    "num_requests": lambda run: run.num_requests,
    "obtained": lambda run: run.obtained,
    "valid": lambda run: run.validity.valid,
    "run_folder": lambda run: run.cell.folder_name,
}


def scaled(view: View, length: int) -> int:
    return round(length * view.dllm.length_scale)


def cells(view: View) -> list[Cell]:
    """Send all requests at once, so that every length saturates all systems. The axes share a point."""
    compared = (*ours_of(view), BASE)
    return cell_by_cell((length.cell(view, system) for length in (*INPUTS, *OUTPUTS) for system in compared), view)


def relative(runs: Runs, length: Length, ours: str = OURS, of: Of = THROUGHPUT) -> Interval:
    """dLLM-Serve's throughput over Sparse-dLLM's, by repeat."""
    return runs.versus(length.cell(runs.view, ours), length.cell(runs.view, BASE), of, "ratio")


def paper_values(view: View) -> dict[Length, float]:
    if view.platform.name not in CARDS:
        return {}
    values = printed_in("fig7")
    return {length: values[length.axis][name] for length, name in PRINTED.items()}


def page(runs: Runs) -> Page:
    view, printed = runs.view, paper_values(runs.view)
    hollow = f"Hollow: the paper's ({SOURCE}), which states neither card, rate nor the other axis's length."
    sentences = [
        *([hollow] if printed else []),
        f"All {NUM_REQUESTS[view.platform.executor]} requests at once, every one of the same lengths; (a) {scaled(view, FIXED_OUTPUT)} "
        f"tokens generated, (b) prompts of {scaled(view, FIXED_INPUT)} tokens.",
        *([f"Lengths are the paper's x {view.dllm.length_scale:g}."] if view.dllm.length_scale != 1 else []),
    ]
    return Page(
        csv=Table(
            columns=("platform", "reading", "axis", *COLUMNS),
            rows=[
                (view.platform.name, reading, length.axis, *(column(run) for column in COLUMNS.values()))
                for length in (*INPUTS, *OUTPUTS)
                for system in (*ours_of(view), BASE)
                for reading in [view.reading if system in BASELINES else None]
                for run in runs.of(length.cell(view, system))
            ],
        ),
        picture=Picture(panels=[panel(runs, lengths, top(runs)) for lengths in (INPUTS, OUTPUTS)], caption=sentences),
        notes=sentences,
    )


def top(runs: Runs) -> float:
    """The upper limit of both panels, which begin at 0: 12 % above the highest interval or printed value."""
    tops, printed = [], paper_values(runs.view)
    for lengths in (INPUTS, OUTPUTS):
        ends = [1.0, *(printed[length] for length in lengths if length in printed)]
        for ratio in (relative(runs, length, *curve) for length in lengths for curve in series(runs.view)):
            if ratio.mean is not None:
                ends += [ratio.mean - ratio.arms[0], ratio.mean + ratio.arms[1]]
        tops.append(1.12 * max(ends))
    return max(tops)


def series(view: View) -> list[tuple[str, Of]]:
    """Return the contenders and measures to draw; if measured, also by processor time."""
    measures: list[Of] = [THROUGHPUT] if view.is_simulated else [THROUGHPUT, per_processor_second]
    return [(ours, measure) for measure in measures for ours in ours_of(view)]


def line(runs: Runs, lengths: list[Length], ours: str, of: Of) -> Line:
    ratios = {scaled(runs.view, length.value): relative(runs, length, ours, of) for length in lengths}
    usable = {place: interval for place, interval in ratios.items() if interval.mean is not None}
    look, label = look_of(ours), f"{look_of(ours).title} / Sparse-dLLM"
    if of is per_processor_second:
        look, label = replace(look, color=PROCESSOR_COLOR, linestyle=":"), f"{label}, by processor time"
    return Line(label=label, places=list(usable), at=list(usable.values()), look=look)


def panel(runs: Runs, lengths: list[Length], top: float) -> Panel:
    axis, printed = lengths[0].axis, paper_values(runs.view)
    lines = [line(runs, lengths, *curve) for curve in series(runs.view)]
    marks = [
        Mark(label="paper", place=length.value, value=printed[length], look=look_of(OURS))
        for length in lengths
        if length in printed
    ]
    return Panel(
        title=f"({'a' if axis == 'input' else 'b'}) by {axis} length",
        layers=[*lines, Guide(value=1, label="Sparse-dLLM"), *marks],
        x=Axis(label=f"{axis} length (tokens)", ticks=[scaled(runs.view, length.value) for length in lengths]),
        y=Axis(label="throughput relative\nto Sparse-dLLM (x)", better="higher", limits=(0, top)),
    )


def findings(runs: Runs) -> list[Finding]:
    results = []
    means = {length: relative(runs, length).mean for length in (*INPUTS, *OUTPUTS)}
    gains = {length: mean for length, mean in means.items() if mean is not None}
    if len(gains) < len(means):
        return []
    for short, lengths in (("in", INPUTS), ("out", OUTPUTS)):
        first, last = lengths[0], lengths[-1]
        how = f"Sparse-dLLM as published, all requests at once; {first.axis} of"
        trend = f"gain at {last.value} less gain at {first.value} tokens"
        results += [
            runs.finding(f"dllm-{short}-short", gains[first], f"{how} {first.value} tokens"),
            runs.finding(f"dllm-{short}-long", gains[last], f"{how} {last.value} tokens"),
            runs.finding(f"dllm-{short}-trend", gains[last] - gains[first], trend, holds=gains[last] < gains[first]),
        ]
    return results


FIGURE = compared_figure(
    "fig7", SOURCE, platforms=("cpu-tiny", *CARDS), page=page, cells=cells, findings=findings, card=CARDS
)
