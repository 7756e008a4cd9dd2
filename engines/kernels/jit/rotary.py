from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rounded(x: tl.tensor, dtype: tl.constexpr, FULL: tl.constexpr) -> tl.tensor:
    """float32 that ``dtype`` can hold, but for FULL precision."""
    return x if FULL else x.to(dtype).to(tl.float32)


@triton.jit
def _rotate_heads(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    first: tl.tensor,
    head_stride: tl.tensor,
    TOTAL: tl.constexpr,
    HALF: tl.constexpr,
    FULL: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    head = (first + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    mask = (head < TOTAL) & (d < HALF)
    lower = x + head * head_stride + d
    upper = lower + HALF
    narrow = tl.load(lower, mask=mask, other=0.0)
    dtype: tl.constexpr = narrow.dtype
    a = narrow.to(tl.float32)
    b = tl.load(upper, mask=mask, other=0.0).to(tl.float32)
    c = _rounded(tl.load(cos + d, mask=d < HALF, other=0.0).to(tl.float32), dtype, FULL)
    s = _rounded(tl.load(sin + HALF + d, mask=d < HALF, other=0.0).to(tl.float32), dtype, FULL)
    rotated_a = _rounded(a * c, dtype, FULL) - _rounded(b * s, dtype, FULL)
    rotated_b = _rounded(a * s, dtype, FULL) + _rounded(b * c, dtype, FULL)
    tl.store(lower, rotated_a.to(dtype), mask=mask)
    tl.store(upper, rotated_b.to(dtype), mask=mask)


@triton.jit
def rotate_rows(
    q: tl.tensor,
    k: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    cos_row: tl.tensor,
    sin_row: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    FULL: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Program (row, tile) rotates HEADS heads of one row; tiles of k follow those of q."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cos += row * cos_row
    sin += row * sin_row
    Q_TILES: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    if tile < Q_TILES:
        _rotate_heads(q + row * q_row, cos, sin, tile * HEADS, q_head, Q_HEADS, HALF, FULL, HEADS, WIDTH)
    else:
        _rotate_heads(k + row * k_row, cos, sin, (tile - Q_TILES) * HEADS, k_head, KV_HEADS, HALF, FULL, HEADS, WIDTH)
