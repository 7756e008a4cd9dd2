"""A ``StepCost`` that runs every step on a torch worker and says how long it took.

It gives the simulated cluster measured steps on a virtual clock: queues, routers and records are those of the simulator,
the seconds are the device's. It also is what a policy's step model is fitted on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter, process_time

import numpy as np
import torch

from engines.ar.torch.executor import TorchExecutor
from engines.ar.torch.rows import StepWork
from engines.cost.roofline import DecodeLine
from engines.errors import require
from engines.policies.views import Chunk

CPU_TIME = process_time


class MeasuredSteps:
    """Each call runs the step ``repeats`` times and takes the shortest, after ``warmup`` runs that do not count.

    ``timer`` is a clock in seconds: the wall's, or on a CPU with one thread the process's own (``CPU_TIME``), which others
    on the machine do not lengthen.

    Sequences are anonymous: their history is whatever the pool holds, as K/V that came from a decode worker, which
    speed does not depend on. ``context`` tokens of decoding sequences are dealt evenly.
    """

    def __init__(
        self, executor: TorchExecutor, *, repeats: int = 1, warmup: int = 0, timer: Callable[[], float] = perf_counter
    ) -> None:
        require(repeats >= 1, f"repeats={repeats} must be at least 1")
        is_alone = executor.device.type == "cpu" and torch.get_num_threads() == 1
        require(
            timer is not CPU_TIME or is_alone, "CPU time is the time of a step on a CPU with one thread: use the wall's"
        )
        self.executor = executor
        self._timer = timer
        self.repeats, self.warmup = repeats, warmup
        self.num_steps = 0
        self.total_s = 0.0
        """Time of all measured runs."""

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        return min(self.times_s(chunks, decoding, context, mode))

    def times_s(self, chunks: Sequence[Chunk], decoding: int = 0, context: int = 0, mode: object = None) -> list[float]:
        """Seconds of every repeat."""
        parts = [*chunks, *((history, 1) for history in dealt(context, decoding))]
        return self.timed(parts, mode)

    def decode_line(self, decoding: int) -> DecodeLine:
        """From steps at two contexts, a short and a long one."""
        short, long = decoding, decoding * (self.executor.tables.max_len - 1)
        at_short, at_long = (self.step_s([], decoding, context) for context in (short, long))
        slope = max(at_long - at_short, 0.0) / max(long - short, 1)
        return DecodeLine(max(at_short - slope * short, 0.0), slope, 0.0)

    def timed(self, parts: Sequence[tuple[int, int]], mode: object = None) -> list[float]:
        """A step over (history, tokens) of each sequence."""
        executor, tables = self.executor, self.executor.tables
        slots = [executor.open() for _ in parts]
        try:
            starts, counts = np.array(parts, dtype=np.int64).reshape(-1, 2).T
            tables.grow(np.array(slots), starts + counts)
            work = StepWork(np.array(slots), starts, counts, np.ones(len(parts), dtype=bool))
            for _ in range(self.warmup):
                executor.run(work, mode)
            executor.wait()
            return [self._once(lambda: executor.run(work, mode)) for _ in range(self.repeats)]
        finally:
            for slot in slots:
                executor.close_slot(slot)

    def _once(self, run: Callable[[], object]) -> float:
        began = self._timer()
        run()
        self.executor.wait()
        took = self._timer() - began
        self.num_steps += 1
        self.total_s += took
        return took


def dealt(context: int, decoding: int) -> list[int]:
    """History of each of ``decoding`` sequences of ``context`` tokens in all, the newest left out."""
    if decoding == 0:
        return []
    return [
        max(math.floor(context * (i + 1) / decoding) - math.floor(context * i / decoding) - 1, 0)
        for i in range(decoding)
    ]
