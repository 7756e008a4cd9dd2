"""How requests become steps, as data: which batching a method runs under, and the three readings of a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from repro.systems.dllm.knobs import BatchRule, ReadingName


@dataclass(frozen=True, kw_only=True)
class Batching:
    kind: Literal["packed", "static"]
    """``packed``: continuous batching on dLLM-Serve's engine; ``static``: padded batches that run to completion."""
    is_upstream: bool = False
    """Whether batches are as published code can hold them, and simulated steps charged its copies of logits."""


PACKED = Batching(kind="packed")

BATCH_RULES: Mapping[BatchRule, str] = MappingProxyType(
    {
        "one": "one request at a time",
        "workload": "largest that holds the workload's longest request",
        "max_model_len": "largest that holds requests of max_model_len tokens",
    }
)
"""How large a static batch is. The paper (§6.1) says "the maximum static batch size that fits in memory", found by
"preliminary profiling", and not what was profiled."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    text: str
    batching: Batching


READINGS: Mapping[ReadingName, Reading] = MappingProxyType(
    {
        "published": Reading(
            text="baselines as published: batches that published code's memory holds, and its copies of logits",
            batching=Batching(kind="static", is_upstream=True),
        ),
        "efficient": Reading(
            text="baselines in our implementation, largest static batch", batching=Batching(kind="static")
        ),
        "policy": Reading(text="baselines' cache policies under continuous batching", batching=PACKED),
    }
)
"""What a baseline stands for in a comparison. Only the first can be held against the paper; the last isolates the policy:
nothing differs from dLLM-Serve but refresh rule, retention and decode rule."""


def default_reading(executor: str) -> ReadingName:
    """A simulated card stands for the paper's runs; on other hardware nothing was published."""
    return "published" if executor == "roofline" else "efficient"
