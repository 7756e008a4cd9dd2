"""What the paper's figures compare (§6.1), and how its baselines are read."""

from __future__ import annotations

from paper_figures.common.comparison import Comparison
from repro.reports.figures import Knobs, View
from repro.systems.dllm.batching import READINGS


def requests_at(view: View, rate: float) -> Knobs:
    """The platform's number of requests at a rate, unless the view asks for another."""
    number = view.dllm.requests_at(rate)
    return () if number is None or "num_prompts" in dict(view.knobs) else (("num_prompts", number),)


COMPARISON = Comparison(
    datasets=("livebench", "burst", "osc"),
    own="dllm-serve",
    baselines=("fast-dllm", "dllm-cache", "sparse-dllm"),
    size=requests_at,
)
DATASETS, OURS, BASELINES = COMPARISON.datasets, COMPARISON.own, COMPARISON.baselines


def reading_sentence(view: View) -> str:
    """What the baselines stand for; upstream's copies can only be simulated."""
    text = READINGS[view.reading].text.capitalize()
    if view.reading == "published" and view.platform.executor != "roofline":
        text += " (here its batches only: our code makes no such copies)"
    return f"{text}."
