"""Shares of right answers: their interval, and whether two runs on the same problems differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def wilson_interval(successes: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson score interval of a proportion, 95 % by default; undefined for n = 0."""
    share = successes / n
    centre = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


@dataclass(frozen=True, kw_only=True)
class Discordance:
    """Problems that exactly one of two runs solves."""

    n: int
    only_first: int
    only_second: int

    @property
    def p_value(self) -> float:
        """McNemar's exact test, two-sided: each discordant problem is a fair coin under the null hypothesis."""
        discordant, fewer = self.only_first + self.only_second, min(self.only_first, self.only_second)
        tail = sum(math.comb(discordant, k) for k in range(fewer + 1))
        return min(1.0, 2 * tail / 2**discordant)


def discordance(first: Sequence[bool], second: Sequence[bool]) -> Discordance:
    """Of two runs over the same problems, in the same order."""
    pairs = list(zip(first, second, strict=True))
    return Discordance(
        n=len(pairs), only_first=sum(a and not b for a, b in pairs), only_second=sum(b and not a for a, b in pairs)
    )
