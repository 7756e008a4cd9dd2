"""Rows of packed steps as plain arrays; no torch.

Block tables say which blocks of the KV pool hold the tokens of a sequence (paged attention, arXiv 2309.06180). Block 0 belongs to no
sequence: padding reads and writes it. A slot is a row of the table, a sequence's place while it holds K/V.
"""

import numpy as np
from numpy.typing import NDArray

from engines.errors import require

Ints = NDArray[np.int64]

MIN_ROWS = 8
"""GEMMs with fewer rows take other kernels, whose rounding differs. A step is never narrower, so a request's numbers are the same alone and
in a batch (on CPU bit for bit)."""


def ranks(counts: Ints) -> Ints:
    """Return each row's place within its own run; runs of these lengths lie one after the other."""
    return np.arange(int(counts.sum())) - (counts.cumsum() - counts).repeat(counts)


NOBODY = 0
"""The block of padding."""


class OutOfBlocksError(RuntimeError):
    """The pool has too few free blocks; nothing was taken. The caller makes room first (``PrefixCache``)."""


class BlockTables:
    """``num_blocks`` blocks of ``block_size`` tokens for ``num_slots`` sequences of up to ``max_len`` tokens.

    ``table`` [num_slots + 1, width] holds block numbers, NOBODY past a sequence's last block. Its last row is the padding slot. ``spare``
    columns are never taken, so that padding behind a sequence's last token has a place.
    """

    def __init__(self, *, num_slots: int, num_blocks: int, block_size: int, max_len: int, spare: int = 0) -> None:
        for name, value in (("num_slots", num_slots), ("num_blocks", num_blocks), ("block_size", block_size)):
            require(value >= 1, f"{name}={value} must be at least 1")
        require(max_len >= 1, f"max_len={max_len} must be at least 1")
        self.num_blocks, self.block_size, self.max_len = num_blocks, block_size, max_len
        self.num_slots = num_slots
        self.table = np.zeros((num_slots + 1, -(-max_len // block_size) + spare), dtype=np.int32)
        self.block_counts = np.zeros(num_slots + 1, dtype=np.int64)
        """[num_slots + 1] how many blocks each slot holds."""
        self._free_blocks = np.arange(num_blocks, 0, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def padding_slot(self) -> int:
        return self.num_slots

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def open(self) -> int:
        """Return a slot without blocks."""
        require(bool(self._free_slots), f"all {self.num_slots} slots are taken: raise num_slots")
        return self._free_slots.pop()

    def close(self, slot: int) -> None:
        """Free the slot and its blocks."""
        assert slot not in self._free_slots, f"slot {slot} is closed"
        self.trim(slot, 0)
        self._free_slots.append(slot)

    def missing(self, slots: Ints, lengths: Ints) -> int:
        """Return how many more blocks the slots need to have room for ``lengths`` tokens each."""
        return int(self._deficits(slots, lengths).sum())

    def grow(self, slots: Ints, lengths: Ints) -> None:
        """Make room for ``lengths`` [n] tokens in ``slots`` [n], all different. OutOfBlocksError leaves everything as it was."""
        deficits = self._deficits(slots, lengths)
        total = int(deficits.sum())
        if total == 0:
            return
        longest = int(lengths.max())
        if longest > self.max_len:
            raise OutOfBlocksError(f"a sequence of {longest} tokens exceeds max_len={self.max_len}: raise it")
        if total > self._num_free:
            raise OutOfBlocksError(
                f"{total} more blocks of {self.block_size} tokens are needed and {self._num_free} of {self.num_blocks} are "
                "free: admit less, or raise num_blocks"
            )
        self._num_free -= total
        taken = self._free_blocks[self._num_free : self._num_free + total]
        row = np.repeat(np.arange(len(slots)), deficits)
        # Places of each slot's new blocks, behind its old ones.
        place = ranks(deficits) + self.block_counts[slots][row]
        self.table[slots[row], place] = taken
        self.block_counts[slots] += deficits

    def trim(self, slot: int, tokens: int) -> int:
        """Free the blocks behind the first ``tokens``; return how many."""
        num_kept, num_held = min(self.blocks_for(tokens), int(self.block_counts[slot])), int(self.block_counts[slot])
        freed = num_held - num_kept
        if freed:
            self._free(self.table[slot, num_kept:num_held])
            self.table[slot, num_kept:num_held] = NOBODY
            self.block_counts[slot] = num_kept
        return freed

    def rows(self, slot: Ints, position: Ints) -> Ints:
        """Return the pool rows of tokens at ``position`` of ``slot`` (any one shape); past the table, NOBODY's."""
        block, offset = np.divmod(position, self.block_size)
        clamped = np.minimum(block, self.table.shape[1] - 1)
        return self.table[slot, clamped].astype(np.int64) * self.block_size + offset

    def _free(self, blocks: np.ndarray) -> None:
        self._free_blocks[self._num_free : self._num_free + len(blocks)] = blocks
        self._num_free += len(blocks)

    def _deficits(self, slots: Ints, lengths: Ints) -> Ints:
        return np.maximum(-(-lengths // self.block_size) - self.block_counts[slots], 0)
