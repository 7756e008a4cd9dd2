"""The places of one step's rows: plain arrays over its sequences, which are built once per step and shared by all layers.

Shapes: n sequences; N rows that the model computes. Padding rows belong to the padding slot and to nobody's block.

``DecodeColumns`` holds sequences that decode together as columns, so that a step advances them by array arithmetic.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engines.ar.sampling import GREEDY, Logprobs, SamplingParams
from engines.cluster.sessions import Session
from engines.policies.views import Bucket, PrefillTask, Rung
from engines.runtime.rows import BlockTables, Ints, ranks

_RUNG_SEQUENCES = 64
"""Most sequences that a rung holds."""

Size = Bucket | Rung


class PackedWork(NamedTuple):
    """The work of a step: for each sequence, ``tokens`` >= 1 tokens from position ``start`` on."""

    slot: Ints
    start: Ints
    tokens: Ints
    samples: np.ndarray
    """bool [n]: whether the sequence gets a token after its last row."""

    @property
    def size(self) -> int:
        return len(self.slot)

    @property
    def end(self) -> Ints:
        return self.start + self.tokens

    @property
    def total(self) -> int:
        return int(self.tokens.sum())

    @staticmethod
    def of(entries: list[tuple[int, int, int, bool]]) -> "PackedWork":
        columns = np.array(entries, dtype=np.int64).reshape(-1, 4)
        return PackedWork(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3].astype(bool))


class Members(NamedTuple):
    """The sequences as they are computed, those of padding included; ``first`` is the row of each one's first query."""

    slot: Ints
    first: Ints
    start: Ints
    tokens: Ints

    @property
    def end(self) -> Ints:
        return self.start + self.tokens


class CausalRows(NamedTuple):
    slot: Ints
    position: Ints
    pool_row: Ints
    """Slot, position and row of the pool, all [N]."""
    last: Ints
    """[n] row of each sequence's newest token."""
    members: Members
    is_grid: bool
    """Whether the members have equally many rows, and all rows are theirs."""

    @property
    def num_rows(self) -> int:
        return len(self.slot)


def packed_rows(work: PackedWork, tables: BlockTables, *, least: int, sequences: int = 0) -> CausalRows:
    """Return the sequences' rows one behind the other, padded to at least ``least`` rows, and to ``sequences`` members."""
    tokens = work.total
    size = max(tokens, least)
    first = np.cumsum(work.tokens) - work.tokens
    slot = np.full(size, tables.padding_slot, dtype=np.int64)
    position, pool_row = np.zeros((2, size), dtype=np.int64)
    slot[:tokens] = np.repeat(work.slot, work.tokens)
    position[:tokens] = ranks(work.tokens) + np.repeat(work.start, work.tokens)
    pool_row[:tokens] = tables.rows(slot[:tokens], position[:tokens])
    members = Members(work.slot, first, work.start, work.tokens)
    if sequences > work.size:
        empty = np.zeros(sequences - work.size, dtype=np.int64)
        padding = (empty + tables.padding_slot, empty, empty, empty)
        members = Members(*(np.concatenate(pair) for pair in zip(members, padding, strict=True)))
    return CausalRows(slot, position, pool_row, first + work.tokens - 1, members, is_grid=False)


def _padded_rows(work: PackedWork, tables: BlockTables, length: int, batch: int) -> CausalRows:
    """Return rows with sequence i in row i of a grid [batch, length], its tokens first (LAPS §3.1).

    Padding that follows them is computed as if the sequence went on. No real token sees it. Its K/V goes to places that a
    later step writes before it reads them, or to nobody's block.
    """
    n = work.size
    slot = np.full(batch, tables.padding_slot, dtype=np.int64)
    start = np.zeros(batch, dtype=np.int64)
    slot[:n], start[:n] = work.slot, work.start
    position = start[:, None] + np.arange(length)
    slots = np.broadcast_to(slot[:, None], position.shape)
    first = np.arange(batch) * length
    return CausalRows(
        slots.ravel(),
        position.ravel(),
        tables.rows(slots, position).ravel(),
        first[:n] + work.tokens - 1,
        Members(slot, first, start, np.full(batch, length, dtype=np.int64)),
        is_grid=True,
    )


