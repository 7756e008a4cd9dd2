"""LAPS Table 2: time of offline distillation."""

from paper_figures.common.figure import Page, Table
from paper_figures.common.runs import Runs
from paper_figures.common.words import number, said
from paper_figures.laps.contenders import CONTENDERS, MODELS, SHAREGPT
from paper_figures.laps.layout import laps_figure, seeds_sentence
from paper_figures.laps.measures import MEAN, WHOLE_S, csv_of
from repro.reports.claims import Finding, stated
from repro.reports.figures import View
from repro.runs.cell import Cell
from repro.runs.statistics import Interval

NAMES = ("sglang", "laps", "reserve")
CLIENTS, TURNS, ANSWER_TOKENS = 512, 4096, 1000


def cell(view: View, name: str, model: str) -> Cell:
    """The paper has two data sets and names neither. Without a file, LMSYS-Chat-1M's card has ShareGPT's lengths."""
    size = {"num_instances": 4, "clients": CLIENTS, "num_prompts": TURNS, "answer_tokens": ANSWER_TOKENS}
    return CONTENDERS[name].cell(view, SHAREGPT, {"model": model, "decode": "apart", "deadlines": False, **size})


def cells(view: View) -> list[Cell]:
    return [cell(view, name, model) for model in MODELS for name in NAMES]


def change(runs: Runs, name: str, model: str) -> Interval:
    """Return the change of the whole time from SGLang PD's, in percent."""
    return runs.versus(cell(runs.view, name, model), cell(runs.view, "sglang", model), WHOLE_S)


def wait(runs: Runs, name: str, model: str) -> str:
    return f"{number(runs.at(cell(runs.view, name, model), MEAN)):.0f}"


def page(runs: Runs) -> Page:
    return Page(
        table=Table(
            columns=(
                *("conversations", "model", "SGLang PD s", "LAPS s", "LAPS", "Reserve", "printed"),
                "mean TTFT ms, SGLang / LAPS / Reserve",
            ),
            rows=[
                (
                    *(SHAREGPT, model),
                    *(said(runs.at(cell(runs.view, name, model), WHOLE_S)) for name in ("sglang", "laps")),
                    *(said(change(runs, name, model), "%", 2) for name in ("laps", "reserve")),
                    f"-{stated('laps', 'laps-distill'):g} %",
                    " / ".join(wait(runs, name, model) for name in NAMES),
                )
                for model in MODELS
            ],
        ),
        csv=csv_of(runs, end_s=WHOLE_S),
        notes=[
            f"{TURNS:,} turns of {CLIENTS} clients, {ANSWER_TOKENS:,} tokens an answer, four GPUs that prefill and four that decode; simulated; "
            f"{seeds_sentence(runs.view)} Prefilling is a few percent of the time: no order of prefills can save 8 %."
        ],
    )


def findings(runs: Runs) -> list[Finding]:
    best = min((change(runs, "laps", model) for model in MODELS), key=number)
    waits = ", ".join(wait(runs, "sglang", model) for model in MODELS)
    how = f"{said(best, '%', 2)} at best over three models; mean TTFT of SGLang PD is {waits} ms beside answers of many seconds"
    return [runs.finding("laps-distill", -number(best), how)]


FIGURE = laps_figure("table2", "LAPS, Table 2, §4.1", page=page, cells=cells, findings=findings)
