from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalize_rows(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    delta: tl.tensor,
    x_row: tl.tensor,
    delta_row: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    ADDS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Program row; what is stored has x's dtype, what is summed is float32."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    mask = d < D
    own = x + row * x_row + d
    value = tl.load(own, mask=mask, other=0.0)
    dtype: tl.constexpr = value.dtype
    if ADDS:
        added = tl.load(delta + row * delta_row + d, mask=mask, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(dtype)
        tl.store(own, value, mask=mask)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / D + eps)
    unit = (wide * scale).to(dtype).to(tl.float32)
    factor = tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * D + d, (unit * factor).to(dtype), mask=mask)
