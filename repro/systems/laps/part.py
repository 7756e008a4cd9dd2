"""What prefill systems run on a platform by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engines.cost.cards import Gpu

MODELS = ("Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B")
"""The models of LAPS §4."""


@dataclass(frozen=True, kw_only=True)
class PrefillPart:
    """A cell's knobs override these by name."""

    title: str
    gpu: str | Gpu | None
    """The card, or its name in the catalogue; None where steps are measured."""
    model: str
    """A shape by name (engines.models.shape), or of a measured instance (repro.prefill.instance)."""
    dataset: str
    clients: int
    """Clients of a closed loop, where neither a rate nor a number of clients is given."""
    num_turns: int
    slo_s: float
    """TTFT objective (LAPS §4.1)."""
    most_instances: int
    length_scale: float = 1.0
    """Factor on every prompt and answer, and on the boundary and budgets in tokens."""
    most_tokens: int = 0
    """The most tokens of a conversation, where steps are measured."""
    time_scale: float = 1.0
    """Factor on every time that the paper's settings state for an objective of 0.4 s."""
    max_num_seqs: int = 256
    """The most requests of a step of Reserve's."""


PARTS: Mapping[str, PrefillPart] = MappingProxyType(
    {
        "h200": PrefillPart(
            title="NVIDIA H200 141 GB, prefill instances",
            gpu="h200",
            model="Qwen2.5-14B",
            dataset="lmsys-chat-1m",
            clients=16,
            num_turns=3000,
            slo_s=0.4,
            most_instances=64,
        ),
        # A step of the tiny decoder takes some 4 ms up to about 50 tokens: a quarter of the tokens at which a card's floor ends,
        # and a fifth of the time. Lengths and times are scaled by that, so that the workload meets both at the same place.
        "cpu-tiny": PrefillPart(
            title="this CPU, tiny Qwen2-like decoder",
            gpu=None,
            model="tiny",
            dataset="lmsys-chat-1m",
            clients=4,
            num_turns=300,
            slo_s=0.08,
            most_instances=1,
            length_scale=0.25,
            most_tokens=4096,
            time_scale=0.2,
            # On a CPU attention runs request by request: a step of 256 would take longer than the objective.
            max_num_seqs=16,
        ),
    }
)
"""By name of the platform: these are other families' platforms, whose runs do not rest on what is said here."""
