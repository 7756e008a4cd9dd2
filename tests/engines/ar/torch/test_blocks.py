"""No block is lost, none belongs to two sequences, and what does not fit changes nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.refusals import refuses

from engines.ar.torch.worker import SessionMemory
from engines.errors import UserError
from engines.runtime.rows import NOBODY, BlockTables, OutOfBlocksError


class Tables(RuleBasedStateMachine):
    """Random growth, trimming and closing against a list of lengths."""

    @initialize(block_size=st.sampled_from((1, 3, 16)), num_blocks=st.integers(1, 30))
    def begin(self, block_size: int, num_blocks: int) -> None:
        self.tables = BlockTables(num_slots=6, num_blocks=num_blocks, block_size=block_size, max_len=64, spare=1)
        self.lengths: dict[int, int] = {}

    @precondition(lambda self: len(self.lengths) < 6)
    @rule()
    def open(self) -> None:
        slot = self.tables.open()
        assert slot not in self.lengths
        self.lengths[slot] = 0

    @precondition(lambda self: bool(self.lengths))
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.lengths)), min_size=1, unique=True))
        lengths = np.array([data.draw(st.integers(1, 64)) for _ in slots])
        before, free = self.tables.table.copy(), self.tables.num_free
        missing = self.tables.missing(np.array(slots), lengths)
        try:
            self.tables.grow(np.array(slots), lengths)
        except OutOfBlocksError:
            assert missing > free
            assert np.array_equal(self.tables.table, before)
            assert self.tables.num_free == free
        else:
            assert missing <= free
            for slot, length in zip(slots, lengths.tolist(), strict=True):
                self.lengths[slot] = max(self.lengths[slot], length)

    @precondition(lambda self: bool(self.lengths))
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.lengths)))
        tokens = data.draw(st.integers(0, 64))
        kept = self.tables.table[slot, : self.tables.blocks_for(min(tokens, self.lengths[slot]))].copy()
        self.tables.trim(slot, tokens)
        self.lengths[slot] = min(self.lengths[slot], self.tables.blocks_for(tokens) * self.tables.block_size)
        assert np.array_equal(self.tables.table[slot, : len(kept)], kept), "a prefix moved"

    @precondition(lambda self: bool(self.lengths))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.lengths)))
        self.tables.close(slot)
        del self.lengths[slot]

    @invariant()
    def blocks_are_conserved(self) -> None:
        if not hasattr(self, "tables"):
            return
        tables = self.tables
        held = tables.table[tables.table != NOBODY]
        assert len(set(held.tolist())) == len(held), "a block belongs to two sequences"
        assert len(held) + tables.num_free == tables.num_blocks
        assert int(tables.held.sum()) == len(held)
        assert not tables.table[tables.padding_slot].any()
        assert not tables.table[:, -1].any(), "a spare column was taken"
        for slot, length in self.lengths.items():
            assert tables.held[slot] == tables.blocks_for(length)
            assert (tables.table[slot, : tables.held[slot]] != NOBODY).all()


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=30, stateful_step_count=40)


@given(st.sampled_from((1, 4, 16)), st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_rows_of_different_tokens_are_different(block_size, lengths):
    tables = BlockTables(num_slots=5, num_blocks=200, block_size=block_size, max_len=40, spare=2)
    slots = np.array([tables.open() for _ in lengths])
    tables.grow(slots, np.array(lengths))
    rows = [tables.rows(np.full(n, slot), np.arange(n)) for slot, n in zip(slots.tolist(), lengths, strict=True)]
    every = np.concatenate(rows)
    assert len(set(every.tolist())) == sum(lengths)
    assert every.min() >= block_size, "a token lies in nobody's block"
    assert every.max() < (tables.num_blocks + 1) * block_size
    past = tables.rows(np.full(9, slots[0]), np.arange(lengths[0] + block_size, lengths[0] + block_size + 9))
    assert past.max() < block_size, "padding past a sequence's blocks goes to nobody"


def test_what_cannot_be_is_said_in_one_sentence():
    tables = BlockTables(num_slots=1, num_blocks=2, block_size=16, max_len=64)
    slot = np.array([tables.open()])
    with pytest.raises(UserError, match="all 1 slots are taken"):
        tables.open()
    with pytest.raises(OutOfBlocksError, match="3 more blocks of 16 tokens are needed and 2 of 2 are free"):
        tables.grow(slot, np.array([33]))
    with pytest.raises(OutOfBlocksError, match="65 tokens exceeds max_len=64"):
        tables.grow(slot, np.array([65]))
    with refuses("block_size=0"):
        BlockTables(num_slots=1, num_blocks=1, block_size=0, max_len=4)
    tables.close(int(slot[0]))
    with pytest.raises(AssertionError, match="is closed"):
        tables.close(int(slot[0]))


def test_idle_prefixes_go_least_recent_first_and_from_their_tails():
    """Worked by hand: 10 blocks of 4 tokens; sessions of 3 + 3 blocks idle, then one needs 6 of the 4 that are free."""
    tables = BlockTables(num_slots=4, num_blocks=10, block_size=4, max_len=64)
    memory = SessionMemory(tables)
    slots = [tables.open() for _ in range(3)]
    for order, slot in enumerate(slots[:2]):
        memory.admit(slot, 12)
        memory.park(order, slot, 11)
    assert (tables.num_free, memory.room) == (4, 40)
    memory.admit(slots[2], 24)
    assert (memory.cached(0), memory.cached(1)) == (4, 11)
    assert memory.evicted == 2
    assert memory.resume(0) == 4
    with pytest.raises(OutOfBlocksError, match=r"it must keep to Situation\.room"):
        memory.admit(slots[0], 28)
    # Its own prefix is held by now, so session 1's went for it in vain.
    assert memory.cached(1) == 0
