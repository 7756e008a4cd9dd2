"""Sessions whose K/V a decode worker holds: held while they decode or are lent, idle between rounds.

Two threads use it at once, the one that steps and the one that lends, hence the lock.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from engines.ampd.live.kv import bytes_per_token
from engines.ar.torch.executor import TorchExecutor
from engines.ar.torch.memory import SessionMemory
from engines.runtime.rows import Ints


@dataclass(slots=True, eq=False, kw_only=True)
class Resident:
    session_id: int
    order: int
    """Rank by arrival; the lower is the older."""
    epoch: str
    slot: int = -1
    computed: int = 0
    """Tokens whose K/V is in the pool."""
    context: int = 0
    """Tokens so far, the newest included, whose K/V is not there yet."""
    token_s: float = 0.0
    """When its newest token came."""
    landed: tuple[int, str] | None = None
    """Task and fence of the prefill that came last."""
    is_idle: bool = False
    is_lent: bool = False
    """A prefill worker reads it, perhaps before this worker has heard that the round is over."""


class Residents:
    def __init__(self, executor: TorchExecutor) -> None:
        self.executor = executor
        self.memory = SessionMemory(executor.tables)
        self.kv_bytes = bytes_per_token(executor)
        self.kv_peak = 0
        self._by_session: dict[int, Resident] = {}
        self._by_order: dict[int, Resident] = {}
        self._lock = threading.RLock()

    @property
    def kv_tokens(self) -> int:
        """Tokens that blocks in use can hold, idle prefixes included."""
        tables = self.executor.tables
        return (tables.num_blocks - tables.num_free) * tables.block_size

    @property
    def evicted(self) -> int:
        """Tokens of idle prefixes given up."""
        return self.memory.evicted * self.executor.tables.block_size

    def known(self, session_id: int, epoch: str, order: int) -> Resident:
        """The session, as one without K/V where it was not here under this epoch."""
        with self._lock:
            found = self._by_session.get(session_id)
            if found is not None and found.epoch != epoch:
                self.drop(found)
                found = None
            if found is None:
                found = Resident(session_id=session_id, order=order, epoch=epoch)
                self._by_session[session_id] = self._by_order[order] = found
            return found

    def held(self) -> list[Resident]:
        with self._lock:
            return list(self._by_session.values())

    def is_known(self, resident: Resident) -> bool:
        return self._by_session.get(resident.session_id) is resident

    def lend(self, session_id: int, epoch: str, tokens: int) -> tuple[Resident | None, int]:
        """Hold the session's K/V for a prefill elsewhere; how many of its first ``tokens`` are left."""
        with self._lock:
            found = self._by_session.get(session_id)
            if found is None or found.epoch != epoch or found.slot < 0:
                return None, 0
            found.is_lent = True
            return found, min(self.resume(found), tokens)

    def resume(self, resident: Resident) -> int:
        """Its K/V is held again; how many tokens are left of it."""
        with self._lock:
            if resident.is_idle:
                resident.is_idle = False
                resident.computed = min(resident.computed, self.memory.resume(resident.order))
            return resident.computed

    def park(self, resident: Resident) -> None:
        """Between rounds."""
        with self._lock:
            if resident.is_lent:
                return
            self.memory.park(resident.order, resident.slot, resident.computed)
            resident.is_idle = True

    def place(self, resident: Resident, tokens: int) -> bool:
        """A slot for it, and room for so many tokens; False where idle sessions do not make enough."""
        with self._lock:
            self.resume(resident)
            resident.is_lent = False
            if resident.slot < 0:
                if not self.executor.tables.num_free_slots:
                    oldest = self.memory.oldest_idle()
                    if oldest is None:
                        return False
                    self.forget(self._by_order[oldest])
                resident.slot = self.executor.open()
            return self.grow(np.array([resident.slot]), np.array([tokens]))

    def grow(self, slots: Ints, lengths: Ints) -> bool:
        with self._lock:
            is_there = self.memory.grow(slots, lengths)
            self.kv_peak = max(self.kv_peak, self.kv_tokens)
            return is_there

    def forget(self, resident: Resident) -> None:
        """Its K/V goes; the session stays."""
        with self._lock:
            self.memory.drop(resident.order)
            if resident.slot >= 0:
                self.executor.close_slot(resident.slot)
            resident.slot, resident.computed, resident.is_idle, resident.is_lent = -1, 0, False, False

    def drop(self, resident: Resident) -> None:
        """The session leaves; where it has left already it may be back, under another epoch, and stays."""
        with self._lock:
            if self.is_known(resident):
                self.forget(resident)
                del self._by_session[resident.session_id], self._by_order[resident.order]

    def clear(self) -> None:
        with self._lock:
            for resident in self.held():
                self.drop(resident)
