"""Times every attention backend: python -m repro.bench.attention --help

One layer's attention of a batch, as dllm-serve packs it: Refresh (each request over its own rows) and Reuse (a
window's rows over a run of a KV pool whose runs lie in any order, with gaps).

    floor     the least time the device could take: max(FLOPs / peak, bytes / bandwidth), both peaks as measured
              on this device; 4 FLOPs per query, key, head and channel; q, k, v read once, out written once
    bound     what the floor is made of: compute or memory
    ratio     time / floor. Operands that fit into the last cache are read faster than memory: below 1 is possible

Medians over calls after warm-up; on CUDA between events. A backend that cannot serve is listed with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.attention import BACKENDS, Spans, VarlenAttention, attention_backend, availability
from engines.cost.peaks import Peaks, measured_peaks, seconds_of
from repro.bench.common import Rows, add_counts, add_device, device_of, facts_of, parser_of, run, table


@dataclass(frozen=True, kw_only=True)
class Heads:
    n_heads: int
    n_kv_heads: int
    head_dim: int
    longest: int
    """Rows of a Refresh request; a Reuse request keeps half of them."""
    window: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.head_dim, self.n_heads, self.n_kv_heads

    def work(self, q_len: Sequence[int], k_len: Sequence[int], itemsize: int) -> tuple[int, int]:
        """What no implementation can avoid: FLOPs, and bytes moved."""
        products = sum(q * k for q, k in zip(q_len, k_len, strict=True))
        moved = 2 * itemsize * self.head_dim * (sum(q_len) * self.n_heads + sum(k_len) * self.n_kv_heads)
        return 4 * products * self.n_heads * self.head_dim, moved


MODELS = {
    "tiny": Heads(n_heads=8, n_kv_heads=8, head_dim=20, longest=240, window=16),
    "llada-8b": Heads(n_heads=32, n_kv_heads=32, head_dim=128, longest=1280, window=32),
}
"""The embedded model at its usual lengths; LLaDA-8B with prompts up to 1,024 tokens and 256 generated ones."""
PHASES = ("refresh", "reuse")
WARM_UP = 5


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    q: Tensor
    k: Tensor
    v: Tensor
    spans: Spans
    flops: int
    moved_bytes: int

    @staticmethod
    def make(heads: Heads, phase: str, size: int, device: torch.device, dtype: torch.dtype) -> AttentionBatch:
        """Request lengths spread from half the longest to the longest, in an order that is not theirs."""
        random = np.random.default_rng(0)
        length = random.permutation(np.linspace(heads.longest / 2, heads.longest, size).round().astype(int))
        if phase == "refresh":
            q_len = k_len = length
            starts, num_keys = None, int(length.sum())
        else:
            q_len = np.full(size, heads.window)
            k_len = length // 2 + heads.window
            gap = heads.window
            order = random.permutation(size)
            starts = np.empty(size, dtype=int)
            starts[order] = np.cumsum(k_len[order] + gap) - k_len[order]
            num_keys = int(k_len.sum()) + size * gap
        spans = Spans.of_lengths(q_len, starts, None if starts is None else k_len, device=device)
        generator = torch.Generator(device).manual_seed(0)

        def draw(rows: int, count: int) -> Tensor:
            return torch.randn(rows, count, heads.head_dim, generator=generator, device=device, dtype=dtype)

        flops, moved_bytes = heads.work(q_len.tolist(), k_len.tolist(), dtype.itemsize)
        return AttentionBatch(
            q=draw(int(q_len.sum()), heads.n_heads),
            k=draw(num_keys, heads.n_kv_heads),
            v=draw(num_keys, heads.n_kv_heads),
            spans=spans,
            flops=flops,
            moved_bytes=moved_bytes,
        )


def time_backend(backend: VarlenAttention, batch: AttentionBatch, repeats: int) -> float:
    spans = batch.spans if backend.needs_host_runs else replace(batch.spans, q_runs=None, k_runs=None)
    out = torch.zeros_like(batch.q)

    def call() -> None:
        backend(batch.q, batch.k, batch.v, spans, out)

    with torch.inference_mode():
        for _ in range(WARM_UP):
            call()
        return median(seconds_of(call, batch.q.device, repeats))


def row(
    model: str, phase: str, size: int, name: str, batch: AttentionBatch, peaks: Peaks, repeats: int
) -> dict[str, Any]:
    heads = MODELS[model]
    backend = attention_backend(name, batch.q.device, batch.q.dtype, *heads.shape)
    computing, moving = batch.flops / peaks.flops_per_s, batch.moved_bytes / peaks.bytes_per_s
    floor = max(computing, moving)
    seconds = time_backend(backend, batch, repeats)
    return {
        "model": model,
        "phase": phase,
        "batch_size": size,
        "backend": name,
        "layout": getattr(backend, "layout", "-"),  # how a flash kernel reads the keys
        "time_us": seconds * 1e6,
        "floor_us": floor * 1e6,
        "ratio": seconds / floor,
        "bound": "compute" if computing >= moving else "memory",
    }


def main() -> None:
    parser = parser_of(__doc__)
    add_device(parser)
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), help="[default: both on CUDA, tiny on the CPU]")
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    add_counts(parser, batch=((1, 8, 32), "requests of a step"), repeats=(30, "calls timed, after some to warm up"))
    options = parser.parse_args()
    device, dtype = device_of(options)

    peaks = measured_peaks(device, dtype)
    reasons: dict[str, str] = {}
    known = {**facts_of(device, dtype), "flops_per_s": peaks.flops_per_s, "bytes_per_s": peaks.bytes_per_s}
    rows = Rows(options.json, {**known, "not_timed": reasons})
    for model in options.model or (tuple(MODELS) if device.type == "cuda" else ("tiny",)):
        missing = availability(device, dtype, *MODELS[model].shape)
        reasons.update({f"{model}, {name}": why for name, why in missing.items() if why and name in options.backend})
        for phase in options.phase:
            for size in options.batch:
                batch = AttentionBatch.make(MODELS[model], phase, size, device, dtype)
                for name in [name for name in options.backend if missing[name] is None]:
                    rows.add(row(model, phase, size, name, batch, peaks, options.repeats))
    rows.save()
    print(
        f"{device}, {str(dtype).removeprefix('torch.')}: {peaks.flops_per_s / 1e12:.3g} TFLOP/s, "
        f"{peaks.bytes_per_s / 1e9:.4g} GB/s"
    )
    print(table(rows.rows))
    for where, why in reasons.items():
        print(f"not timed: {where}: {why}")


if __name__ == "__main__":
    run(main)
