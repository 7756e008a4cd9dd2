"""What runs say about a paper's claims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Obtained = Literal["measured", "simulated", "computed"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim answered. ``value`` is in the claim's unit, several where the claim states several;
    ``how`` names platform, reading and runs in one sentence."""

    claim: str
    value: float | tuple[float, ...]
    obtained: Obtained
    how: str
