from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["best", "token", "maximum", "sumexp", "count", "suppressed", "offset"])
def reduce_tiles(
    best: tl.tensor,
    token: tl.tensor,
    maximum: tl.tensor,
    sumexp: tl.tensor,
    logits: tl.tensor,
    logits_row: tl.tensor,
    vocabulary: tl.tensor,
    count: tl.tensor,
    suppressed: tl.tensor,
    offset: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Program row * count + tile reduces TILE logits; column ``suppressed``, -1 for none, is never the best."""
    row = (tl.program_id(0) // count).to(tl.int64)
    first = tl.program_id(0) % count * TILE
    column = first + tl.arange(0, TILE)
    inside = column < vocabulary
    start = logits + row * logits_row
    value = tl.load(start + column, mask=inside, other=float("-inf")).to(tl.float32)
    allowed = tl.where(column == suppressed, float("-inf"), value)
    most = tl.max(allowed, axis=0)
    found = tl.min(tl.where(allowed == most, column, vocabulary - 1), axis=0)
    held = (suppressed >= first) & (suppressed < first + TILE) & (suppressed < vocabulary)
    peak = tl.maximum(most, tl.load(start + suppressed, mask=held, other=float("-inf")).to(tl.float32))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    part = tl.program_id(0).to(tl.int64)
    tl.store(best + part, most)
    tl.store(token + part, tl.minimum(found, vocabulary - 1).to(tl.int64) + offset)
    tl.store(maximum + part, peak)
    tl.store(sumexp + part, tl.sum(tl.exp(value - shift), axis=0))


@triton.jit(
    do_not_specialize=[
        "out_best",
        "out_token",
        "out_maximum",
        "out_sumexp",
        "best",
        "token",
        "maximum",
        "sumexp",
        "count",
        "row_stride",
        "part_stride",
    ]
)
def merge_parts(
    out_best: tl.tensor,
    out_token: tl.tensor,
    out_maximum: tl.tensor,
    out_sumexp: tl.tensor,
    best: tl.tensor,
    token: tl.tensor,
    maximum: tl.tensor,
    sumexp: tl.tensor,
    count: tl.tensor,
    row_stride: tl.tensor,
    part_stride: tl.tensor,
    WIDTH: tl.constexpr,
    FINAL: tl.constexpr,
) -> None:
    """Program row merges its ``count`` parts; FINAL writes the probability of the token as ``out_best``."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, WIDTH)
    inside = part < count
    place = row * row_stride + part.to(tl.int64) * part_stride
    bests = tl.load(best + place, mask=inside, other=float("-inf"))
    tokens = tl.load(token + place, mask=inside, other=0)
    peaks = tl.load(maximum + place, mask=inside, other=float("-inf"))
    sums = tl.load(sumexp + place, mask=inside, other=0.0)
    most = tl.max(bests, axis=0)
    last = tl.max(tokens, axis=0)
    found = tl.min(tl.where(inside & (bests == most), tokens, last), axis=0)
    peak = tl.max(peaks, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    # The sum of a part of -inf alone is 0.
    total = tl.sum(sums * tl.exp(peaks - shift), axis=0)
    tl.store(out_token + row, found)
    if FINAL:
        tl.store(out_best + row, tl.exp(most - shift) / total)
    else:
        tl.store(out_best + row, most)
        tl.store(out_maximum + row, peak)
        tl.store(out_sumexp + row, total)
