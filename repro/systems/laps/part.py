"""What prefill systems run on a platform by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engines.errors import UserError
from repro.systems.platforms import Platform

MODELS = ("Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B")
"""Of LAPS §4."""


@dataclass(frozen=True, kw_only=True)
class PrefillPart:
    """A cell's knobs override these by name."""

    title: str
    gpu: str
    """Catalogue name of the card."""
    model: str
    """A shape by name (engines.models.shape)."""
    dataset: str
    clients: int
    """Of a closed loop, where neither a rate nor a number of clients is given."""
    num_turns: int
    slo_s: float
    """TTFT objective (LAPS §4.1)."""
    most_instances: int


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
        )
    }
)
"""By name of the platform: these are other families' platforms, whose runs do not rest on what is said here."""


def part_of(where: Platform) -> PrefillPart:
    """The platform's own part, or the one of its name here."""
    for part in where.parts:
        if isinstance(part, PrefillPart):
            return part
    if where.name not in PARTS:
        raise UserError(
            f"platform={where.name!r} has no settings for prefill instances: use {', '.join(PARTS)}, or a platform of your own"
        )
    return PARTS[where.name]
