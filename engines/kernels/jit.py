"""The Triton kernels themselves. Importing this module imports triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["best", "token", "maximum", "sumexp", "count", "suppressed", "offset"])
def reduce_tiles(
    best, token, maximum, sumexp, logits, logits_row, vocabulary, count, suppressed, offset, TILE: tl.constexpr
):
    """Program row * count + tile reduces TILE logits; column ``suppressed``, -1 for none, is never the best."""
    row = (tl.program_id(0) // count).to(tl.int64)
    first = tl.program_id(0) % count * TILE
    column = first + tl.arange(0, TILE)
    inside = column < vocabulary
    start = logits + row * logits_row
    value = tl.load(start + column, mask=inside, other=float("-inf")).to(tl.float32)
    allowed = tl.where(column == suppressed, float("-inf"), value)
    highest = tl.max(allowed, axis=0)
    top_column = tl.min(tl.where(allowed == highest, column, vocabulary - 1), axis=0)
    is_here = (suppressed >= first) & (suppressed < first + TILE) & (suppressed < vocabulary)
    peak = tl.maximum(highest, tl.load(start + suppressed, mask=is_here, other=float("-inf")).to(tl.float32))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    part = tl.program_id(0).to(tl.int64)
    tl.store(best + part, highest)
    tl.store(token + part, tl.minimum(top_column, vocabulary - 1).to(tl.int64) + offset)
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
    out_best,
    out_token,
    out_maximum,
    out_sumexp,
    best,
    token,
    maximum,
    sumexp,
    count,
    row_stride,
    part_stride,
    WIDTH: tl.constexpr,
    FINAL: tl.constexpr,
):
    """Program row merges its ``count`` parts; FINAL writes the probability of the token as ``out_best``."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, WIDTH)
    inside = part < count
    offset = row * row_stride + part.to(tl.int64) * part_stride
    bests = tl.load(best + offset, mask=inside, other=float("-inf"))
    tokens = tl.load(token + offset, mask=inside, other=0)
    peaks = tl.load(maximum + offset, mask=inside, other=float("-inf"))
    sums = tl.load(sumexp + offset, mask=inside, other=0.0)
    highest = tl.max(bests, axis=0)
    last = tl.max(tokens, axis=0)
    top_token = tl.min(tl.where(inside & (bests == highest), tokens, last), axis=0)
    peak = tl.max(peaks, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    # The sum of a part of -inf alone is 0.
    total = tl.sum(sums * tl.exp(peaks - shift), axis=0)
    tl.store(out_token + row, top_token)
    if FINAL:
        tl.store(out_best + row, tl.exp(highest - shift) / total)
    else:
        tl.store(out_best + row, highest)
        tl.store(out_maximum + row, peak)
        tl.store(out_sumexp + row, total)


# We do not specialize on arguments that change from step to step, so no step waits for another compilation.
@triton.jit(
    do_not_specialize=[
        "chosen",
        "run_start",
        "block_start",
        "window_len",
        "kept",
        "kv_start",
        "chosen_request",
        "chosen_head",
    ]
)
def pack_rows(
    pool_k,
    pool_v,
    k,
    v,
    chosen,
    run_start,
    block_start,
    window_len,
    kept,
    kv_start,
    pool_k_row,
    pool_k_head,
    pool_v_row,
    pool_v_head,
    k_row,
    k_head,
    v_row,
    v_head,
    chosen_request,
    chosen_head,
    D: tl.constexpr,
    SELECTED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program (head, tile, request) moves rows tile * ROWS... of one head."""
    head = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS
    request = tl.program_id(2).to(tl.int64)
    count = tl.load(kept + request)
    if first >= count:
        return
    rank = first + tl.arange(0, ROWS)
    inside = rank < count
    if SELECTED:
        entry = chosen + request * chosen_request + head * chosen_head + rank
        context = tl.load(entry, mask=inside, other=0).to(tl.int64)
    else:
        context = rank.to(tl.int64)
    start = tl.load(block_start + request)
    position = tl.where(context < start, context, context + tl.load(window_len + request))
    source = (tl.load(run_start + request) + position)[:, None]
    target = (tl.load(kv_start + request) + rank)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    mask = inside[:, None] & (d < D)
    keys = tl.load(k + source * k_row + head * k_head + d, mask=mask)
    values = tl.load(v + source * v_row + head * v_head + d, mask=mask)
    tl.store(pool_k + target * pool_k_row + head * pool_k_head + d, keys, mask=mask)
    tl.store(pool_v + target * pool_v_row + head * pool_v_head + d, values, mask=mask)


@triton.jit
def normalize_rows(
    out, x, weight, delta, x_row, delta_row, eps, D: tl.constexpr, ADDS: tl.constexpr, WIDTH: tl.constexpr
):
    """Program row normalises one row; stored values have x's dtype, sums are float32."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    mask = d < D
    pointers = x + row * x_row + d
    value = tl.load(pointers, mask=mask, other=0.0)
    dtype: tl.constexpr = value.dtype
    if ADDS:
        added = tl.load(delta + row * delta_row + d, mask=mask, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(dtype)
        tl.store(pointers, value, mask=mask)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / D + eps)
    unit = (wide * scale).to(dtype).to(tl.float32)
    factor = tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * D + d, (unit * factor).to(dtype), mask=mask)


@triton.jit
def _rounded(x, dtype: tl.constexpr, FULL: tl.constexpr):
    """Round to a float32 that ``dtype`` can hold, unless FULL precision is asked for."""
    return x if FULL else x.to(dtype).to(tl.float32)


@triton.jit
def _rotate_heads(
    x,
    cos,
    sin,
    first,
    head_stride,
    TOTAL: tl.constexpr,
    HALF: tl.constexpr,
    FULL: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
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
    q,
    k,
    cos,
    sin,
    q_row,
    q_head,
    k_row,
    k_head,
    cos_row,
    sin_row,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    FULL: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
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


@triton.jit(do_not_specialize=["run_start", "block_start", "block_len"])
def mean_queries(
    out,
    q,
    run_start,
    block_start,
    block_len,
    q_row,
    q_head,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program (head, request) takes the mean over the block's rows, and over GROUP query heads, into out [n, heads, D]."""
    head = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    length = tl.load(block_len + request).to(tl.int32)
    first_row = tl.load(run_start + request) + tl.load(block_start + request)
    d = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for g in tl.static_range(GROUP):
        for tile in range(TILES):
            index = tile * ROWS + tl.arange(0, ROWS)
            mask = (index < length)[:, None] & (d < D)[None, :]
            row = (first_row + index)[:, None]
            part = tl.load(q + row * q_row + (head * GROUP + g) * q_head + d[None, :], mask=mask, other=0.0)
            total += tl.sum(part.to(tl.float32), axis=0)
    mean = total / tl.maximum(length * GROUP, 1).to(tl.float32)
    tl.store(out + (request * tl.num_programs(0) + head) * D + d, mean, mask=d < D)


@triton.jit(do_not_specialize=["run_start", "block_start", "window_len", "num_context", "max_context"])
def pooled_scores(
    out,
    mean_q,
    k,
    run_start,
    block_start,
    window_len,
    num_context,
    max_context,
    k_row,
    k_head,
    D: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIFORM: tl.constexpr,
    RADIUS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program (tile, head, request) scores TILE context rows, and pools and stores all but RADIUS at each end."""
    head = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2).to(tl.int64)
    count = tl.load(num_context + request)
    start = tl.load(block_start + request)
    index = tl.arange(0, TILE)
    context = (tl.program_id(0) * (TILE - 2 * RADIUS) - RADIUS + index).to(tl.int64)
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
        pooled = tl.maximum(pooled, tl.gather(score, tl.maximum(index - shift, 0), 0))
        pooled = tl.maximum(pooled, tl.gather(score, tl.minimum(index + shift, TILE - 1), 0))
    pooled = tl.where(inside, pooled, float("-inf"))
    stored = (index >= RADIUS) & (index < TILE - RADIUS) & (context < max_context)
    tl.store(out + (request * tl.num_programs(1) + head) * max_context + context, pooled, mask=stored)


@triton.jit(do_not_specialize=["rows"])
def store_rows(
    pool_k, pool_v, rows, k, v, pool_k_row, pool_v_row, k_row, v_row, SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Program (row, tile) copies TILE values of one row of k, and of v."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(rows + row)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = i < SIZE
    keys = tl.load(k + row * k_row + i, mask=mask)
    values = tl.load(v + row * v_row + i, mask=mask)
    tl.store(pool_k + target * pool_k_row + i, keys, mask=mask)
    tl.store(pool_v + target * pool_v_row + i, values, mask=mask)


@triton.jit(do_not_specialize=["count"])
def gate_rows(out, gate, up, gate_row, up_row, width, count, TILE: tl.constexpr):
    """Program row * count + tile computes TILE values of silu(gate) * up."""
    row = (tl.program_id(0) // count).to(tl.int64)
    column = tl.program_id(0) % count * TILE + tl.arange(0, TILE)
    mask = column < width
    narrow = tl.load(gate + row * gate_row + column, mask=mask, other=0.0)
    dtype: tl.constexpr = narrow.dtype
    wide = narrow.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
    factor = tl.load(up + row * up_row + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (silu * factor).to(dtype), mask=mask)
