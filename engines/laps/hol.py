"""Waiting of short and long prefills in one queue: Pollaczek-Khinchine and the head-of-line penalty (LAPS §2.2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engines.errors import require

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class TwoClasses:
    """An M/G/1 queue of two constant service times, first come, first served."""

    rate: float
    """lambda, of both classes together."""
    short_share: float
    """p."""
    short_s: float
    """S_s."""
    long_s: float
    """S_l."""

    def __post_init__(self) -> None:
        require(self.rate > 0, f"rate={self.rate} must be above 0")
        require(0 <= self.short_share <= 1, f"short_share={self.short_share} must be in [0, 1]")
        require(0 < self.short_s <= self.long_s, f"short_s={self.short_s} must be above 0 and at most {self.long_s}")
        require(self.load < 1, f"load={self.load:.3g} must be below 1: lower the rate")

    @property
    def mean_s(self) -> float:
        return self.short_share * self.short_s + (1 - self.short_share) * self.long_s

    @property
    def load(self) -> float:
        """rho."""
        return self.rate * self.mean_s

    @property
    def wait_s(self) -> float:
        """W = lambda E[S^2] / (2 (1 - rho)), of either class."""
        variance = self.short_share * (1 - self.short_share) * (self.long_s - self.short_s) ** 2
        # Pollaczek and Khinchine's, for service times of any variance.
        return self.rate * (variance + self.mean_s**2) / (2 * (1 - self.load))

    @property
    def hol_penalty_s(self) -> float:
        """lambda p (1 - p) (S_l - S_s)^2 / (2 (1 - rho)): what differing lengths add to every wait."""
        return (
            self.rate
            * self.short_share
            * (1 - self.short_share)
            * (self.long_s - self.short_s) ** 2
            / (2 * (1 - self.load))
        )

    def drawn(self, num: int, seed: int) -> tuple[Floats, Floats]:
        """[num] gaps between Poisson arrivals, the first before the first job, and service times."""
        rng = np.random.default_rng(seed)
        service_s = np.where(rng.random(num) < self.short_share, self.short_s, self.long_s)
        return rng.exponential(1 / self.rate, num), service_s


def waits_s(gaps_s: Floats, service_s: Floats) -> Floats:
    """Wait of each job, first come, first served, one at a time: W' = max(0, W + S - A) (Lindley), the walk above its running
    minimum."""
    walk = np.concatenate([[0.0], np.cumsum(service_s[:-1] - gaps_s[1:])])
    return walk - np.minimum.accumulate(walk)
