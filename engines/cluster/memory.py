"""What a worker remembers: K/V of sessions, and means over the last seconds.

K/V is counted in tokens. A session's K/V is *held* (running, or read by a prefill elsewhere) or *idle*, the prefix cache of sessions
in their environment. Idle K/V is evicted when room is needed, the least recently used session first and from its tail, so what is
left of it is still a prefix.

Means are over a window (AMPD §3: 10 s by default). An empty window counts as 0: no evidence of load, hence full slack.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class _Idle(NamedTuple):
    tokens: int
    keep_until_s: float


@dataclass(slots=True, eq=False)
class KvPool:
    capacity: int
    held: int = 0
    idle: int = 0
    peak: int = 0
    evicted: int = 0
    """Tokens evicted so far."""
    _idle: OrderedDict[int, _Idle] = field(default_factory=OrderedDict)
    _last_keep_s: float = 0.0
    """Nothing is protected from then on."""

    @property
    def free(self) -> int:
        return self.capacity - self.held - self.idle

    def evictable(self, now: float) -> int:
        """Idle tokens that no time-to-live protects."""
        if now >= self._last_keep_s:
            return self.idle
        return self.idle - sum(entry.tokens for entry in self._idle.values() if entry.keep_until_s > now)

    def cached(self, session: int) -> int:
        entry = self._idle.get(session)
        return entry.tokens if entry is not None else 0

    def protected(self, session: int, now: float) -> int:
        """How many of its cached tokens a time-to-live protects."""
        entry = self._idle.get(session)
        return entry.tokens if entry is not None and entry.keep_until_s > now else 0

    def hold(self, tokens: int) -> None:
        """Take free tokens; the caller has made room."""
        self.held += tokens
        used = self.held + self.idle
        if used > self.peak:
            self.peak = used

    def release(self, tokens: int) -> None:
        self.held -= tokens

    def park(self, session: int, tokens: int, keep_until_s: float = 0.0) -> None:
        """Held tokens become the session's idle prefix, protected until ``keep_until_s``."""
        self.held -= tokens
        self.idle += tokens
        self._idle[session] = _Idle(tokens, keep_until_s)
        self._last_keep_s = max(self._last_keep_s, keep_until_s)

    def resume(self, session: int) -> int:
        """The session's idle prefix is held again; how many tokens are left of it."""
        entry = self._idle.pop(session, None)
        if entry is None:
            return 0
        self.idle -= entry.tokens
        self.held += entry.tokens
        return entry.tokens

    def make_room(self, tokens: int, now: float, *, force: bool = False) -> bool:
        """Evict until ``tokens`` are free; whether they are. ``force`` takes protected prefixes too, last."""
        missing = tokens - self.free
        if missing > 0:
            missing = self._evict(missing, lambda entry: entry.keep_until_s <= now)
        if missing > 0 and force:
            missing = self._evict(missing, lambda entry: True)
        return missing <= 0

    def _evict(self, tokens: int, may_go: Callable[[_Idle], bool]) -> int:
        """How many of them are still missing."""
        for session in list(self._idle):
            if tokens <= 0:
                break
            entry = self._idle[session]
            if not may_go(entry):
                continue
            taken = min(tokens, entry.tokens)
            if taken == entry.tokens:
                del self._idle[session]
            else:
                self._idle[session] = entry._replace(tokens=entry.tokens - taken)
            self.idle -= taken
            self.evicted += taken
            tokens -= taken
        return tokens


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
