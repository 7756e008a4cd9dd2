from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["run_start", "block_start", "block_len"])
def mean_queries(
    out: tl.tensor,
    q: tl.tensor,
    run_start: tl.tensor,
    block_start: tl.tensor,
    block_len: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Program (head, request): mean over the block's rows, and over GROUP query heads, into out [n, heads, D]."""
    head = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    length = tl.load(block_len + request).to(tl.int32)
    first_row = tl.load(run_start + request) + tl.load(block_start + request)
    d = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for g in tl.static_range(GROUP):
        for tile in range(TILES):
            place = tile * ROWS + tl.arange(0, ROWS)
            mask = (place < length)[:, None] & (d < D)[None, :]
            row = (first_row + place)[:, None]
            part = tl.load(q + row * q_row + (head * GROUP + g) * q_head + d[None, :], mask=mask, other=0.0)
            total += tl.sum(part.to(tl.float32), axis=0)
    mean = total / tl.maximum(length * GROUP, 1).to(tl.float32)
    tl.store(out + (request * tl.num_programs(0) + head) * D + d, mean, mask=d < D)


@triton.jit(do_not_specialize=["run_start", "block_start", "window_len", "num_context", "max_context"])
def pooled_scores(
    out: tl.tensor,
    mean_q: tl.tensor,
    k: tl.tensor,
    run_start: tl.tensor,
    block_start: tl.tensor,
    window_len: tl.tensor,
    num_context: tl.tensor,
    max_context: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    D: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIFORM: tl.constexpr,
    RADIUS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Program (tile, head, request): scores of TILE context rows, all but RADIUS at each end pooled and stored."""
    head = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2).to(tl.int64)
    count = tl.load(num_context + request)
    start = tl.load(block_start + request)
    place = tl.arange(0, TILE)
    context = (tl.program_id(0) * (TILE - 2 * RADIUS) - RADIUS + place).to(tl.int64)
    inside = (context >= 0) & (context < count)
    position = tl.where(context < start, context, context + tl.load(window_len + request))
    row = (tl.load(run_start + request) + position)[:, None]
    d = tl.arange(0, WIDTH)
    mask = inside[:, None] & (d < D)[None, :]
    if UNIFORM:
        score = tl.zeros((TILE,), dtype=tl.float32)
        for g in range(KV_HEADS):
            mean = tl.load(mean_q + (request * KV_HEADS + g) * D + d, mask=d < D, other=0.0)
            keys = tl.load(k + row * k_row + g * k_head + d[None, :], mask=mask, other=0.0).to(tl.float32)
            score += tl.sum(keys * mean[None, :], axis=1)
        score = score / KV_HEADS
    else:
        keys = tl.load(k + row * k_row + head * k_head + d[None, :], mask=mask, other=0.0).to(tl.float32)
        score = tl.full((TILE,), float("-inf"), dtype=tl.float32)
        for g in tl.static_range(GROUP):
            query = (request * KV_HEADS + head) * GROUP + g
            mean = tl.load(mean_q + query * D + d, mask=d < D, other=0.0)
            score = tl.maximum(score, tl.sum(keys * mean[None, :], axis=1))
    score = tl.where(inside, score, float("-inf"))
    pooled = score
    for shift in tl.static_range(1, RADIUS + 1):
        pooled = tl.maximum(pooled, tl.gather(score, tl.maximum(place - shift, 0), 0))
        pooled = tl.maximum(pooled, tl.gather(score, tl.minimum(place + shift, TILE - 1), 0))
    pooled = tl.where(inside, pooled, float("-inf"))
    stored = (place >= RADIUS) & (place < TILE - RADIUS) & (context < max_context)
    tl.store(out + (request * tl.num_programs(1) + head) * max_context + context, pooled, mask=stored)
