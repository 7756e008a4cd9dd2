"""K/V memory of a worker: what running sequences hold, and the prefix cache of sessions in their environment.

Counted in tokens. A session's K/V is *held* (running, or read by a prefill elsewhere) or *idle*; idle
K/V is evicted when room is needed, the least recently used session first and from its tail, so what
is left of it is still a prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
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
