"""The clock: a heap of events, each a time, a handler and its arguments. No threads, no wall clock.

Events of the same time run in the order they were scheduled, so a run is the same every time. An
event is never taken back: its handler compares a version it was given with the current one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Handler = Callable[..., None]


class EventLoop:
    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self.is_stopped = False
        self._heap: list[tuple[float, int, Handler, tuple[Any, ...]]] = []
        self._order = 0

    def at(self, time_s: float, handler: Handler, *args: Any) -> None:
        self._order += 1
        heappush(self._heap, (time_s, self._order, handler, args))

    def stop(self) -> None:
        """Leave what is still scheduled."""
        self.is_stopped = True

    def run(self, until_s: float = math.inf) -> None:
        """Handle events until none is left, one stops the loop, or the next lies behind ``until_s``."""
        heap = self._heap
        while heap and not self.is_stopped:
            if heap[0][0] > until_s:
                self.now = until_s
                return
            self.now, _, handler, args = heappop(heap)
            self.num_events += 1
            handler(*args)
