"""What the paper's figures compare (§6.1), and how its baselines are read."""

from __future__ import annotations

from collections.abc import Sequence

from paper_figures.common.figure import cell_by_cell
from repro.reports.figures import Knobs, View
from repro.runs.cell import Cell
from repro.systems.dllm.batching import READINGS

DATASETS = ("livebench", "burst", "osc")
OURS = "dllm-serve"
BASELINES = ("fast-dllm", "dllm-cache", "sparse-dllm")
SYSTEMS = (OURS, *BASELINES)


def rate_cells(view: View, rates: Sequence[float]) -> list[Cell]:
    """Every system on every data set at every rate; figures of it share their runs, measured ones too."""
    asked = (
        view.cell(
            None,
            system,
            dataset,
            rate=rate,
            knobs=(*requests_at(view, rate), *baseline_knobs(view, system), *view.together("rates")),
        )
        for dataset in DATASETS
        for system in SYSTEMS
        for rate in rates
    )
    return cell_by_cell(asked, view)


def requests_at(view: View, rate: float) -> Knobs:
    """The platform's number of requests at a rate, unless the view asks for another."""
    number = view.dllm.requests_at(rate)
    return () if number is None or "num_prompts" in dict(view.knobs) else (("num_prompts", number),)


def baseline_knobs(view: View, system: str) -> Knobs:
    return () if system == OURS else view.baseline_knobs()


def reading_sentence(view: View) -> str:
    """What the baselines stand for; upstream's copies can only be simulated."""
    text = READINGS[view.reading].text.capitalize()
    if view.reading == "published" and view.platform.executor != "roofline":
        text += " (here its batches only: our code makes no such copies)"
    return f"{text}."
