"""A sitting of measured runs: they share a machine, minutes and an id, and each says how busy the machine was besides."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import numpy.typing as npt

MIN_CPU_SHARE = 0.9
"""Processor seconds per second of steps below which a run on a CPU was kept waiting. A step never sleeps, so a free machine
gives it at least one; more, where the library computes in several threads, which makes the bound generous."""
MAX_SLOWDOWN = 1.25
"""Seconds of the calibration loop over the fastest of its sitting. Frequency and caches move it by a few percent on a quiet machine; a
neighbour that takes a quarter of a core or more moves it by 25 % and more, which is also where a disturbance outgrows
the differences between systems that the figures are about."""
WARM_UP = 10
"""Loops before the first run: libraries start up, and the sitting learns how fast the machine can be."""
FRESH_S = 0.5
"""A loop that found the machine quiet after a run serves the next run too, if that begins within so many seconds."""

_LOOP_SIZE, _LOOP_REPEATS = 192, 64
_LOOPS, _REST_S = 5, 0.05

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the machine did while a run was measured; seconds."""

    cpu_s: float
    """Processor seconds of this process, all its threads."""
    wall_s: float
    loop_before_s: float
    loop_after_s: float
    best_loop_s: float
    """Seconds of the fastest loop of the sitting so far."""


@dataclass(kw_only=True)
class Sitting:
    """``loop`` times a fixed piece of work; ``cpu`` and ``wall`` are the process's clocks."""

    id: str = field(default_factory=lambda: uuid4().hex[:12])
    loop: Callable[[], float] | None = None
    cpu: Callable[[], float] = time.process_time
    wall: Callable[[], float] = time.perf_counter
    best_s: float = float("inf")
    _last: tuple[float, float] = field(default=(float("-inf"), float("inf")), init=False)
    """When the last loop ended, and what it took."""

    def measure(self, run: Callable[[], T]) -> tuple[T, Load]:
        if self.best_s == float("inf"):
            for _ in range(WARM_UP):
                self._loop()
        ended, before = self._last
        if time.monotonic() - ended > FRESH_S or before > MAX_SLOWDOWN * self.best_s:
            before = self._loop()
        cpu, wall = self.cpu(), self.wall()
        result = run()
        cpu, wall = self.cpu() - cpu, self.wall() - wall
        after = self._loop()
        load = Load(cpu_s=cpu, wall_s=wall, loop_before_s=before, loop_after_s=after, best_loop_s=self.best_s)
        return result, load

    def _loop(self) -> float:
        taken = (self.loop or calibration_loop)()
        self.best_s = min(self.best_s, taken)
        self._last = time.monotonic(), taken
        return taken


def calibration_loop() -> float:
    """Seconds that a fixed number of matrix products takes on all cores, about 10 ms: the least of a few in a row, so that a
    moment's disturbance is none. Before them the threads of a run, which spin for a while after it, come to rest."""
    time.sleep(_REST_S)
    return min(_products() for _ in range(_LOOPS))


def _products() -> float:
    left, right, out = _matrices()
    began = time.perf_counter()
    for _ in range(_LOOP_REPEATS):
        np.matmul(left, right, out=out)
    return time.perf_counter() - began


@cache
def _matrices() -> tuple[npt.NDArray[np.float64], ...]:
    generator = np.random.default_rng(0)
    shape = (_LOOP_SIZE, _LOOP_SIZE)
    return generator.random(shape), generator.random(shape), np.empty(shape)


def contention(load: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Signs that the machine was busy with something else, a clause each, in a stored run's ``load``: the fields of ``Load``,
    and ``busy_s``, the seconds of its steps, where they were computed on the CPU."""
    if load is None:
        return ()
    found = []
    slowest = max(load["loop_before_s"], load["loop_after_s"])
    if slowest > MAX_SLOWDOWN * load["best_loop_s"]:
        found.append(
            f"contended: the calibration loop took {slowest / load['best_loop_s']:.2f} times the sitting's best"
        )
    busy = load.get("busy_s")
    if busy and load["cpu_s"] < MIN_CPU_SHARE * busy:
        found.append(f"contended: {load['cpu_s'] / busy:.2f} processor seconds per second of steps")
    return tuple(found)
