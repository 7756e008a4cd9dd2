from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def gate_rows(
    out: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    gate_row: tl.tensor,
    up_row: tl.tensor,
    width: tl.tensor,
    count: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Program row * count + tile."""
    row = (tl.program_id(0) // count).to(tl.int64)
    column = tl.program_id(0) % count * TILE + tl.arange(0, TILE)
    mask = column < width
    narrow = tl.load(gate + row * gate_row + column, mask=mask, other=0.0)
    dtype: tl.constexpr = narrow.dtype
    wide = narrow.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
    factor = tl.load(up + row * up_row + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (silu * factor).to(dtype), mask=mask)
