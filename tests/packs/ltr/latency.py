"""Learning to rank: mean latency by arrival rate."""

from pathlib import Path

from packs.ltr.policy import ShortestPredicted

from engines.policies.views import PrefillQueue, PrefillTask
from paper_figures.common.figure import Page, Picture, Table, figure, seed_by_seed
from paper_figures.common.panel import Axis, Line, Panel
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.style import system_look
from paper_figures.common.words import said
from repro.reports.claims import Finding
from repro.reports.figures import Paper, View
from repro.runs.cell import Cell

SYSTEMS = {"first come, first served": "vllm-sim", "ranked": "packs.ltr.policy:RANKED"}
RATES = (16.0, 64.0)
MEAN = Measure(path="e2el_s/mean")
SETTING = (
    ("model", "Llama-3.1-8B"),
    ("deployment", "TP1x1"),
    ("workload", "packs.ltr.policy:Chat"),
    ("transient", True),
)
EXAMPLE = (10, 2, 1)
"""Tokens of the answers in Figure 1, in their order of arrival; a token takes a second, and one request runs at once."""


def cell(view: View, system: str, rate: float) -> Cell:
    return view.cell("latency", SYSTEMS[system], "Chat", rate=rate, knobs=SETTING)


def cells(view: View) -> list[Cell]:
    return seed_by_seed((cell(view, system, rate) for rate in RATES for system in SYSTEMS), view)


def per_token_s(queue: PrefillQueue) -> float:
    """Mean latency of the example for each token of an answer, in the queue's order."""
    for at in range(len(EXAMPLE)):
        queue.push(PrefillTask(at, at, at, 0, "initial", 0, 1, 0.0))
    now, latencies = 0.0, []
    while len(queue):
        tokens = EXAMPLE[queue.take(now).session_id]
        now += tokens
        latencies.append(now / tokens)
    return sum(latencies) / len(latencies)


def page(runs: Runs) -> Page:
    at = {system: [runs.at(cell(runs.view, system, rate), MEAN) for rate in RATES] for system in SYSTEMS}
    looks = dict(zip(SYSTEMS, map(system_look, ("fast-dllm", "dllm-serve")), strict=True))
    lines = [Line(label=system, places=RATES, at=at[system], look=looks[system]) for system in SYSTEMS]
    rows = [(rate, *map(said, means)) for rate, *means in zip(RATES, *at.values(), strict=True)]
    panel = Panel(title="Chat", layers=lines, x=Axis(label="req/s"), y=Axis(label="mean latency (s)", better="lower"))
    return Page(
        table=Table(columns=("req/s", *SYSTEMS), rows=rows),
        picture=Picture(panels=[panel], caption=["Llama-3.1-8B on an A100."]),
    )


def findings(runs: Runs) -> list[Finding]:
    first, ranked = per_token_s(PrefillQueue()), per_token_s(ShortestPredicted(predicted=dict(enumerate(EXAMPLE))))
    example = {"fcfs": first, "sjf": ranked, "gain": first / ranked}
    found = [
        runs.finding(f"ltr-example-{name}", value, "Figure 1 by our queues", obtained="computed")
        for name, value in example.items()
    ]
    base, ours = ({rate: cell(runs.view, system, rate) for rate in RATES} for system in SYSTEMS)
    gains = [runs.versus(base[rate], ours[rate], MEAN, "ratio") for rate in RATES]
    means = tuple(
        (f"{rate:g} req/s", gain.mean) for rate, gain in zip(RATES, gains, strict=True) if gain.mean is not None
    )
    if not means:
        return found
    at, gain = max(means, key=lambda each: each[1])
    return [
        *found,
        runs.finding("ltr-chat-latency", gain, f"mean latency, most of {len(means)} rates: {at}", readings=means),
    ]


FIGURE = figure(
    name="ltr/latency",
    title="Learning to rank: mean latency by arrival rate",
    source="Abstract",
    platforms=("a100",),
    cells=cells,
    page=page,
    findings=findings,
    place=lambda where: "NVIDIA A100 80 GB, Llama-3.1-8B",
)

LTR = Paper(
    name="ltr",
    title="Learning to rank",
    package="packs.ltr",
    figures={"latency": "mean latency by arrival rate"},
    claims=Path(__file__).with_name("claims.yaml"),
)
