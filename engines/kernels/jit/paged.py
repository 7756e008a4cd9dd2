from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["cu_q", "used_k", "table", "width"])
def paged_causal(
    out: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cu_q: tl.tensor,
    used_k: tl.tensor,
    table: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Program (tile, key head, sequence): ROWS rows, each a query of one head of the group, over their keys in tiles of
    KEYS, with the softmax as it goes."""
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first = tl.load(cu_q + sequence)
    count = tl.load(cu_q + sequence + 1) - first
    used = tl.load(used_k + sequence)
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query, member = place // GROUP, place % GROUP
    is_real = query < count
    # Queries stand at the end of their keys.
    position = tl.where(is_real, used - count + query, -1)
    d = tl.arange(0, WIDTH)
    mask = is_real[:, None] & (d < D)[None, :]
    row, own = (first + query).to(tl.int64), head * GROUP + member
    queries = tl.load(q + (row * q_row + own * q_head)[:, None] + d[None, :], mask=mask, other=0.0)
    best, weight = tl.full((ROWS,), float("-inf"), dtype=tl.float32), tl.zeros((ROWS,), dtype=tl.float32)
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for start in range(0, tl.max(position, axis=0) + 1, KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = key < used
        block = tl.load(table + sequence * width + key // BLOCK, mask=is_key, other=0).to(tl.int64)
        at = ((block * BLOCK + key % BLOCK) * k_row + head * k_head)[:, None] + d[None, :]
        inside = is_key[:, None] & (d < D)[None, :]
        keys = tl.load(k + at, mask=inside, other=0.0)
        score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, axis=1))
        # A row that has seen nothing yet has no best: its weights are zero.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(score - base[:, None])
        kept = tl.exp2(best - base)
        weight = weight * kept + tl.sum(share, axis=1)
        values = tl.load(v + at, mask=inside, other=0.0)
        total = total * kept[:, None] + tl.dot(share.to(values.dtype), values, input_precision=PRECISION)
        best = higher
    mean = (total / tl.where(weight == 0.0, 1.0, weight)[:, None]).to(out.dtype.element_ty)
    at = (row * tl.num_programs(1) * GROUP + own) * D
    tl.store(out + at[:, None] + d[None, :], mean, mask=mask)
