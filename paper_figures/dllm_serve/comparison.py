"""The contenders of the paper's figures (§6.1), readings of its baselines, and findings that several figures share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from paper_figures.common.figure import cell_by_cell
from paper_figures.common.runs import Runs
from paper_figures.common.style import Look, system_look
from paper_figures.dllm_serve.answers import title_of
from repro.reports.claims import Finding
from repro.reports.figures import SINGLE_REFRESH, Knobs, View, at_dense_accuracy
from repro.runs.cell import Cell

DATASETS = ("livebench", "burst", "osc")
OURS = "dllm-serve"
BASELINES = ("fast-dllm", "dllm-cache", "sparse-dllm")
SYSTEMS = (OURS, *BASELINES)
CONTENDERS = (OURS, SINGLE_REFRESH, *BASELINES)
"""Systems, and a variant of dLLM-Serve that we compare like a system at equal accuracy, where it is ahead."""


def contenders_of(view: View) -> tuple[str, ...]:
    return SYSTEMS if view.accuracy == "usual" else CONTENDERS


def ours_of(view: View) -> list[str]:
    """Contenders that we compare with baselines: dLLM-Serve, and its variant if that is compared."""
    return [contender for contender in contenders_of(view) if contender not in BASELINES]


def contender_of(cell: Cell) -> str:
    is_single = cell.system == OURS and cell.knob_values.get("refresh_delay") == 0
    return SINGLE_REFRESH if is_single else cell.system


def system_of(contender: str) -> str:
    return OURS if contender == SINGLE_REFRESH else contender


def look_of(contender: str) -> Look:
    """Return a contender's look; a variant has its system's colour."""
    look = system_look(system_of(contender))
    return look if contender != SINGLE_REFRESH else replace(look, title=title_of(contender), marker="P", linestyle="--")


def rate_cells(view: View, rates_of: Callable[[str], Sequence[float]]) -> list[Cell]:
    """Return every contender on every data set at each of its rates. Figures share these runs, also measured ones."""
    cells = (
        view.cell(
            None,
            system_of(contender),
            dataset,
            rate=rate,
            knobs=(*requests_at(view, rate), *contender_knobs(view, contender), *view.together("rates")),
        )
        for dataset in DATASETS
        for contender in contenders_of(view)
        for rate in rates_of(dataset)
    )
    return cell_by_cell(cells, view)


def requests_at(view: View, rate: float) -> Knobs:
    """The platform's number of requests at a rate, unless the view asks for another."""
    number = view.dllm.requests_at(rate)
    return () if number is None or "num_prompts" in dict(view.knobs) else (("num_prompts", number),)


def contender_knobs(view: View, contender: str) -> Knobs:
    """Return the knobs that the view's reading of baselines and its accuracy set for a contender."""
    single: Knobs = (("refresh_delay", 0),) if contender == SINGLE_REFRESH and view.accuracy == "usual" else ()
    reading = () if system_of(contender) == OURS else view.baseline_knobs()
    retention = () if view.accuracy == "usual" else at_dense_accuracy(contender).knobs
    return (*single, *reading, *retention)


def labels(view: View) -> dict[str, str]:
    """Data set -> its name in findings on this card."""
    return {dataset: f"{view.platform.name}/{dataset}" for dataset in DATASETS}


def ranks_of(throughput: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Return ranks of dLLM-Serve by data set, 1 if no baseline is faster; ``throughput`` is tok/s by data set and system."""
    return {
        dataset: 1.0 + sum(throughput[dataset, system] > throughput[dataset, OURS] for system in BASELINES)
        for dataset in DATASETS
    }


def token_cap(runs: Runs) -> Finding:
    """Count INVALID runs with steps above the token budget (docs/metrics.md, Validity)."""
    our_runs = [run for run in runs.all if run.cell.system == OURS]
    over = sum(any("max_num_batched_tokens" in reason for reason in run.validity.reasons) for run in our_runs)
    how = f"runs of dLLM-Serve with a step above its cap, of {len(our_runs)}, whose every step is checked"
    return runs.finding("dllm-token-cap", float(over), how, of=(runs.view.platform.name,), holds=over == 0)
