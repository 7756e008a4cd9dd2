"""LAPS's two queues by length class (§3.2)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain

from engines.errors import require
from engines.laps.graphs import LENGTHS
from engines.policies.queue import OpenQueue
from engines.policies.task import PrefillTask

_RATE_WEIGHT = 0.1
"""Weight of the newest gap between arrivals in their moving average."""


class ClassQueue(OpenQueue):
    """Q_s and Q_l: requests under ``boundary`` tokens are short, and kept by their bucket of length."""

    def __init__(self, boundary: int) -> None:
        super().__init__()
        require(boundary >= 1, f"boundary={boundary} must be at least 1 token")
        self.boundary = boundary
        self.longs: dict[int, PrefillTask] = {}
        self.buckets: list[dict[int, PrefillTask]] = [{} for _ in range(len(LENGTHS) + 1)]
        """Short requests by the bucket length that covers them; the last holds what no bucket does."""
        self.num_short = 0
        self.short_tokens = 0
        self._last_short_s: float | None = None
        self._gap_s: float | None = None

    def __len__(self) -> int:
        return self.num_short + len(self.longs)

    def __iter__(self) -> Iterator[PrefillTask]:
        """In order of arrival."""
        return iter(sorted(chain(self.longs.values(), *(bucket.values() for bucket in self.buckets)), key=_age))

    def push(self, task: PrefillTask) -> None:
        if task.tokens < self.boundary:
            self.buckets[bisect_left(LENGTHS, task.tokens)][task.task_id] = task
            self.num_short += 1
            self.short_tokens += task.tokens
            if self._last_short_s is not None:
                gap_s = max(0.0, task.ready_s - self._last_short_s)
                old = gap_s if self._gap_s is None else self._gap_s
                self._gap_s = old + _RATE_WEIGHT * (gap_s - old)
            self._last_short_s = task.ready_s
        else:
            self.longs[task.task_id] = task
        self._count(task)

    def peek(self, now: float) -> PrefillTask:
        oldest = [next(iter(group.values())) for group in (self.longs, *self.buckets) if group]
        return min(oldest, key=_age)

    def pull(self, task: PrefillTask) -> PrefillTask:
        if task.tokens < self.boundary:
            del self.buckets[bisect_left(LENGTHS, task.tokens)][task.task_id]
            self.num_short -= 1
            self.short_tokens -= task.tokens
        else:
            del self.longs[task.task_id]
        return self._taken(task)

    @property
    def short_rate(self) -> float:
        """r_s: short arrivals per second, one over the moving average of their gaps; 0 before the second."""
        return 0.0 if self._gap_s is None else 1 / max(self._gap_s, 1e-9)

    def oldest_short(self) -> PrefillTask | None:
        return min((next(iter(bucket.values())) for bucket in self.buckets if bucket), key=_age, default=None)

    def shorts_by_bucket(self) -> Iterator[PrefillTask]:
        """The oldest one's bucket first, then shorter ones (no more padding), then longer ones; oldest first in each."""
        oldest = self.oldest_short()
        if oldest is None:
            return iter(())
        home = bisect_left(LENGTHS, oldest.tokens)
        order = [*range(home, -1, -1), *range(home + 1, len(self.buckets))]
        return chain.from_iterable(self.buckets[index].values() for index in order)


def _age(task: PrefillTask) -> tuple[float, int]:
    return task.ready_s, task.task_id
