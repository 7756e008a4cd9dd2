"""The instance-pressure controller of spatial disaggregation (LAPS §3.2, Algorithm 2).

Printed, utilisation lowers a pressure (psi = alpha q + beta e - gamma u), so calm pools have negative pressures, and
with P < 0 the test P_s > (1 + tau) P_l holds for both pools at once: the hysteresis inverts and an instance moves at
every cool-down. ``mended`` adds gamma u instead, which keeps psi >= 0.

Near capacity that is not enough: a pool's pressure over one interval is then mostly the noise of its queue, which takes longer
than T_cool to pass, and every move overloads the pool that gave. So ``mended`` compares pressures averaged over ``window_s``,
begins the average anew after a move, and makes none that would leave the pool that gave the more pressed of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from engines.knobs import Checked, Count, Range, Seconds
from engines.policies.instances import LengthClass

Form = Literal["printed", "mended"]
_Weight = Annotated[float, Range(0, 1e6)]


class Signals(NamedTuple):
    """What an instance reports at a control interval."""

    backlog_s: float
    """q: predicted time of the work queued for it."""
    violations: float
    """e: share of the requests it finished in the interval that missed their deadline."""
    utilisation: float
    """u: busy share of the interval."""


@dataclass(frozen=True, kw_only=True)
class ControllerConfig(Checked):
    """The paper prints no values."""

    form: Form = "mended"
    period_s: Annotated[float, Range(above=0, most=1e6)] = 1.0
    """Delta t."""
    cooldown_s: Seconds = 5.0
    """T_cool."""
    tau: _Weight = 1.0
    """Hysteresis."""
    n_min: Count = 1
    """Instances that a pool keeps."""
    alpha: _Weight = 1.0
    beta: _Weight = 1.0
    gamma: _Weight = 0.5
    quantile: Annotated[float, Range(0, 1)] = 0.9
    """The aggregate over a pool: P90."""
    window_s: Seconds = 10.0
    """Length of the averages that ``mended`` compares; 0 compares what each interval shows."""


class Adjustment(NamedTuple):
    grows: LengthClass | None
    """The pool that gets an instance of the other; None: none moves."""
    short_pressure: float
    long_pressure: float


class PressureController:
    def __init__(self, config: ControllerConfig) -> None:
        self.config = config
        self._last_s = -math.inf
        """Time of the last move."""
        self._short, self._long = _Average(config), _Average(config)

    def decide(self, shorts: Sequence[Signals], longs: Sequence[Signals], now: float) -> Adjustment:
        """One pass of the loop: the signals of either pool's instances at ``now``."""
        config = self.config
        is_whole = self._short.add(self.pressure(shorts)) & self._long.add(self.pressure(longs))
        short, long = self._short.value, self._long.value
        if now - self._last_s < config.cooldown_s or not is_whole:
            return Adjustment(None, short, long)
        grows: LengthClass | None = None
        if self._is_due(short, len(shorts), long, len(longs)):
            grows = "short"
        elif self._is_due(long, len(longs), short, len(shorts)):
            grows = "long"
        if grows is not None:
            self._last_s = now
            self._short, self._long = _Average(config), _Average(config)
        return Adjustment(grows, short, long)

    def _is_due(self, high: float, num_high: int, low: float, num_low: int) -> bool:
        """Whether a pool of pressure ``high`` gets an instance of the other's."""
        config = self.config
        if not (high > (1 + config.tau) * low and num_low > config.n_min):
            return False
        # As pressures are shared out over one instance more and one fewer.
        return config.form == "printed" or high * num_high / (num_high + 1) >= low * num_low / (num_low - 1)

    def pressure(self, pool: Sequence[Signals]) -> float:
        config = self.config
        gamma = -config.gamma if config.form == "printed" else config.gamma
        each = [config.alpha * q + config.beta * e + gamma * u for q, e, u in pool]
        return _quantile(each, config.quantile)


class _Average:
    """Exponential, over ``window_s``; whole once it spans that. The mean of what there is until then."""

    def __init__(self, config: ControllerConfig) -> None:
        self.value = 0.0
        window_s = config.window_s if config.form == "mended" else 0.0
        self._weight = config.period_s / window_s if window_s > 0 else 1.0
        self._count = 0

    def add(self, value: float) -> bool:
        """A period's; whether it is whole."""
        self._count += 1
        weight = max(1 / self._count, min(1.0, self._weight))
        self.value += weight * (value - self.value)
        return self._weight * self._count >= 1


def _quantile(values: list[float], quantile: float) -> float:
    """Linear between order statistics, numpy's default; numpy itself takes longer than all else here."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * quantile
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
