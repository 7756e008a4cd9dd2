"""Contenders of LAPS's figures, with models, data and loads."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from paper_figures.common.contender import Contender, contenders_beside

PAIRED_SEEDS = 10
"""Repeats of a figure if a view asks for no other number."""
LMSYS, SHAREGPT = "lmsys-chat-1m", "sharegpt"
MODELS = ("Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B")
"""The models of LAPS §4."""
SMALL, MIDDLE, LARGE = MODELS
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
"""From 1 to 64 (LAPS §4.1); powers of two are assumed."""
CAPACITY: Mapping[str, float] = MappingProxyType({SMALL: 167.0, MIDDLE: 83.0, LARGE: 36.5})
"""Turns/s that SGLang serves on one instance with 256 clients. We call this rate a load of 1."""

CONTENDERS = contenders_beside(__file__, Contender)
SINGLE = ("sglang", "graphs", "apart", "laps", "reserve")
EIGHT = ("sglang", "router", "graphs", "apart", "laps", "reserve")


def tuned(name: str) -> Contender:
    """Return a contender whose free knobs are set by the search that all share (repro.runs.tuning)."""
    plain = CONTENDERS[name]
    return replace(plain, name=f"{name}-tuned", title=f"{plain.title}, tuned", knobs=(*plain.knobs, ("tune", "search")))


def rate_of(load: float, model: str = MIDDLE, instances: int = 1) -> float:
    """Return turns/s at a load."""
    return round(load * instances * CAPACITY[model], 3)
