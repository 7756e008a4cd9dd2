from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["score", "kept", "score_request", "score_head", "context", "max_kept"])
def select_rows(
    out: tl.tensor,
    score: tl.tensor,
    kept: tl.tensor,
    score_request: tl.tensor,
    score_head: tl.tensor,
    context: tl.tensor,
    max_kept: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Program (head, request): bisects for the smallest key that is kept, then lists by index."""
    head = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    count = tl.load(kept + request).to(tl.int32)
    c = tl.arange(0, WIDTH)
    value = tl.load(score + request * score_request + head * score_head + c, mask=c < context, other=float("-inf"))
    # Integers in the order of the floats: the bits of negative ones count down.
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(value != value, 0x7FFFFFFF, key)
    key = tl.where(c < context, key, -0x80000000)
    low = tl.full((), -0x80000000, dtype=tl.int64)
    high = tl.full((), 0x7FFFFFFF, dtype=tl.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        enough = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), axis=0) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    least = low.to(tl.int32)
    above = key > least
    equal = (key == least) & (c < context)
    spare = count - tl.sum(above.to(tl.int32), axis=0)
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= spare))
    place = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    target = out + (request * tl.num_programs(0) + head) * max_kept + place
    tl.store(target, c.to(tl.int64), mask=taken & (place < max_kept))
