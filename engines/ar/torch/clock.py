"""The time an engine lives in: that of the wall, or a cost model's."""

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
    def __init__(self) -> None:
        self._began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._began

    def wait_until(self, time_s: float) -> None:
        left = time_s - self.now()
        if left > 0:
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
