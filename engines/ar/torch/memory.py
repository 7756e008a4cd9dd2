"""K/V of sessions on block tables: held while a sequence runs, idle between its rounds.

The rules are those of the simulated pool (``engines.cluster.worker``), counted in blocks: idle K/V is evicted when room is
needed, the least recently used session first and from its tail, so that what is left is a prefix. With blocks of one token
the two agree to the token.

K/V of sequences that are over is kept besides, for prompts that repeat them: a conversation's next turn begins with its last. A kept
sequence goes to one follower, which takes over its blocks; they are never shared. It is idle K/V as that of a session between rounds.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engines.ar.sampling import SamplingParams
from engines.ar.torch.blocks import NOBODY, BlockTables, OutOfBlocksError
from engines.ar.torch.executor import TorchExecutor
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


class _Kept(NamedTuple):
    slot: int
    ids: Ints
    """Tokens whose K/V was kept."""


class Adopted(NamedTuple):
    slot: int
    tokens: int
    """Tokens of the prompt whose K/V is there."""


class KeptSequences:
    """Known by ``order``, as in ``SessionMemory``, which holds their blocks."""

    def __init__(self, executor: TorchExecutor, memory: SessionMemory) -> None:
        self._executor, self._memory = executor, memory
        self._kept: dict[int, _Kept] = {}
        self._by_opening: dict[bytes, list[int]] = {}
        """By the ids of their first block."""

    def __contains__(self, order: int) -> bool:
        return order in self._kept

    def keep(self, order: int, slot: int, ids: Ints) -> None:
        """``ids`` are those of the slot's first tokens, all with K/V. Less than a block of them is not kept."""
        if len(ids) < self._block_size:
            self._executor.close_slot(slot)
            return
        self._memory.park(order, slot, len(ids))
        self._kept[order] = _Kept(slot, ids)
        self._by_opening.setdefault(self._opening(ids), []).append(order)

    def adopt(self, order: int, prompt: Ints, sampling: SamplingParams) -> Adopted | None:
        """Hand the sequence that ``prompt`` repeats most of over to ``order``, idle as before.

        Only one of which the prompt repeats at least a block and at least half: less is no conversation that goes on,
        but an opening that many share, and its own next turn may still come. The prompt's last token is computed anew,
        for its logits.
        """
        best, most = None, 0
        for other in self._by_opening.get(self._opening(prompt), ()):
            kept = self._kept[other]
            here = min(self._memory.cached(other), len(kept.ids))
            common = _common(kept.ids[:here], prompt[:-1])
            if common >= max(self._block_size, (here + 1) // 2, most + 1):
                best, most = other, common
        if best is None:
            return None
        slot = self._reopened(self._take(best).slot, sampling)
        self._memory.park(order, slot, most)
        return Adopted(slot, most)

    def drop(self, order: int) -> None:
        self._executor.close_slot(self._take(order).slot)

    def sweep(self) -> None:
        """Give back the slots of those that were evicted altogether."""
        for order in [order for order in self._kept if not self._memory.cached(order)]:
            self.drop(order)

    def close(self) -> None:
        for order in list(self._kept):
            self.drop(order)

    def _take(self, order: int) -> _Kept:
        kept = self._kept.pop(order)
        opening = self._opening(kept.ids)
        self._by_opening[opening].remove(order)
        if not self._by_opening[opening]:
            del self._by_opening[opening]
        self._memory.drop(order)
        return kept

    def _reopened(self, slot: int, sampling: SamplingParams) -> int:
        """A slot for another sequence, with the blocks of this one; no ids are in it."""
        tables = self._executor.tables
        blocks, held = tables.table[slot].copy(), int(tables.held[slot])
        tables.table[slot], tables.held[slot] = NOBODY, 0
        self._executor.close_slot(slot)
        slot = self._executor.open(sampling)
        tables.table[slot], tables.held[slot] = blocks, held
        return slot

    @property
    def _block_size(self) -> int:
        return self._executor.tables.block_size

    def _opening(self, ids: Ints) -> bytes:
        return ids[: self._block_size].tobytes()


def _common(a: Ints, b: Ints) -> int:
    """Length of the longest common beginning."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(np.argmax(differs)) if differs.any() else size
