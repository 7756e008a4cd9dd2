"""Windowed statistics of a worker: means over the last seconds (AMPD §3: 10 s by default).

An empty window counts as 0: no evidence of load, hence full slack.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

WINDOW_S = 10.0


@dataclass(slots=True, eq=False)
class Window:
    """Mean of values, each at a time; for TTFT."""

    length_s: float = WINDOW_S
    _entries: deque[tuple[float, float]] = field(default_factory=deque)
    _total: float = 0.0

    def add(self, now: float, value: float) -> None:
        self._entries.append((now, value))
        self._total += value

    def mean(self, now: float) -> float:
        entries = self._entries
        oldest = now - self.length_s
        while entries and entries[0][0] <= oldest:
            self._total -= entries.popleft()[1]
        if not entries:
            self._total = 0.0  # sheds the rounding of the sums before
            return 0.0
        return self._total / len(entries)


class TokenRun(NamedTuple):
    """Steps of a decode batch that end at start + 1..steps periods, ``tokens`` tokens each."""

    start_s: float
    period_s: float
    steps: int
    tokens: int
    gap_s: float
    """Mean gap of these tokens to the ones before them."""

    def tokens_after(self, oldest: float) -> int:
        if self.start_s >= oldest:
            return self.steps * self.tokens
        return max(0, self.steps - math.floor((oldest - self.start_s) / self.period_s)) * self.tokens


@dataclass(slots=True, eq=False)
class TokenWindow:
    """Mean gap between tokens; for ITL. Runs follow each other, so only the first can lie partly outside."""

    length_s: float = WINDOW_S
    _runs: deque[TokenRun] = field(default_factory=deque)
    _new: list[TokenRun] = field(default_factory=list)
    """Those that no mean has counted: most policies never ask for one."""
    _total: float = 0.0
    _count: int = 0

    def extend(self, runs: Sequence[TokenRun]) -> None:
        self._new.extend(runs)

    def mean(self, now: float, current: Sequence[TokenRun] = ()) -> float:
        """``current`` holds the steps of a run in progress that have ended by ``now``."""
        runs = self._runs
        for run in self._new:
            tokens = run.steps * run.tokens
            self._total += tokens * run.gap_s
            self._count += tokens
        runs.extend(self._new)
        self._new.clear()
        oldest = now - self.length_s
        while runs and runs[0].start_s + runs[0].steps * runs[0].period_s <= oldest:
            expired = runs.popleft()
            tokens = expired.steps * expired.tokens
            self._total -= tokens * expired.gap_s
            self._count -= tokens
        if not runs:
            self._total = 0.0  # sheds the rounding of the sums before
        total, count = self._total, self._count
        if runs:
            outside = runs[0].steps * runs[0].tokens - runs[0].tokens_after(oldest)
            total -= outside * runs[0].gap_s
            count -= outside
        for run in current:
            inside = run.tokens_after(oldest)
            total += inside * run.gap_s
            count += inside
        return total / count if count else 0.0
