"""K/V of sessions on block tables: held while a sequence runs, idle between its rounds.

The rules are those of the simulated pool (``engines.ar.kv``), counted in blocks: idle K/V is evicted when room is
needed, the least recently used session first and from its tail, so that what is left is a prefix. With blocks of one token
the two agree to the token.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from engines.ar.torch.blocks import BlockTables, OutOfBlocksError
from engines.runtime.rows import Ints


@dataclass(slots=True)
class _Idle:
    slot: int
    tokens: int


class SessionMemory:
    """Sessions are known by ``order``, their rank by arrival; a session keeps its slot while anything of it is here."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._idle: OrderedDict[int, _Idle] = OrderedDict()
        self.evicted = 0
        """Blocks evicted so far."""

    @property
    def idle_blocks(self) -> int:
        return int(self._tables.held[[entry.slot for entry in self._idle.values()]].sum()) if self._idle else 0

    @property
    def room(self) -> int:
        """Tokens that may be admitted: those of free blocks, and of idle ones."""
        return (self._tables.num_free + self.idle_blocks) * self._tables.block_size

    def need(self, tokens: int) -> int:
        """Tokens of room that a sequence of so many takes: whole blocks."""
        return self._tables.blocks_for(tokens) * self._tables.block_size

    def cached(self, order: int) -> int:
        entry = self._idle.get(order)
        return entry.tokens if entry is not None else 0

    def park(self, order: int, slot: int, tokens: int) -> None:
        """The sequence is between rounds; ``tokens`` of it are worth keeping."""
        self._tables.trim(slot, tokens)
        self._idle[order] = _Idle(slot, tokens)

    def resume(self, order: int) -> int:
        """The session's idle prefix is held again; how many tokens are left of it."""
        entry = self._idle.pop(order, None)
        return 0 if entry is None else entry.tokens

    def drop(self, order: int) -> None:
        self._idle.pop(order, None)

    def oldest_idle(self) -> int | None:
        return next(iter(self._idle), None)

    def grow(self, slots: Ints, lengths: Ints) -> bool:
        """Have room for ``lengths`` tokens in ``slots``, evicting idle K/V for it; False where that is not enough, and
        nothing but the eviction has happened."""
        self._make_room(self._tables.missing(slots, lengths))
        if self._tables.missing(slots, lengths) > self._tables.num_free:
            return False
        self._tables.grow(slots, lengths)
        return True

    def admit(self, slot: int, tokens: int) -> None:
        """``grow`` for a sequence a policy has admitted. OutOfBlocksError where it does not fit: a policy keeps to the
        room it is told of (``Situation``)."""
        if not self.grow(np.array([slot]), np.array([tokens])):
            tables = self._tables
            raise OutOfBlocksError(
                f"the policy admitted a sequence of {tokens} tokens where {tables.num_free} of {tables.num_blocks} blocks of "
                f"{tables.block_size} are free: it must keep to Situation.room"
            )

    def _make_room(self, blocks: int) -> None:
        for order in list(self._idle):
            wanted = blocks - self._tables.num_free
            if wanted <= 0:
                return
            entry = self._idle[order]
            held = int(self._tables.held[entry.slot])
            entry.tokens = min(entry.tokens, max(held - wanted, 0) * self._tables.block_size)
            self.evicted += self._tables.trim(entry.slot, entry.tokens)
            if entry.tokens == 0:
                del self._idle[order]
