"""Where the rows of one step lie: plain arrays over its sequences, built once per step, all layers share them.

Shapes: n sequences; N rows the model computes; padding rows belong to the padding slot and nobody's block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engines.ar.torch.blocks import BlockTables, Ints

MIN_ROWS = 8
"""GEMMs with fewer rows take other kernels, whose rounding differs; a step is never narrower, so a sequence's numbers
are the same alone and in company (on CPU bit for bit)."""


class StepWork(NamedTuple):
    """What a step computes: of each sequence, ``tokens`` >= 1 tokens from position ``start`` on."""

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
    def of(entries: list[tuple[int, int, int, bool]]) -> StepWork:
        columns = np.array(entries, dtype=np.int64).reshape(-1, 4)
        return StepWork(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3].astype(bool))


class StepRows(NamedTuple):
    """The rows of a step. Sequence i has the rows from ``first[i]`` on; ``last[i]`` is that of its newest token."""

    slot: Ints
    position: Ints
    pool_row: Ints
    first: Ints
    last: Ints

    @property
    def num_rows(self) -> int:
        return len(self.slot)


def packed_rows(work: StepWork, tables: BlockTables, *, least: int = MIN_ROWS) -> StepRows:
    """The sequences' rows one behind the other, padded to at least ``least``."""
    tokens = work.total
    size = max(tokens, least)
    first = np.cumsum(work.tokens) - work.tokens
    slot = np.full(size, tables.padding_slot, dtype=np.int64)
    position, pool_row = np.zeros((2, size), dtype=np.int64)
    slot[:tokens] = np.repeat(work.slot, work.tokens)
    position[:tokens] = np.arange(tokens) + np.repeat(work.start - first, work.tokens)
    pool_row[:tokens] = tables.rows(slot[:tokens], position[:tokens])
    return StepRows(slot, position, pool_row, first, first + work.tokens - 1)


def padded_rows(work: StepWork, tables: BlockTables, length: int, batch: int) -> StepRows:
    """Sequence i in row i of a grid [batch, length], its tokens first (LAPS §3.1).

    What follows them is computed as if the sequence went on. No real token sees it, and its K/V goes to places that a
    later step writes before it reads them, or to nobody's block.
    """
    n = work.size
    slot = np.full(batch, tables.padding_slot, dtype=np.int64)
    start = np.zeros(batch, dtype=np.int64)
    slot[:n], start[:n] = work.slot, work.start
    place = np.arange(length)
    position = start[:, None] + place
    slots = np.broadcast_to(slot[:, None], position.shape)
    first = np.arange(n) * length
    return StepRows(
        slots.ravel(), position.ravel(), tables.rows(slots, position).ravel(), first, first + work.tokens - 1
    )
