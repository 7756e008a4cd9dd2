"""Code that dLLM-Serve's figures share."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from engines.errors import require
from engines.models.checkpoint import config_of
from engines.models.shape import ModelShape
from paper_figures.common.caption import basis_of, dataset_title, held_out_note, how_obtained, seeds_sentence
from paper_figures.common.figure import figure
from paper_figures.common.runs import Runs
from paper_figures.common.style import Look, system_look
from paper_figures.dllm_serve.answers import answer_notes
from paper_figures.dllm_serve.comparison import BASELINES, CONTENDERS, DATASETS, SYSTEMS, contender_of, look_of
from repro.families.dllm.settings import READINGS
from repro.families.platforms import DllmPart, Platform
from repro.reports.claims import load_figures, load_table
from repro.reports.figures import View
from repro.runs.store import StoredRun

PAPER = "dLLM-Serve (arXiv:2512.17077)"
PRINTED = Look(color="black", marker="D")
"""Look of the paper's values in bars."""


PROCESSOR_COLOR = "#333333"
"""Color of values by processor time, drawn beside those by wall time."""
SIMULATED_RUNS = 5
"""Repeats of a simulated ratio. With fewer, different arrivals and lengths move its second decimal, and nothing shows by how much."""
DENSE_SENTENCE = " Every system keeps the least with which the embedded model answers as it does without a cache; the paper's numbers are of its systems' usual retention."


def basis_and_reading(runs: Runs) -> str:
    """Tell under a title how the figure was obtained, and what baselines stand for, if there are any."""
    texts = [basis_of(runs)]
    if any(run.cell.system in BASELINES for run in runs.all):
        texts.append(READINGS[runs.view.reading].title)
    if runs.view.accuracy == "dense":
        texts.append("all at the accuracy of no cache")
    return "; ".join(texts)


def reading_sentence(view: View) -> str:
    """Tell what the baselines stand for; upstream's copies can only be simulated."""
    text = READINGS[view.reading].text.capitalize()
    if view.reading == "published" and view.platform.executor != "roofline":
        text += " (here its batches only: our code makes no such copies)"
    return f"{text}.{DENSE_SENTENCE if view.accuracy == 'dense' else ''}"


def origin_of_compared(runs: Runs) -> list[str]:
    """Tell how the contenders' runs came about, in which reading of the baselines, and how well each answers."""
    ordered = sorted(runs.all, key=lambda run: CONTENDERS.index(contender_of(run.cell)))
    is_simulated = any(run.record.obtained == "simulated" for run in ordered)
    return [
        reading_sentence(runs.view),
        seeds_sentence(ordered),
        *answer_notes(ordered),
        *how_obtained(ordered, [look_of(contender_of(run.cell)).title for run in ordered]),
        *(held_out_note(runs.view.platform) if is_simulated else []),
    ]


dllm_figure = partial(figure, paper="dllm-serve", under_title=basis_and_reading)
compared_figure = partial(dllm_figure, origin=origin_of_compared)
CARD = "rtx4090"
"""The card of Figures 3, 4 and 5; only there are their values comparable."""
CARDS = (CARD, "l40s")
"""The paper's cards. If a figure does not say which it shows, either card is an equally good reading."""
comparison_figure = partial(compared_figure, platforms=("cpu-tiny", CARD), card=CARD, num_runs=SIMULATED_RUNS)


TABLE_4_CARD = "l40s"


def table4_rows() -> dict[tuple[str, str], dict[str, Any]]:
    """Rows of the paper's Table 4 by data set and system."""
    titles = {dataset_title(dataset): dataset for dataset in DATASETS}
    systems = {system_look(system).title: system for system in SYSTEMS}
    return {
        (titles[str(row["dataset"])], systems[str(row["system"]).replace(" (Ours)", "")]): dict(row)
        for row in load_table("dllm_serve/table4.csv")
    }


def printed_in(figure: str) -> Mapping[str, Any]:
    """Return values of a figure that the paper's text or labels print."""
    values: Mapping[str, Any] = load_figures()[f"dllm-serve/{figure}"]["values"]
    return values


def shape_of(where: Platform) -> ModelShape:
    model = where.part(DllmPart).model
    return ModelShape.from_config(config_of(model), name=model)


def check_answers(view: View) -> None:
    """Refuse a platform on which no model gives answers."""
    require(
        view.platform.executor == "torch",
        f"platform={view.platform.name!r} simulates, and accuracy needs a model that answers: use --platform cpu-tiny",
    )


def all_valid(runs: Sequence[StoredRun]) -> bool:
    return all(run.validity.valid for run in runs)
