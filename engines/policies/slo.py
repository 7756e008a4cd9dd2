"""What a service is held to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engines.errors import require


@dataclass(frozen=True, kw_only=True)
class Slo:
    ttft_s: float
    itl_s: float

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            value = getattr(self, name)
            require(value > 0 and math.isfinite(value), f"{name}={value}: an objective is a positive number of seconds")
