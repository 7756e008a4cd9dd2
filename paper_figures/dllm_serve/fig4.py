"""dLLM-Serve Figure 4: mean latency against arrival rate."""

from paper_figures.common.figure import Page
from paper_figures.common.runs import Runs
from paper_figures.common.words import number
from paper_figures.dllm_serve import rates
from paper_figures.dllm_serve.comparison import BASELINES, DATASETS, OURS, SYSTEMS
from paper_figures.dllm_serve.curve import MEAN_LATENCY, curves_of
from paper_figures.dllm_serve.fig3 import cells, table4_values
from paper_figures.dllm_serve.layout import CARD, PAPER, TABLE_4_CARD, comparison_figure
from paper_figures.dllm_serve.rates import PaperValue
from repro.reports.claims import Finding, stated
from repro.reports.figures import View

SOURCE = f"{PAPER}, Figure 4, §6.3"


def page(runs: Runs) -> Page:
    curves, paper = curves_of(runs), paper_latencies(runs.view)
    sentences = [
        "Latency: from a request's arrival to its last token, queueing included; mean over finished requests, geometric over repeats, log scale.",
        *printed_sentence(runs.view, paper),
    ]
    return Page(
        csv=rates.csv_of(curves, paper, MEAN_LATENCY, runs.view),
        picture=rates.picture(rates.panels(curves, MEAN_LATENCY, paper, is_log=True), curves, sentences),
    )


def printed_sentence(view: View, paper: list[PaperValue]) -> list[str]:
    if is_other_load(view) and view.platform.name in (CARD, TABLE_4_CARD):
        return ["The paper's latencies, of other numbers of requests, are not drawn: a queue grows with them."]
    if any(value.is_bound for value in paper):
        return [
            f"Hollow marker and dotted line: the paper's ({SOURCE}), which says 'above' of the baselines.",
            *rates.none_printed(paper),
        ]
    return ["Hollow: the paper's Table 4, at its rate."] if paper else []


def is_other_load(view: View) -> bool:
    """Whether runs have another number of requests than the platform's, which we chose after the printed latencies."""
    return "num_prompts" in dict(view.knobs)


def paper_latencies(view: View) -> list[PaperValue]:
    """Return dLLM-Serve's mean on Burst at 0.5 req/s, and the bound that the text gives for the baselines."""
    if is_other_load(view):
        return []
    if view.platform.name == TABLE_4_CARD:
        return table4_values("avg_latency_s")
    if view.platform.name != CARD:
        return []
    ours, bound = (stated("dllm-serve", f"dllm-4090-burst-{name}-lat") for name in ("serve", "base"))
    return [
        PaperValue(dataset="burst", system=OURS, rate=0.5, value=ours),
        PaperValue(dataset="burst", system="fast-dllm", rate=0.5, value=bound, is_bound=True),
    ]


def findings(runs: Runs) -> list[Finding]:
    curves = curves_of(runs)
    low, high = min(runs.view.dllm.rates), max(runs.view.dllm.rates)

    def means(rate: float) -> dict[tuple[str, str], float]:
        latencies = {name: curve.at(rate, MEAN_LATENCY).mean for name, curve in curves.by_name.items()}
        return {name: mean for name, mean in latencies.items() if mean is not None}

    at_low, at_high = means(low), means(high)
    burst = {system: mean for (dataset, system), mean in at_high.items() if dataset == "burst"}
    if len(at_low) < len(DATASETS) * len(SYSTEMS) or len(burst) < len(SYSTEMS):
        return []
    best = min(BASELINES, key=burst.__getitem__)
    base, ours = burst[best], burst[OURS]
    spread = max(
        number(curves.versus(dataset, system, OURS, MEAN_LATENCY, low)) for dataset in DATASETS for system in BASELINES
    )
    condition = f"on Burst at {high:g} req/s"
    rows = {
        "dllm-low-load-equal": (
            spread,
            f"largest ratio of a baseline's mean latency to dLLM-Serve's at {low:g} req/s, over the data sets",
        ),
        "dllm-4090-burst-base-lat": (base, f"least of the baselines' mean latencies {condition}"),
        "dllm-4090-burst-serve-lat": (ours, f"mean {condition}"),
        "dllm-4090-burst-lat-ratio": (
            number(curves.versus("burst", best, OURS, MEAN_LATENCY, high)),
            f"best baseline's mean over dLLM-Serve's {condition}",
        ),
    }
    return [runs.finding(claim, value, how) for claim, (value, how) in rows.items()]


FIGURE = comparison_figure("fig4", SOURCE, page=page, cells=cells, findings=findings)
