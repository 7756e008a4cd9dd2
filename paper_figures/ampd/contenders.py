"""The contenders of AMPD's figures (``contenders.yaml``), and the twelve panels of Figure 4, with models, traces, GPUs, and plans and
gains as printed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engines.cluster.hardware import Deployment
from paper_figures.common.contender import Contender, contenders_beside
from paper_figures.common.figure import seed_by_seed
from repro.files import read_yaml
from repro.reports.claims import TableValue, load_table
from repro.reports.figures import Knobs, View
from repro.runs.cell import Cell, Scalar
from repro.workloads.sessions import load_session_card

MODELS = ("Qwen3-32B", "Llama-3.1-70B", "Mixtral-8x7B")
TRACES = ("toolbench", "gaia", "hotpotqa", "dureader")
RATES = (0.8, 1.2, 1.6, 2.0, 2.4)
DETAIL_MODEL, DETAIL_RATE = "Llama-3.1-70B", 2.0
"""Model and rate of Figure 4's bottom row, Figure 5 and Figure 6."""
PAIRS: Mapping[str, Sequence[Sequence[str]]] = read_yaml(Path(__file__).with_name("pairs.yaml"))
"""Figure -> pairs of contenders to compare."""
SAME_BASELINES = ("dynamo", "vllm", "continuum")


@dataclass(frozen=True, kw_only=True, eq=False)
class TracePanel:
    model: str
    trace: str
    """Name of the trace's card."""
    plans: tuple[Deployment, ...]
    """Plans of Table 2, best first."""
    gains: Mapping[tuple[float, str], float]
    """Printed gain of AMPD as a ratio, by rate and baseline; NaN if the label is missing."""

    @property
    def title(self) -> str:
        return f"{self.model} {load_session_card(self.trace).title}"

    @property
    def num_gpus(self) -> int:
        return load_session_card(self.trace).num_gpus


@cache
def panels() -> tuple[TracePanel, ...]:
    """The panels of Figure 4, row by row."""
    plans: dict[tuple[str, str], list[Deployment]] = {}
    for row in load_table("ampd/table2.csv"):
        degrees = (_whole(row[f"planner_{phase}_{kind}"]) for phase in ("prefill", "decode") for kind in ("tp", "dp"))
        key = str(row["model"]).replace("Llama3.1", "Llama-3.1"), str(row["trace"]).lower()
        plans.setdefault(key, []).append(Deployment.disaggregated(*degrees))
    gains: dict[tuple[str, str], dict[tuple[float, str], float]] = {}
    for row in load_table("ampd/fig4_improvements.csv"):
        printed = gains.setdefault((str(row["model"]), str(row["trace"]).lower()), {})
        for name in SAME_BASELINES:
            percent = row[f"gain_vs_{name}_pct"]
            printed[float(str(row["rate"])), name] = math.nan if percent is None else 1 + float(percent) / 100
    return tuple(
        TracePanel(model=model, trace=trace, plans=tuple(plans[model, trace]), gains=gains[model, trace])
        for model in MODELS
        for trace in TRACES
    )


def panel_of(model: str, trace: str) -> TracePanel:
    return next(panel for panel in panels() if (panel.model, panel.trace) == (model, trace))


def _whole(value: TableValue) -> int:
    assert isinstance(value, int)
    return value


def details() -> list[TracePanel]:
    """Panels of Figure 4's bottom row."""
    return [panel_of(DETAIL_MODEL, trace) for trace in TRACES]


PAIRED_SEEDS = 10
"""Repeats of a figure if a view asks for no other number: with 99 sessions, one seed says too little."""


@dataclass(frozen=True, kw_only=True)
class OnPlan(Contender):
    is_tuned: bool = False
    """Whether it runs on a search's best deployment; else on Table 2's first, co-located ones with its decode pool's degree."""

    def deployment(self, panel: TracePanel) -> str:
        if self.is_tuned:
            return "search"
        plan = panel.plans[0]
        if self.system in ("ampd", "dynamo-sim"):
            return str(plan)
        degree = plan.decode[0].degree
        return f"TP{degree}x{panel.num_gpus // degree}"

    def on(self, view: View, panel: TracePanel, rate: float, knobs: Knobs = ()) -> Cell:
        """``transient`` is set because the paper's cells have so many sessions, most beyond what the workers keep up with."""
        defaults: dict[str, Scalar] = {"model": panel.model, "deployment": self.deployment(panel), "transient": True}
        return self.cell(view, panel.trace, {**defaults, **dict(self.knobs), **dict(knobs)}, rate=rate)


CONTENDERS = contenders_beside(__file__, OnPlan)
ORDERED = tuple(name for name, each in CONTENDERS.items() if ("queue_order", "on-time") in each.knobs)
DYNAMOS = tuple(name for name, each in CONTENDERS.items() if each.system == "dynamo-sim" and not each.is_tuned)
TUNED_BASELINES = ("dynamo-tuned", "vllm-tuned")
FIGURE4 = ("ampd", "ours", *SAME_BASELINES, "ampd-tuned", "ours-tuned", *TUNED_BASELINES)


def grid(
    view: View, names: Sequence[str], panels: Iterable[TracePanel], rates: Sequence[float], *, knobs: Knobs = ()
) -> list[Cell]:
    cells = (CONTENDERS[name].on(view, panel, rate, knobs) for panel in panels for rate in rates for name in names)
    return seed_by_seed(cells, view)
