"""What a step computes and what comes of it: plain data between scheduler, executor and engine.

Block tables whose final blocks several sequences may hold: the prefix cache.

A unit of it is a whole number of pool blocks and of diffusion blocks, known by a key of its ids and all before them. A block that
is not final, or only in part wanted, has no key: the K/V of a token depends on all tokens of its block. Plain arrays, no torch.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from engines.blockdiffusion.rules import Bools, Floats
from engines.blockdiffusion.sequence import BlockSampling
from engines.errors import require
from engines.runtime.rows import NOBODY, BlockTables, Ints


class SharedTables(BlockTables):
    """``unit`` tokens are cached together; K/V of units that nobody holds stays until its room is needed, the least recently
    used first and of a sequence the last."""

    def __init__(
        self,
        *,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        max_len: int,
        diffusion_block: int,
        caches: bool = True,
    ) -> None:
        super().__init__(num_slots=num_slots, num_blocks=num_blocks, block_size=block_size, max_len=max_len)
        require(
            block_size % diffusion_block == 0 or diffusion_block % block_size == 0,
            f"block_size={block_size} of the pool must divide the diffusion block of {diffusion_block} tokens, or be a multiple of it",
        )
        self.unit = max(block_size, diffusion_block)
        self.caches = caches
        self._width = self.unit // block_size
        self._known: dict[bytes, list[int]] = {}
        """Pool blocks of each unit."""
        self._key_of: dict[int, bytes] = {}
        """By pool block."""
        self._users: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()

    @property
    def room(self) -> int:
        """Pool blocks that can be had: free ones, and those of units that nobody holds."""
        return self.num_free + len(self._idle) * self._width

    def adopt(self, slot: int, keys: Sequence[bytes]) -> int:
        """Have a slot without blocks hold the units of the longest known beginning of ``keys``; how many tokens."""
        assert self.held[slot] == 0, f"slot {slot} holds blocks"
        found = self._num_known(keys)
        for i, key in enumerate(keys[:found]):
            self.table[slot, i * self._width : (i + 1) * self._width] = self._known[key]
            self._users[key] += 1
            self._idle.pop(key, None)
        self.held[slot] = found * self._width
        return found * self.unit

    def cached(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Tokens of the longest known beginning of ``keys``, and how many pool blocks of it nobody holds."""
        found = self._num_known(keys)
        return found * self.unit, sum(key in self._idle for key in keys[:found]) * self._width

    def publish(self, slot: int, first: int, keys: Sequence[bytes]) -> None:
        """The slot's units from ``first`` on are final, computed and known by these keys from now on."""
        if not self.caches:
            return
        for i, key in enumerate(keys, start=first):
            if key in self._known:
                continue
            blocks = self.table[slot, i * self._width : (i + 1) * self._width].tolist()
            self._known[key], self._users[key] = blocks, 1
            self._key_of |= dict.fromkeys(blocks, key)

    def grow(self, slots: Ints, lengths: Ints) -> None:
        missing = self.missing(slots, lengths)
        while self.num_free < missing and self._idle:
            key, _ = self._idle.popitem(last=False)
            self._forget(key)
        super().grow(slots, lengths)

    def trim(self, slot: int, tokens: int) -> int:
        """Give back the blocks behind the first ``tokens``, a whole number of units; how many."""
        kept, had = min(self.blocks_for(tokens), int(self.held[slot])), int(self.held[slot])
        blocks = self.table[slot, kept:had].tolist()
        self._free(np.array([block for block in blocks if block not in self._key_of], dtype=np.int32))
        # The last unit is the first to go once room is needed.
        for key in dict.fromkeys(self._key_of[block] for block in reversed(blocks) if block in self._key_of):
            self._users[key] -= 1
            if not self._users[key]:
                self._idle[key] = None
        self.table[slot, kept:had] = NOBODY
        self.held[slot] = kept
        return had - kept

    def _forget(self, key: bytes) -> None:
        blocks = self._known.pop(key)
        del self._users[key]
        for block in blocks:
            del self._key_of[block]
        self._free(np.array(blocks, dtype=np.int32))

    def _num_known(self, keys: Sequence[bytes]) -> int:
        """Units of the longest known beginning."""
        return next((i for i, key in enumerate(keys) if key not in self._known), len(keys))


class Work(NamedTuple):
    """One request's share of a step."""

    request_id: int
    slot: int
    start: int
    """Tokens with K/V before it."""
    blocks: int
    """Final blocks behind ``start`` whose K/V it makes: PREFILL or COMMIT."""
    rows: tuple[int, int] | None
    """Rows of the block behind those that are denoised, from and to."""
    wants_first: bool
    """Whether the last row of ``blocks`` is to give the next block's first token."""

    def num_rows(self, block: int) -> int:
        denoised = 0 if self.rows is None else self.rows[1] - self.rows[0]
        return self.blocks * block + denoised


class BlockStepPlan(NamedTuple):
    works: tuple[Work, ...]
    admitted: tuple[int, ...]
    """Requests whose first step this is, or the first after they were preempted."""
    preempted: tuple[int, ...]
    num_rows: int


class Denoised(NamedTuple):
    """The blocks of a step that are denoised, in the order of its works."""

    ids: Ints
    holes: Bools
    wanted: Bools
    """All [n, B]."""
    sampling: tuple[BlockSampling, ...]
    draw: Ints
    """[n] which draw of its request each is."""
    forward: Ints
    """[n] which of its request's forwards; some draw nothing, for their block is done."""


class Outcome(NamedTuple):
    tokens: Ints
    confidence: Floats
    """Both [denoised, B]; anything where nothing was wanted."""
    first: Ints
    """[works that want one] first tokens."""
    duration_s: float


class BlockExecutor(Protocol):
    tables: SharedTables

    @property
    def block(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def shifts(self) -> bool:
        """Whether row i of the logits predicts the token at i + 1."""
        ...

    def open(self, final: Ints) -> int:
        """A slot that holds these ids and no K/V."""
        ...

    def extend(self, slot: int, start: int, ids: Ints) -> None:
        """Final ids behind the first ``start``."""
        ...

    def close_slot(self, slot: int) -> None: ...

    def run(self, plan: BlockStepPlan, denoised: Denoised) -> Outcome: ...


class BlockStepRecord(NamedTuple):
    step: int
    duration_s: float
    num_rows: int
    denoised: int
    """Requests whose block was denoised."""
    committed: int
    """Generated blocks whose K/V was made."""
    prefilled: int
    """Blocks of prompts."""
    taken: int
    """Tokens written, edits included."""
    admitted: tuple[int, ...]
    begun: tuple[int, ...]
    """Requests whose first tokens are final."""
    finished: tuple[int, ...]
    preempted: tuple[int, ...]
    num_running: int
    num_waiting: int


NO_BLOCKS = np.zeros((0, 0), dtype=np.int64)
