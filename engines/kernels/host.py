"""The kernels of ``host.cpp`` and ``spans.cpp``, for CPUs, compiled for this machine on first use.

Each replaces several torch operators, whose calls cost more than the few rows of a step. They give their references' numbers within
rounding, and the same row alone and in a batch. If there is no compiler, or its code is wrong on an example (``engines.kernels.probe``),
torch's operators serve.
"""

from collections.abc import Callable, Mapping
from ctypes import c_bool, c_float, c_long
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engines.compiled import Library, Pointer, load_library
from engines.models.layers import rotate_halves
from engines.runtime.device import store_by_index

DTYPES: Mapping[torch.dtype, str] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_P, _N, _F, _B = Pointer, c_long, c_float, c_bool
_ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "rms_norm": (_P, _P, _P, _P, _N, _N, _F, _N),
    "rotate": (_P, _P, _P, _P, _N, _N, _N, _N, _N, _N, _B, _N),
    "swiglu": (_P, _P, _P, _N, _N, _N, _N, _N),
    "store": (_P, _P, _P, _P, _P, _N, _N, _N, _N),
    "decode": (*[_P] * 7, *[_N] * 8),
    "attend": (*[_P] * 10, *[_N] * 8),
    "spans": (*[_P] * 9, *[_N] * 9),
}
MOST_WIDTH = 256
"""The widest head that the kernels take."""


LIBRARY = Library(
    "host",
    tuple(Path(__file__).with_name(name) for name in ("host.cpp", "spans.cpp")),
    ("-O3", "-march=native", "-pthread"),
    headers=(Path(__file__).with_name("lanes.hpp"),),
)


@lru_cache(maxsize=64)
def _kernel(name: str, dtype: torch.dtype) -> Callable[..., None]:
    function = load_library(LIBRARY)[f"{name}_{DTYPES[dtype]}"]
    function.argtypes, function.restype = _ARGUMENTS[name], None
    return function


def expect(condition: bool, requirement: str) -> None:
    """Raise ValueError unless ``condition`` holds: a caller's mistake, not a user's."""
    if not condition:
        raise ValueError(f"wanted {requirement}")


