"""The twelve panels of AMPD Figure 4: models, traces, GPUs, plans and gains as printed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from engines.cluster.hardware import Deployment
from repro.reports.paper import TableValue, load_table
from repro.workloads.sessions import load_session_card

MODELS = ("Qwen3-32B", "Llama-3.1-70B", "Mixtral-8x7B")
TRACES = ("toolbench", "gaia", "hotpotqa", "dureader")
RATES = (0.8, 1.2, 1.6, 2.0, 2.4)
DETAIL_MODEL, DETAIL_RATE = "Llama-3.1-70B", 2.0
"""Where Figure 4's bottom row is, Figure 5 and Figure 6."""
BASELINES = ("dynamo", "vllm", "continuum")


@dataclass(frozen=True, kw_only=True)
class TracePanel:
    model: str
    trace: str
    """Name of its card."""
    plans: tuple[Deployment, ...]
    """Table 2's, best first."""
    gains: Mapping[tuple[float, str], float]
    """Printed gain of AMPD as a ratio, by rate and baseline; NaN where the label is missing."""

    @property
    def title(self) -> str:
        return f"{self.model} {load_session_card(self.trace).title}"

    @property
    def num_gpus(self) -> int:
        return load_session_card(self.trace).num_gpus


@cache
def panels() -> tuple[TracePanel, ...]:
    """Row by row as the figure has them."""
    plans: dict[tuple[str, str], list[Deployment]] = {}
    for row in load_table("ampd/table2.csv"):
        degrees = (_whole(row[f"planner_{phase}_{kind}"]) for phase in ("prefill", "decode") for kind in ("tp", "dp"))
        key = str(row["model"]).replace("Llama3.1", "Llama-3.1"), str(row["trace"]).lower()
        plans.setdefault(key, []).append(Deployment.disaggregated(*degrees))
    gains: dict[tuple[str, str], dict[tuple[float, str], float]] = {}
    for row in load_table("ampd/fig4_improvements.csv"):
        own = gains.setdefault((str(row["model"]), str(row["trace"]).lower()), {})
        for name in BASELINES:
            percent = row[f"gain_vs_{name}_pct"]
            own[float(str(row["rate"])), name] = math.nan if percent is None else 1 + float(percent) / 100
    return tuple(
        TracePanel(model=model, trace=trace, plans=tuple(plans[model, trace]), gains=gains[model, trace])
        for model in MODELS
        for trace in TRACES
    )


def panel_of(model: str, trace: str) -> TracePanel:
    return next(each for each in panels() if (each.model, each.trace) == (model, trace))


def _whole(value: TableValue) -> int:
    assert isinstance(value, int)
    return value


def details() -> list[TracePanel]:
    """Figure 4's bottom row."""
    return [panel_of(DETAIL_MODEL, trace) for trace in TRACES]
