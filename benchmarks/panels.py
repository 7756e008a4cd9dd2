"""The twelve panels of AMPD Figure 4 for the scripts here: models, traces, objectives and plans as printed."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from engines.ampd.performance import PerformanceModel
from engines.ampd.profiler import profile_hardware
from engines.ar.cluster.cluster import Hardware
from engines.ar.constants import CostConstants
from engines.ar.deployment import Deployment
from engines.ar.slo import Slo
from engines.hardware.catalogue import H20
from engines.models.shape import model_shape
from repro.workloads.arrivals import ArrivalConfig
from repro.workloads.sessions import SessionWorkload, SessionWorkloadConfig, build_sessions, load_session_card

PAPER = Path(__file__).resolve().parents[1] / "results" / "paper" / "ampd"
RATES = (0.8, 1.2, 1.6, 2.0, 2.4)
SESSIONS = 99
"""Derived from Figure 6, whose values are multiples of 1/99."""


class Gain(NamedTuple):
    """Printed gains of AMPD in one cell, as ratios; NaN where the label is missing."""

    dynamo: float
    vllm: float
    continuum: float


@dataclass(frozen=True, kw_only=True)
class Panel:
    model: str
    trace: str
    num_gpus: int
    slo: Slo
    plans: tuple[Deployment, ...]
    """Table 2, #1 to #3."""
    gains: dict[float, Gain]
    """By rate."""

    def __str__(self) -> str:
        return f"{self.model} {self.trace}"

    def hardware(self, constants: CostConstants) -> Hardware:
        return Hardware(shape=model_shape(self.model), gpu=H20, constants=constants)

    def performance(self, hardware: Hardware) -> PerformanceModel:
        """T_dec is profiled at the context that a round of this trace has on average."""
        card = load_session_card(self.trace)
        context = round((card.lengths.prefill_tokens + card.lengths.decode_tokens) / 2)
        return profile_hardware(hardware, num_gpus=self.num_gpus, decode_context=context)

    def workload(self, rate: float, seed: int, *, num_sessions: int = SESSIONS) -> SessionWorkload:
        return build_sessions(
            SessionWorkloadConfig(
                trace=self.trace,
                num_sessions=num_sessions,
                seed=seed,
                arrivals=ArrivalConfig(kind="poisson", rate=rate),
            )
        )


@cache
def panels() -> tuple[Panel, ...]:
    protocol = yaml.safe_load((PAPER / "protocol.yaml").read_text(encoding="utf-8"))
    plans: dict[tuple[str, str], list[Deployment]] = {}
    for row in _rows("table2.csv"):
        degrees = (int(row[f"planner_{phase}_{kind}"]) for phase in ("prefill", "decode") for kind in ("tp", "dp"))
        plans.setdefault((row["model"], row["trace"]), []).append(Deployment.disaggregated(*degrees))
    gains: dict[tuple[str, str], dict[float, Gain]] = {}
    for row in _rows("fig4_improvements.csv"):
        found = Gain(*(_ratio(row[f"gain_vs_{name}_pct"]) for name in Gain._fields))
        gains.setdefault((row["model"], row["trace"]), {})[float(row["rate"])] = found
    return tuple(
        Panel(
            model=model,
            trace=trace,
            num_gpus=protocol["gpus_per_trace"][trace],
            slo=Slo(ttft_s=slo["ttft_ms"] / 1e3, itl_s=slo["itl_ms"] / 1e3),
            plans=tuple(plans[model.replace("Llama-3.1", "Llama3.1"), trace]),
            gains=gains[model, trace],
        )
        for model, traces in protocol["slo_ms"].items()
        for trace, slo in traces.items()
    )


def largest_even_split(panel: Panel) -> Deployment:
    """The rule to beat: half of the GPUs for each phase, in workers as large as fit, at most eight GPUs."""
    half = panel.num_gpus // 2
    degree = min(half, 8)
    return Deployment.disaggregated(degree, half // degree, degree, half // degree)


def _ratio(percent: str) -> float:
    return 1 + float(percent) / 100 if percent else math.nan


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (PAPER / name).open(encoding="utf-8") as file:
        yield from csv.DictReader(file)
