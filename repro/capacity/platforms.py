"""Cards by their names, as many as are asked for: what AMPD's clusters serve by default, on servers of eight of any card whose kernels
are known."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from repro.families.platforms import ArPart, Platform, platform

MOST_GPUS = 4096


def _of(card: str) -> Platform:
    cluster = platform("h20x32").with_part(ArPart, num_gpus=MOST_GPUS)
    return replace(cluster, name=card, title=f"servers of 8 NVIDIA {card.upper()}", gpu=card)


H20, H100, H200 = _of("h20"), _of("h100"), _of("h200")
A100, B200, L40S = _of("a100"), _of("b200"), _of("l40s")
BY_CARD: Mapping[str, str] = MappingProxyType(
    {name.lower(): f"{__name__}:{name}" for name in ("H20", "H100", "H200", "A100", "B200", "L40S")}
)
"""The platform of each, as a cell names it."""
