"""The time an engine lives in: that of the wall, the same without the waiting, or a cost model's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from engines.ar.cost import StepCost
from engines.policies.step import Chunk


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the run began."""
        ...

    def wait_until(self, time_s: float) -> None: ...

    def charge(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object) -> None:
        """The step has been run: a clock that does not go by itself is put forward by what it costs."""
        ...


class WallClock:
    """``skips_idle`` leaves waiting times out: whatever the engine does is measured, the time it would sleep is added
    at once. Latencies are those of the wall, the run is as short as its work."""

    def __init__(self, *, skips_idle: bool = False) -> None:
        self._skips_idle = skips_idle
        self._began = time.perf_counter()
        self._skipped = 0.0

    def now(self) -> float:
        return time.perf_counter() - self._began + self._skipped

    def wait_until(self, time_s: float) -> None:
        left = time_s - self.now()
        if left <= 0:
            return
        if self._skips_idle:
            self._skipped += left
        else:
            time.sleep(left)

    def charge(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object) -> None:
        return


class CostClock:
    """A step takes what ``cost`` says, everything else no time."""

    def __init__(self, cost: StepCost) -> None:
        self._cost, self._now = cost, 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, time_s: float) -> None:
        self._now = max(self._now, time_s)

    def charge(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object) -> None:
        if chunks:
            self._now += self._cost.step_s(chunks, decoding, context, mode)
        else:
            base, slope, floor = self._cost.decode_line(decoding)
            self._now += max(base + slope * context, floor)
