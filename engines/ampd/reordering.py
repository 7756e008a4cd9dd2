"""Prefill reordering: which of the first tasks of a queue runs next (AMPD §4.2, Algorithm 2, eqs. 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, permutations

from engines.errors import require
from engines.policies.queue import PrefillQueue
from engines.policies.task import PrefillTask

MAX_LOOKAHEAD = 8
"""8! = 40,320 orderings; the paper uses 2 to 5."""


def best_ordering(window: Sequence[PrefillTask], now: float, ttft_s: float, w: int) -> tuple[int, ...]:
    """pi*: positions of ``window`` in the order to run, lines 2-6.

    An ordering that postpones a task which was postponed ``w`` times already is skipped (line 4): in it, the task
    stands later than in the queue. Ties keep the earlier ordering, so the queue's own unless another gains.
    ``now`` is when the first of them can start.
    """
    identity = tuple(range(len(window)))
    if len(window) < 2:
        return identity
    best, best_count = identity, _satisfied(window, identity, now, ttft_s)
    if best_count == len(window):
        return identity
    for ordering in islice(permutations(identity), 1, None):
        if any(place > task and window[task].postponed >= w for place, task in enumerate(ordering)):
            continue
        count = _satisfied(window, ordering, now, ttft_s)
        if count > best_count:
            best, best_count = ordering, count
    return best


def _satisfied(window: Sequence[PrefillTask], ordering: Sequence[int], now: float, ttft_s: float) -> int:
    """S_pi, eq. (4), by completion times C, eq. (3)."""
    completion_s = 0.0
    count = 0
    for position in ordering:
        task = window[position]
        completion_s += task.estimate_s
        count += (now - task.enqueued_s) + completion_s <= ttft_s
    return count


class ReorderingQueue(PrefillQueue):
    def __init__(self, *, ttft_s: float, w: int = 3) -> None:
        super().__init__()
        require(1 <= w <= MAX_LOOKAHEAD, f"w={w} must be between 1 and {MAX_LOOKAHEAD}: all orderings of w are tried")
        self.ttft_s, self.w = ttft_s, w
        self._peeked: tuple[float, list[PrefillTask], tuple[int, ...]] | None = None

    def push(self, task: PrefillTask) -> None:
        self._peeked = None
        super().push(task)

    def peek(self, now: float) -> PrefillTask:
        _, window, ordering = self._peeked = self._chosen(now)
        return window[ordering[0]]

    def take(self, now: float) -> PrefillTask:
        """Algorithm 2: the head of the queue takes the chosen order and its first task leaves."""
        _, window, ordering = self._chosen(now)
        self._peeked = None
        for place, task in enumerate(ordering):
            window[task].postponed += place > task  # line 7
        for place, task in enumerate(ordering):  # line 8
            self._tasks[place] = window[task]
        return super().take(now)

    def _chosen(self, now: float) -> tuple[float, list[PrefillTask], tuple[int, ...]]:
        """The window and its best ordering, not searched again where ``peek`` just did."""
        if self._peeked is not None and self._peeked[0] == now:
            return self._peeked
        window = list(islice(self._tasks, self.w))  # line 1
        return now, window, best_ordering(window, now, self.ttft_s, self.w)
