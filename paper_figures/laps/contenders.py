"""What is compared in LAPS's figures, on which models and data, at which loads."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from paper_figures.common.contender import Contender
from repro.systems.laps.part import MODELS

PAIRED_SEEDS = 10
"""Repeats of a figure where a view asks for no other number."""
LMSYS, SHAREGPT = "lmsys-chat-1m", "sharegpt"
SMALL, MIDDLE, LARGE = MODELS
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
"""From 1 to 64 (LAPS §4.1); powers of two are assumed."""
CAPACITY: Mapping[str, float] = MappingProxyType({SMALL: 167.0, MIDDLE: 83.0, LARGE: 36.5})
"""Turns/s that SGLang serves on one instance with 256 clients: what a load of 1 means."""

CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        each.name: each
        for each in (
            Contender(name="sglang", system="sglang-pd", title="SGLang PD"),
            Contender(name="router", system="sglang-pd-router", title="SGLang PD + router", linestyle="--"),
            Contender(
                name="sglang-graphs",
                system="sglang-pd",
                title="SGLang PD, prefill graphs",
                color="#E69F00",
                marker="X",
                linestyle="--",
                knobs=(("prefill_graphs", True),),
            ),
            Contender(name="vllm", system="vllm-pd", title="vLLM PD"),
            Contender(name="graphs", system="laps-graphs-only", title="LAPS, graphs only"),
            Contender(name="apart", system="laps-disaggregation-only", title="LAPS, disaggregation only"),
            Contender(name="laps", system="laps", title="LAPS"),
            Contender(name="reserve", system="reserve", title="Reserve"),
        )
    }
)
SINGLE = ("sglang", "graphs", "apart", "laps", "reserve")
EIGHT = ("sglang", "router", "graphs", "apart", "laps", "reserve")


def rate_of(load: float, model: str = MIDDLE, instances: int = 1) -> float:
    """Turns/s."""
    return round(load * instances * CAPACITY[model], 3)