def rows_in(size: Size, work: PackedWork, tables: BlockTables, *, sequences: int = 0) -> CausalRows:
    """Return the rows of a step that runs in a bucket or a rung."""
    if isinstance(size, Bucket):
        return _padded_rows(work, tables, size.length, size.batch)
    return packed_rows(work, tables, least=size.tokens, sequences=sequences)


def most_sequences(size: Size) -> int:
    return size.batch if isinstance(size, Bucket) else min(size.tokens, _RUNG_SEQUENCES)


def flat_index(rows: CausalRows, width: int) -> Ints:
    """Return places in the flattened token store. A position past the end of a slot goes to its last column, which has no token."""
    return rows.slot * width + np.minimum(rows.position, width - 1)


@dataclass(slots=True, eq=False)
class SessionState:
    session: Session
    order: int
    """Rank by arrival; a lower rank is older."""
    sampling: SamplingParams = GREEDY
    slot: int = -1
    """-1 until its first prefill begins."""
    round_index: int = 0
    context: int = 0
    """Tokens so far, the newest included. Out of date while it decodes (``DecodeColumns``)."""
    computed: int = 0
    """Tokens whose K/V is in the pool: all but the newest, unless it was evicted. Out of date while it decodes."""
    left: int = 0
    """Tokens of the round still to come. Out of date while it decodes."""
    num_written: int = 0
    """Tokens that were written to its slot. Generated tokens count from the end of their round on."""
    saved: list[int] | None = None
    """Its tokens, while a preemption has taken its slot."""
    task: PrefillTask | None = None
    """Its prefill, while that waits or runs."""
    logprobs: Logprobs | None = None
    """Log probabilities of its newest token, if ``sampling`` asks for them."""
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    """Those of its prompt's tokens from the second on, as far as it is prefilled, if ``sampling`` asks for them."""


class DecodeColumns:
    def __init__(self) -> None:
        self.members: list[SessionState] = []
        self.slots, self.contexts, self._left = np.zeros((3, 0), dtype=np.int64)

    @property
    def size(self) -> int:
        return len(self.members)

    def join(self, sequence: SessionState) -> None:
        """Add a sequence, which has a newest token and at least one to come."""
        self.members.append(sequence)
        self.slots = np.append(self.slots, sequence.slot)
        self.contexts = np.append(self.contexts, sequence.context)
        self._left = np.append(self._left, sequence.left)

    def work(self) -> PackedWork:
        """Return the work of a decode step: each sequence's newest token, for which it gets the next."""
        size = self.size
        return PackedWork(self.slots, self.contexts - 1, np.ones(size, dtype=np.int64), np.ones(size, dtype=bool))

    def end(self, mask: np.ndarray) -> None:
        """Make the next token of these members their last."""
        self._left = np.where(mask, 1, self._left)

    def advance(self) -> list[SessionState]:
        """Count one more token for every member. Members that have all of their tokens leave and are returned, the oldest first."""
        self.contexts = self.contexts + 1
        self._left = self._left - 1
        is_done = self._left == 0
        if not is_done.any():
            return []
        return sorted(self._take(is_done), key=lambda sequence: sequence.order)

    def youngest(self) -> SessionState:
        return max(self.members, key=lambda sequence: sequence.order)

    def leave(self, sequence: SessionState) -> None:
        self._take(np.array([member is sequence for member in self.members]))

    def _take(self, mask: np.ndarray) -> list[SessionState]:
        """Bring members up to date and let them go."""
        gone = []
        for index in np.flatnonzero(mask).tolist():
            sequence = self.members[index]
            sequence.context, sequence.left = int(self.contexts[index]), int(self._left[index])
            sequence.computed = sequence.context - 1
            gone.append(sequence)
        stay = ~mask
        self.members = [member for member, stays in zip(self.members, stay.tolist(), strict=True) if stays]
        self.slots, self.contexts, self._left = self.slots[stay], self.contexts[stay], self._left[stay]
        return gone
