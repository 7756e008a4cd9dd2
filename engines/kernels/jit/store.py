from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def store_rows(
    pool_k: tl.tensor,
    pool_v: tl.tensor,
    rows: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    pool_k_row: tl.tensor,
    pool_v_row: tl.tensor,
    k_row: tl.tensor,
    v_row: tl.tensor,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Program (row, tile) copies TILE values of one row of k, and of v."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(rows + row)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = i < SIZE
    keys = tl.load(k + row * k_row + i, mask=mask)
    values = tl.load(v + row * v_row + i, mask=mask)
    tl.store(pool_k + target * pool_k_row + i, keys, mask=mask)
    tl.store(pool_v + target * pool_v_row + i, values, mask=mask)
