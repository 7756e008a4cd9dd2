"""Times every attention backend: python benchmarks/attention.py --help

One layer's attention of a batch, as dllm-serve packs it: Refresh (each request over its own rows) and Reuse (a
window's rows over a run of a KV pool whose runs lie in any order, with gaps).

    floor     the least time the device could take: max(FLOPs / peak, bytes / bandwidth), both peaks as measured
              on this device; 4 FLOPs per query, key, head and channel; q, k, v read once, out written once
    ratio     time / floor. Operands that fit into the last cache are read faster than memory: below 1 is possible

Medians over calls after warm-up; on CUDA between events; with --graph as replays of a captured graph (launches,
which dominate small batches, then cost nothing). A backend that cannot serve is listed with the reason.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from common import add_device, device_of, save
from torch import Tensor

from engines.attention import BACKENDS, Spans, VarlenAttention, attention_backend, availability
from engines.hardware.peaks import measured_peaks, seconds_of


@dataclass(frozen=True, kw_only=True)
class Heads:
    n_heads: int
    n_kv_heads: int
    head_dim: int
    longest: int
    """Rows of a Refresh request; a Reuse request keeps half of them."""
    window: int


MODELS = {
    "tiny": Heads(n_heads=8, n_kv_heads=8, head_dim=20, longest=240, window=16),
    "llada-8b": Heads(n_heads=32, n_kv_heads=32, head_dim=128, longest=1280, window=32),
}
"""The embedded model at its usual lengths; LLaDA-8B with prompts up to 1,024 tokens and 256 generated ones."""
PHASES = ("refresh", "reuse")
WARM_UP = 5


@dataclass(frozen=True, kw_only=True)
class Work:
    """What no implementation can avoid."""

    flops: int
    moved_bytes: int

    @staticmethod
    def of(
        q_len: Sequence[int], k_len: Sequence[int], *, heads: int, kv_heads: int, head_dim: int, itemsize: int
    ) -> Work:
        products = sum(q * k for q, k in zip(q_len, k_len, strict=True))
        return Work(
            flops=4 * products * heads * head_dim,
            moved_bytes=2 * itemsize * head_dim * (sum(q_len) * heads + sum(k_len) * kv_heads),
        )

    def floor_s(self, *, flops_per_s: float, bytes_per_s: float) -> float:
        return max(self.flops / flops_per_s, self.moved_bytes / bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class Batch:
    q: Tensor
    k: Tensor
    v: Tensor
    spans: Spans
    work: Work

    @staticmethod
    def make(heads: Heads, phase: str, size: int, device: torch.device, dtype: torch.dtype) -> Batch:
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

        return Batch(
            q=draw(int(q_len.sum()), heads.n_heads),
            k=draw(num_keys, heads.n_kv_heads),
            v=draw(num_keys, heads.n_kv_heads),
            spans=spans,
            work=Work.of(
                q_len.tolist(),
                k_len.tolist(),
                heads=heads.n_heads,
                kv_heads=heads.n_kv_heads,
                head_dim=heads.head_dim,
                itemsize=dtype.itemsize,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    model: str
    phase: str
    batch_size: int
    backend: str
    layout: str
    """How a flash kernel reads the keys (engines/attention/flash.py)."""
    graph: bool
    time_us: float
    floor_us: float
    ratio: float
    bound: str
    """What the floor is made of: compute or memory."""


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """The same work as one launch."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def time_backend(backend: VarlenAttention, batch: Batch, repeats: int, *, graph: bool) -> float:
    spans = batch.spans if backend.needs_host_runs else replace(batch.spans, q_runs=None, k_runs=None)
    out = torch.zeros_like(batch.q)

    def call() -> None:
        backend(batch.q, batch.k, batch.v, spans, out)

    with torch.inference_mode():
        run = captured(call) if graph else call
        for _ in range(WARM_UP):
            run()
        return median(seconds_of(run, batch.q.device, repeats))


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'model':9s} {'phase':8s} {'n':>4s} {'backend':13s} {'keys':7s} {'us':>10s} {'floor us':>10s} {'ratio':>7s} "
        f"{'bound':8s}"
    ]
    lines += [
        f"{r.model:9s} {r.phase:8s} {r.batch_size:4d} {r.backend:13s} {r.layout:7s} {r.time_us:10.1f} "
        f"{r.floor_us:10.1f} {r.ratio:7.2f} {r.bound:8s}"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), help="[default: both on CUDA, tiny on the CPU]")
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32], help="requests of a step")
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--graph", action="store_true", help="time replays of a captured graph (CUDA)")
    parser.add_argument("--repeats", type=int, default=30, help="calls timed, after some to warm up")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    device, dtype = device_of(options)
    if device.index is not None:
        torch.cuda.set_device(device)
    on_gpu = device.type == "cuda"
    if min(*options.batch, options.repeats) < 1:
        parser.error("--batch and --repeats count from 1")
    if options.graph and not on_gpu:
        parser.error("--graph needs --device cuda")

    peaks = measured_peaks(device, dtype)
    facts = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "device": str(device),
        "dtype": str(dtype),
        "threads": torch.get_num_threads(),
        "flops_per_s": peaks.flops_per_s,
        "bytes_per_s": peaks.bytes_per_s,
    }
    if on_gpu:
        facts["gpu"] = torch.cuda.get_device_name(device)
    rows: list[Row] = []
    reasons: dict[str, str] = {}
    for model in options.model or (tuple(MODELS) if on_gpu else ("tiny",)):
        heads = MODELS[model]
        shape = heads.head_dim, heads.n_heads, heads.n_kv_heads
        missing = availability(device, dtype, *shape)
        reasons.update({f"{model}, {name}": why for name, why in missing.items() if why and name in options.backend})
        for phase in options.phase:
            for size in options.batch:
                batch = Batch.make(heads, phase, size, device, dtype)
                floor = batch.work.floor_s(flops_per_s=peaks.flops_per_s, bytes_per_s=peaks.bytes_per_s)
                is_compute = batch.work.flops / peaks.flops_per_s >= floor
                for name in [name for name in options.backend if missing[name] is None]:
                    backend = attention_backend(name, device, dtype, *shape)
                    graph = options.graph and not backend.needs_host_runs
                    seconds = time_backend(backend, batch, options.repeats, graph=graph)
                    rows.append(
                        Row(
                            model=model,
                            phase=phase,
                            batch_size=size,
                            backend=name,
                            layout=getattr(backend, "layout", "-"),
                            graph=graph,
                            time_us=seconds * 1e6,
                            floor_us=floor * 1e6,
                            ratio=seconds / floor,
                            bound="compute" if is_compute else "memory",
                        )
                    )
                    save(options.json, rows, **facts, not_timed=reasons)
    print(
        f"{device}, {str(dtype).removeprefix('torch.')}: {peaks.flops_per_s / 1e12:.3g} TFLOP/s, "
        f"{peaks.bytes_per_s / 1e9:.4g} GB/s"
    )
    print(table(rows))
    for where, why in reasons.items():
        print(f"not timed: {where}: {why}")
    save(options.json, rows, **facts, not_timed=reasons)


if __name__ == "__main__":
    main()