def rms_norm(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """Return [N, d] like ``RMSNorm``, for x [N, d], which first becomes x + delta if delta is given."""
    rows, width = x.shape
    expect(x.is_contiguous() and (delta is None or delta.is_contiguous()), "contiguous x and delta [N, d]")
    y = torch.empty_like(x)
    _kernel("rms_norm", x.dtype)(x, delta, weight, y, rows, width, eps, torch.get_num_threads())
    return y


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, full_precision: bool) -> None:
    """Like ``engines.kernels.rowwise.rotate``."""
    rows, heads, width = q.shape
    expect(_has_whole_rows(q) and _has_whole_rows(k), "q [N, H, D] and k [N, Hkv, D], heads side by side")
    cos, sin = (table.to(torch.float32).contiguous() for table in (cos, sin))
    strides = q.stride(0), k.stride(0)
    sizes = rows, heads, k.shape[1], width, *strides
    _kernel("rotate", q.dtype)(q, k, cos, sin, *sizes, not full_precision, torch.get_num_threads())


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Like ``engines.kernels.rowwise.swiglu``."""
    rows, width = gate.shape
    expect(gate.stride(1) == up.stride(1) == 1, "gate and up [N, F] with contiguous F")
    out = gate.new_empty((rows, width))
    strides = gate.stride(0), up.stride(0)
    _kernel("swiglu", gate.dtype)(gate, up, out, rows, width, *strides, torch.get_num_threads())
    return out


def store(pool_k: Tensor, pool_v: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    """Like ``engines.kernels.pack.store``; if a row is named twice, the last write stays."""
    expect(all(_has_whole_rows(x) for x in (k, v)), "k and v [M, Hkv, D], heads side by side in a row")
    expect(pool_k.is_contiguous() and pool_v.is_contiguous() and rows.is_contiguous(), "a contiguous pool and rows")
    sizes = len(rows), k.shape[1] * k.shape[2], k.stride(0), v.stride(0)
    _kernel("store", k.dtype)(pool_k, pool_v, rows, k, v, *sizes)


def decode(
    q: Tensor, pool_k: Tensor, pool_v: Tensor, slots: Tensor, lengths: Tensor, table: Tensor, block_size: int
) -> Tensor:
    """Attend one query per sequence; return [N, H, D]. Row i of q [N, H, D] sees the first ``lengths[i]`` tokens of ``slots[i]``. Their
    blocks of ``block_size`` rows in pool_k and pool_v [R, Hkv, D] are ``table[slots[i]]``. Rows past the n sequences are zeros."""
    heads, width = q.shape[1:]
    expect(_has_whole_rows(q) and pool_k.is_contiguous() and pool_v.is_contiguous(), "whole rows of q and the pool")
    expect(width <= MOST_WIDTH and table.dtype == torch.int32, f"heads of at most {MOST_WIDTH}, table int32")
    out = q.new_zeros(q.shape)
    sizes = len(slots), table.shape[1], block_size, heads, pool_k.shape[1], width, q.stride(0)
    _kernel("decode", q.dtype)(q, pool_k, pool_v, out, slots, lengths, table, *sizes, torch.get_num_threads())
    return out


def attend(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    rows: Tensor,
    place: tuple[Tensor, Tensor, Tensor, int],
) -> Tensor:
    """Rotate, store and ``decode`` a joined product qkv [N, (H + 2 Hkv) * D]; return [N, H * D]. q and k are rotated in place, as by
    ``rotate`` without full precision. k and v go to ``rows`` of the pools; ``place`` is (slots, lengths, table, block size)."""
    slots, lengths, table, block_size = place
    kv_heads, width = pool_k.shape[1:]
    heads = qkv.shape[1] // width - 2 * kv_heads
    expect(qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous(), "whole rows of products and tables")
    expect(pool_k.is_contiguous() and pool_v.is_contiguous(), "a contiguous pool")
    expect(cos.dtype == sin.dtype == pool_k.dtype == qkv.dtype and width <= MOST_WIDTH, "one dtype, heads not too wide")
    out = qkv.new_zeros((len(rows), heads * width))
    tensors = qkv, cos, sin, pool_k, pool_v, rows, out, slots, lengths, table
    sizes = len(rows), len(slots), table.shape[1], block_size, heads, kv_heads, width
    _kernel("attend", qkv.dtype)(*tensors, *sizes, torch.get_num_threads())
    return out


class Runs(NamedTuple):
    """int32 [n] on the CPU. Sequence i has rows ``q_start`` to ``q_end`` of q, and ``k_len`` rows of k and v from ``k_start``. It sees the
    first ``seen`` of these, or all; unseen rows are multiplied, too, with zero."""

    q_start: Tensor
    q_end: Tensor
    k_start: Tensor
    k_len: Tensor
    seen: Tensor | None = None


def attend_runs(q: Tensor, k: Tensor, v: Tensor, runs: Runs, out: Tensor) -> Tensor:
    """Attend q [Nq, H, D] to k and v [Nk, Hkv, D], bidirectionally; return ``out`` [Nq, H, D], with the sequences' rows filled."""
    heads, width = q.shape[1:]
    expect(
        all(_has_whole_rows(x) for x in (q, k, v, out)), "q, k, v and out [N, heads, D], heads side by side in a row"
    )
    expect(q.dtype == k.dtype == v.dtype == out.dtype and width <= MOST_WIDTH, "one dtype, heads not too wide")
    arrays = [array for array in runs if array is not None]
    expect(
        all(x.dtype == torch.int32 and x.is_contiguous() and len(x) == len(runs.k_len) for x in arrays), "int32 runs"
    )
    strides = q.stride(0), k.stride(0), v.stride(0), out.stride(0)
    sizes = len(runs.k_len), heads, k.shape[1], width, *strides
    _kernel("spans", q.dtype)(q, k, v, out, *runs, *sizes, torch.get_num_threads())
    return out


def attend_runs_reference(q: Tensor, k: Tensor, v: Tensor, runs: Runs, out: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    num_keys = runs.k_len if runs.seen is None else runs.seen
    for start, end, first, keys in torch.stack((runs.q_start, runs.q_end, runs.k_start, num_keys), dim=1).tolist():
        keys_k, keys_v = (x[first : first + keys].float().repeat_interleave(group, dim=1) for x in (k, v))
        shares = torch.softmax(torch.einsum("qhd,lhd->hql", q[start:end].float(), keys_k) * q.shape[2] ** -0.5, dim=-1)
        out[start:end] = torch.einsum("hql,lhd->qhd", shares, keys_v).to(q.dtype)
    return out


def decode_reference(
    q: Tensor, pool_k: Tensor, pool_v: Tensor, slots: Tensor, lengths: Tensor, table: Tensor, block_size: int
) -> Tensor:
    out, group = torch.zeros_like(q), q.shape[1] // pool_k.shape[1]
    for i, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        position = torch.arange(length)
        rows = table[slot, position // block_size].long() * block_size + position % block_size
        k, v = (x[rows].float().repeat_interleave(group, dim=1) for x in (pool_k, pool_v))
        shares = torch.softmax(torch.einsum("hd,lhd->hl", q[i].float(), k) * q.shape[2] ** -0.5, dim=-1)
        out[i] = torch.einsum("hl,lhd->hd", shares, v).to(q.dtype)
    return out


def attend_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    rows: Tensor,
    place: tuple[Tensor, Tensor, Tensor, int],
) -> Tensor:
    kv_heads, width = pool_k.shape[1:]
    heads = qkv.unflatten(1, (-1, width))
    rotated = rotate_halves(heads[:, :-kv_heads], cos, sin)
    store_by_index(pool_k, pool_v, rows, rotated[:, -kv_heads:], heads[:, -kv_heads:])
    return decode_reference(rotated[:, :-kv_heads], pool_k, pool_v, *place).flatten(1)


def _has_whole_rows(x: Tensor) -> bool:
    return x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
