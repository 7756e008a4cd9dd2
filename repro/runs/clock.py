"""Time for a driver: the wall's, or a virtual one that moves only when told."""

from __future__ import annotations

import math
import time
from typing import Protocol

from repro.runs.record import Obtained


class Clock(Protocol):
    """Seconds since ``start``. ``obtained`` is how times read from this clock came about."""

    @property
    def obtained(self) -> Obtained: ...

    def start(self) -> None:
        """Makes this moment zero."""

    def now(self) -> float: ...

    def advance(self, duration_s: float) -> None:
        """Charges work that was not waited for; nothing on the wall, where it has passed already."""

    def sleep_until(self, time_s: float) -> None:
        """Returns with ``now() >= time_s``, at once if that holds already."""


class WallClock:
    obtained: Obtained = "measured"

    def __init__(self) -> None:
        self._zero = time.perf_counter()

    def start(self) -> None:
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    def advance(self, duration_s: float) -> None:
        return None

    def sleep_until(self, time_s: float) -> None:
        while (left := time_s - self.now()) > 0:
            time.sleep(left)


class VirtualClock:
    obtained: Obtained = "simulated"
    _now = 0.0

    def start(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, duration_s: float) -> None:
        if not math.isfinite(duration_s) or duration_s < 0:
            raise ValueError(f"a step took {duration_s} s: a duration is finite and not negative")
        self._now += duration_s

    def sleep_until(self, time_s: float) -> None:
        self._now = max(self._now, time_s)
