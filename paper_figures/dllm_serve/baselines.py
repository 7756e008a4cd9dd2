"""Every sampler alone and batched, beside dLLM-Serve, in one run; no figure of the paper."""

from __future__ import annotations

from dataclasses import dataclass

from paper_figures.common.caption import how_obtained, invalid_notes, missing_note, obtained_text, validity_text
from paper_figures.common.figure import Columns, Page, Table, cell_by_cell
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.words import said, shown
from paper_figures.dllm_serve.answers import title_of
from paper_figures.dllm_serve.comparison import OURS, contender_knobs, contenders_of, system_of
from paper_figures.dllm_serve.curve import MEAN_LATENCY, THROUGHPUT
from paper_figures.dllm_serve.layout import dllm_figure
from repro.reports.accuracy import SINGLE_REFRESH
from repro.reports.figures import Knobs, View
from repro.runs.cell import Cell
from repro.runs.store import StoredRun

DATASET = "burst"
NUM_REQUESTS = 8
BATCHING = ("alone", "batched")
OUTSIDE = Measure(path="outside_forward_share", scale=100)


@dataclass(frozen=True, kw_only=True)
class SamplerCase:
    label: str
    contender: str
    options: Knobs = ()

    def cell(self, view: View, batching: str) -> Cell:
        """All requests at once; batched is the largest static batch, or dLLM-Serve's own packing."""
        system = system_of(self.contender)
        limit: Knobs = (("max_num_seqs" if system == OURS else "batch_size", 1),)
        alone = limit if batching == "alone" else ()
        knobs = (("num_prompts", NUM_REQUESTS), *self.options, *alone, *view.together("baselines"))
        return view.cell(None, system, DATASET, knobs=(*knobs, *contender_knobs(view, self.contender)))


SAMPLERS = (
    SamplerCase(label="dLLM-Serve", contender=OURS),
    SamplerCase(label=title_of(SINGLE_REFRESH), contender=SINGLE_REFRESH),
    SamplerCase(label="Fast-dLLM, dual cache", contender="fast-dllm"),
    SamplerCase(label="Fast-dLLM, prefix cache", contender="fast-dllm", options=(("cache", "prefix"),)),
    SamplerCase(label="Fast-dLLM, no cache", contender="fast-dllm", options=(("cache", "none"),)),
    SamplerCase(label="dLLM-Cache", contender="dllm-cache"),
    SamplerCase(label="Sparse-dLLM", contender="sparse-dllm"),
    SamplerCase(label="LLaDA, no cache", contender="llada"),
)
COLUMNS: Columns[StoredRun] = {
    "batch_size": lambda run: run.facts.get("batch_size"),
    "seed": lambda run: run.cell.seed,
    "throughput_tok_s": THROUGHPUT,
    "mean_latency_s": MEAN_LATENCY,
    "mean_running": Measure(path="mean_running"),
    "outside_forward_share": Measure(path="outside_forward_share"),
    "num_steps": Measure(path="num_steps"),
    "obtained": lambda run: run.obtained,
    "valid": lambda run: run.validity.valid,
    "run_folder": lambda run: run.cell.folder_name,
}


def samplers(view: View) -> list[SamplerCase]:
    """With dLLM-Serve's variant where it is compared."""
    return [each for each in SAMPLERS if each.contender != SINGLE_REFRESH or SINGLE_REFRESH in contenders_of(view)]


def cells(view: View) -> list[Cell]:
    return cell_by_cell((each.cell(view, batching) for each in samplers(view) for batching in BATCHING), view)


def page(runs: Runs) -> Page:
    view = runs.view
    asked = [(each, batching, runs.of(each.cell(view, batching))) for each in samplers(view) for batching in BATCHING]
    missing = [f"{each.label} {batching}" for each, batching, own in asked if not own]
    return Page(
        table=Table(
            columns=(
                *("sampler", "alone tok/s", "batched tok/s", "batch", "gain", "outside forward, alone", "batched"),
                *("obtained", "valid"),
            ),
            rows=[table_row(runs, each) for each in samplers(view)],
        ),
        csv=Table(
            columns=("platform", "system", "options", "batching", *COLUMNS),
            rows=[
                (view.platform.name, each.contender, options, batching, *(of(run) for of in COLUMNS.values()))
                for each, batching, own in asked
                for options in [" ".join(f"{key}={value}" for key, value in each.options)]
                for run in own
            ],
        ),
        notes=[
            *invalid_notes(runs.all),
            *missing_note(missing, len(asked)),
            f"Seeds {', '.join(map(str, view.seeds))}; ± is the 95 % interval of their mean (Student's t).",
            *how_obtained(runs.all),
            f"{NUM_REQUESTS} requests of {DATASET} at once. Outside forward: share of step time that is not the model, its head "
            "and the softmax over it: schedule, metadata, selection and bookkeeping.",
        ],
        after_heading=f" - {view.platform.title}",
    )


def table_row(runs: Runs, sampler: SamplerCase) -> tuple[str, ...]:
    both = [sampler.cell(runs.view, batching) for batching in BATCHING]
    own = [run for cell in both for run in runs.of(cell)]
    alone, batched = (runs.at(cell, THROUGHPUT) for cell in both)
    sizes = {size for run in runs.of(both[1]) if (size := run.facts.get("batch_size")) is not None}
    return (
        sampler.label,
        said(alone),
        said(batched),
        ", ".join(map(str, sorted(sizes))) or "packed",
        shown(batched.mean / alone.mean if alone.mean and batched.mean else None, ".2f", "x"),
        *(shown(runs.at(cell, OUTSIDE).mean, ".1f", " %") for cell in both),
        obtained_text(own),
        validity_text(own),
    )


FIGURE = dllm_figure("baselines", "this project", platforms=("cpu-tiny",), page=page, cells=cells, decides_on=())
