"""Where the rows of a step lie: plain arrays over its requests, built once, all layers share them.

A request's final blocks and its denoised rows are segments that each see all keys up to their own block's end: without any mask
this is bidirectional within blocks and causal across them. Shapes: s segments, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engines.blockdiffusion.plan import Denoised, Work
from engines.blockdiffusion.tables import SharedTables
from engines.runtime.rows import Ints, ranks


class StepRows(NamedTuple):
    slot: Ints
    position: Ints
    pool_row: Ints
    """All three [N], padding included."""
    q_len: Ints
    k_start: Ints
    k_len: Ints
    """All three [s]: where among ``keys`` a segment's are."""
    keys: Ints
    """Rows of the pool, each request's from its first token on, one request behind the other."""
    first_denoised: Ints
    """[denoised] the row of each denoised block's first place, where it would be if that is not computed."""
    block_start: Ints
    """[denoised] the position of that place."""
    last_final: Ints
    """[works that want a first token] the row of their last final token."""

    @property
    def num_rows(self) -> int:
        return len(self.slot)


def step_rows(works: Sequence[Work], tables: SharedTables, block: int, *, least: int) -> StepRows:
    """The works' rows one behind the other, padded to at least ``least``."""
    columns = [
        (work.slot, work.start, work.blocks, *(work.rows or (0, 0)), work.rows is not None, work.wants_first)
        for work in works
    ]
    slot, start, blocks, begin, end, denoises, wants_first = np.array(columns, dtype=np.int64).T
    denoised = end - begin
    counts = blocks * block + denoised
    total = int(counts.sum())
    size = max(total, least)
    first = counts.cumsum() - counts
    behind = start + blocks * block
    """Where each work's denoised block begins."""
    slots = np.full(size, tables.padding_slot, dtype=np.int64)
    position, pool_row = np.zeros((2, size), dtype=np.int64)
    place = ranks(counts)
    slots[:total] = slot.repeat(counts)
    # Rows that are not computed lie between the final blocks and those that are.
    jump = np.where(place >= (blocks * block).repeat(counts), begin.repeat(counts), 0)
    position[:total] = start.repeat(counts) + place + jump
    pool_row[:total] = tables.rows(slots[:total], position[:total])

    num_keys = behind + np.where(denoises, block, 0)
    key_first = num_keys.cumsum() - num_keys
    segments = blocks + denoises
    which, index = np.arange(len(works)).repeat(segments), ranks(segments)
    is_final = index < blocks[which]
    keys = tables.rows(slot.repeat(num_keys), ranks(num_keys))
    return StepRows(
        slots,
        position,
        pool_row,
        np.where(is_final, block, denoised[which]),
        key_first[which],
        start[which] + (index + 1) * block,
        keys,
        (first + blocks * block - begin)[denoises.astype(bool)],
        behind[denoises.astype(bool)],
        (first + blocks * block - 1)[wants_first.astype(bool)],
    )


def wanted_rows(rows: StepRows, denoised: Denoised, shift: int) -> Ints:
    """Rows whose logits are read: those of the wanted places of denoised blocks, by request and place, then the last final rows.
    ``shift`` rows before a place predict it."""
    request, place = np.nonzero(denoised.wanted)
    return np.concatenate((rows.first_denoised[request] + place - shift, rows.last_final))
