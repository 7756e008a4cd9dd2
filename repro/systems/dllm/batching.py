"""How requests become steps, as data: which batching a method runs under, and the three readings of a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from baselines.dllm.published import PublishedMethod
from engines.dllm.method import Method
from engines.errors import UserError, require

PACKED_KNOBS = frozenset(
    {
        "scheduler",
        "max_num_batched_tokens",
        "max_num_logits",
        "logit_rows",
        "attention_backend",
        "cuda_graphs",
        "tensor_parallel",
    }
)
STATIC_KNOBS = frozenset({"batch_size", "batch_rule"})
_PARTICULAR = PACKED_KNOBS | STATIC_KNOBS | {"reading"}
"""Knobs that only some batchings heed."""


@dataclass(frozen=True, kw_only=True)
class Batching:
    kind: Literal["packed", "static"]
    """``packed``: continuous batching on dLLM-Serve's engine; ``static``: padded batches that run to completion."""
    is_upstream: bool = False
    """Whether batches are as published code can hold them, and simulated steps charged its copies of logits."""

    @property
    def knobs(self) -> frozenset[str]:
        return PACKED_KNOBS if self.kind == "packed" else STATIC_KNOBS


PACKED = Batching(kind="packed")

BATCH_RULES: Mapping[str, str] = MappingProxyType(
    {
        "one": "one request at a time",
        "workload": "largest that holds the workload's longest request",
        "max_model_len": "largest that holds requests of max_model_len tokens",
    }
)
"""How large a static batch is. The paper (§6.1) says "the maximum static batch size that fits in memory", found by
"preliminary profiling", and not what was profiled."""

DEFAULT_BATCH_RULE = "workload"


def check_batch_rule(name: str) -> None:
    if name not in BATCH_RULES:
        raise UserError(f"batch_rule={name!r} is unknown: use one of {', '.join(BATCH_RULES)}")


@dataclass(frozen=True, kw_only=True)
class Reading:
    text: str
    batching: Batching


READINGS: Mapping[str, Reading] = MappingProxyType(
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


def default_reading(executor: str) -> str:
    """A simulated card stands for the paper's runs; on other hardware nothing was published."""
    return "published" if executor == "roofline" else "efficient"


def reading(name: str) -> Reading:
    if name not in READINGS:
        raise UserError(f"reading={name!r} is unknown: use one of {', '.join(READINGS)}")
    return READINGS[name]


def batching_of(method: Method, reading_name: str) -> Batching:
    """dLLM-Serve is packed, whatever the baselines stand for."""
    return reading(reading_name).batching if isinstance(method, PublishedMethod) else PACKED


def refuse_ignored(method: Method, given: Mapping[str, Any], executor: str) -> None:
    """Refuse a knob that the method's batching does not heed."""
    name = given.get("reading", default_reading(executor))
    heeded, under = batching_of(method, name).knobs, ""
    if isinstance(method, PublishedMethod):
        heeded, under = heeded | {"reading"}, f" and reading={name!r}"
    for knob in sorted((_PARTICULAR - heeded) & given.keys()):
        require(False, f"{knob}={given[knob]!r} has no effect with system={method.name!r}{under}: leave it out")
