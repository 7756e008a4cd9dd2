"""Which decode worker a session belongs to, for life (AMPD §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engines.policies.views import DecodeView


class Binder(Protocol):
    def bind(self, decodes: Sequence[DecodeView], now: float) -> int:
        """Id of the decode worker a new session belongs to, for life."""
        ...


@dataclass(frozen=True, kw_only=True)
class LeastKvMemory:
    """Least K/V in use; ties by fewest sessions, then by id (AMPD §3, binding)."""

    def bind(self, decodes: Sequence[DecodeView], now: float) -> int:
        return min(decodes, key=lambda worker: (worker.kv_tokens, worker.num_sessions, worker.worker_id)).worker_id


@dataclass(kw_only=True)
class RoundRobin:
    """Workers in turn."""

    turn: int = field(default=0, init=False)

    def bind(self, decodes: Sequence[DecodeView], now: float) -> int:
        self.turn += 1
        return decodes[(self.turn - 1) % len(decodes)].worker_id


@dataclass(frozen=True, kw_only=True)
class FewestSessions:
    """Fewest sessions bound; ties by least K/V, then by id."""

    def bind(self, decodes: Sequence[DecodeView], now: float) -> int:
        return min(decodes, key=lambda worker: (worker.num_sessions, worker.kv_tokens, worker.worker_id)).worker_id
