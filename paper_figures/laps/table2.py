"""LAPS Table 2 (§4.1): time of an offline distillation, 1,000 tokens an answer, four prefill and four decode GPUs, no deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paper_figures.common.caption import invalid_notes
from paper_figures.common.table import save_table
from paper_figures.laps.compare import MEAN, Pairs, number, said
from paper_figures.laps.contenders import CONTENDERS, LMSYS, MODELS, PAIRED_SEEDS, SHAREGPT, seeded
from paper_figures.laps.layout import CSV_COLUMNS, csv_rows, finding, place_of, seeds_sentence
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval
from repro.runs.store import StoredRun

NAME = "table2"
TITLE = "LAPS Table 2: time of offline distillation"
SOURCE = "LAPS, Table 2, §4.1"
PLATFORMS = ("h200",)
place = place_of
NUM_RUNS = PAIRED_SEEDS
DATASETS = (SHAREGPT, LMSYS)
"""The paper names neither; both cards have the same lengths without a file."""
NAMES = ("sglang", "laps", "reserve")
PRINTED = 8.0
CLIENTS, TURNS, ANSWER_TOKENS = 512, 4096, 1000


def cell(view: View, name: str, model: str, dataset: str, figure: str | None = None) -> Cell:
    return CONTENDERS[name].cell(
        figure,
        view,
        dataset,
        {
            "model": model,
            "num_instances": 4,
            "decode": "apart",
            "deadlines": False,
            "answer_tokens": ANSWER_TOKENS,
            "clients": CLIENTS,
            "num_prompts": TURNS,
        },
    )


def cells(view: View) -> list[Cell]:
    return seeded(
        [cell(view, name, model, dataset, NAME) for dataset in DATASETS for model in MODELS for name in NAMES], view
    )


def whole_s(run: StoredRun) -> float | None:
    value: float | None = run.summary["end_s"]
    return value


def change(pairs: Pairs, view: View, name: str, model: str, dataset: str) -> Interval:
    """Of the whole time against SGLang PD, percent."""
    return pairs.versus(cell(view, name, model, dataset), cell(view, "sglang", model, dataset), whole_s)


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    pairs = Pairs(runs, view)
    rows = [
        (
            dataset,
            model,
            said(pairs.at(cell(view, "sglang", model, dataset), whole_s)),
            said(pairs.at(cell(view, "laps", model, dataset), whole_s)),
            said(change(pairs, view, "laps", model, dataset), "%", 2),
            said(change(pairs, view, "reserve", model, dataset), "%", 2),
            f"-{PRINTED:g} %",
            " / ".join(f"{number(pairs.at(cell(view, name, model, dataset), MEAN)):.0f}" for name in NAMES),
        )
        for dataset in DATASETS
        for model in MODELS
    ]
    return save_table(
        out,
        f"{NAME}-{view.stem}",
        title=TITLE,
        columns=(
            "conversations",
            "model",
            "SGLang PD s",
            "LAPS s",
            "LAPS",
            "Reserve",
            "printed",
            "mean TTFT ms, SGLang / LAPS / Reserve",
        ),
        rows=rows,
        notes=(
            f"{TURNS:,} turns of {CLIENTS} clients, {ANSWER_TOKENS:,} tokens an answer, four GPUs that prefill and four that decode; simulated; "
            f"{seeds_sentence(view)} Prefilling is a few percent of the time: no order of prefills can save 8 %.",
            *invalid_notes(runs),
        ),
        csv_columns=(*CSV_COLUMNS, "end_s"),
        csv_rows=[(*row, run.summary["end_s"]) for row, run in zip(csv_rows(runs), runs, strict=True)],
    )


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    pairs = Pairs(runs, view)
    best = min((change(pairs, view, "laps", model, dataset) for model in MODELS for dataset in DATASETS), key=number)
    waits = [number(pairs.at(cell(view, "sglang", model, SHAREGPT), MEAN)) for model in MODELS]
    return [
        finding(
            "laps-distill",
            -number(best),
            f"{said(best, '%', 2)} at best over three models; mean TTFT of SGLang PD is {', '.join(f'{wait:.0f}' for wait in waits)} ms beside answers of many seconds",
        )
    ]
