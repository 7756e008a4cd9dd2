from __future__ import annotations

import triton
import triton.language as tl


# What changes from step to step is not specialized on: no step waits for another compilation.
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
    pool_k: tl.tensor,
    pool_v: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    chosen: tl.tensor,
    run_start: tl.tensor,
    block_start: tl.tensor,
    window_len: tl.tensor,
    kept: tl.tensor,
    kv_start: tl.tensor,
    pool_k_row: tl.tensor,
    pool_k_head: tl.tensor,
    pool_v_row: tl.tensor,
    pool_v_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    chosen_request: tl.tensor,
    chosen_head: tl.tensor,
    D: tl.constexpr,
    SELECTED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
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
