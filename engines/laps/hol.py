"""Waiting of short and long prefills in one queue: Pollaczek-Khinchine and the head-of-line penalty (LAPS §2.2)."""

from __future__ import annotations

from dataclasses import dataclass

from engines.ar.queueing import pollaczek_khinchine_s
from engines.errors import require


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
        return pollaczek_khinchine_s(self.rate, self.mean_s, variance / self.mean_s**2)

    @property
    def uniform_wait_s(self) -> float:
        """The wait if every request took the mean time: M/D/1 at the same load."""
        return pollaczek_khinchine_s(self.rate, self.mean_s, 0.0)

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

    def slowdown(self, service_s: float) -> float:
        """R / S = 1 + W / S, larger for the shorter job (the convoy effect)."""
        return 1 + self.wait_s / service_s

    @property
    def priority_waits_s(self) -> tuple[float, float]:
        """Mean waits of short and long where short ones go first, without preemption (Cobham)."""
        residual_s = self.rate * (self.short_share * self.short_s**2 + (1 - self.short_share) * self.long_s**2) / 2
        short_load = self.rate * self.short_share * self.short_s
        short_wait_s = residual_s / (1 - short_load)
        return short_wait_s, short_wait_s / (1 - self.load)
