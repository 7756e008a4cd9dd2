"""Times the CUDA path's kernels against torch and against memory: python benchmarks/kernels.py --help

Shapes are LLaDA-8B's, one layer of it: --requests of --length tokens build their cache, --rows rows pass the
layer's elementwise parts, --logits rows of logits are reduced. Random values.

    MiB          read and written, each input and output once
    floor        MiB / bandwidth, as peaks.py measures it on this device
    kernel       median of --repeats calls
    of floor     kernel / floor; 1 is as fast as memory allows
    reference    the same in torch: what the executor does without the kernel
    speed-up     reference / kernel

On CUDA a call is captured in a graph and replayed, the device's caches are overwritten before each replay, and events
time it. Kernels do not run on the CPU; there it times references only.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from common import save
from peaks import measured_peaks
from torch import Tensor

from engines.dllm.cache.sparsity import top_rows
from engines.kernels import available
from engines.kernels.building import Building
from engines.kernels.confidence import confidence, confidence_reference
from engines.kernels.pack import pack
from engines.kernels.rmsnorm import rms_norm, rms_norm_reference
from engines.kernels.rotary import rotate, rotate_reference
from engines.kernels.scores import scores, scores_reference
from engines.kernels.select import select
from engines.kernels.swiglu import swiglu, swiglu_reference
from engines.models.layers import inverse_frequencies, rotary_tables

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLUSH_BYTES = 512 * 2**20
"""Several times the largest last-level cache."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    device: torch.device
    dtype: torch.dtype
    rows: int
    requests: int
    length: int
    block: int
    retention: float
    pool_kernel: int
    logits: int
    width: int
    vocabulary: int

    @property
    def heads(self) -> int:
        return max(1, self.width // 128)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def context(self) -> int:
        return self.length - self.block

    @property
    def kept(self) -> int:
        return int(self.context * self.retention)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def building(self) -> Building:
        """Requests of one length, blocks in their middle."""
        i = torch.arange(self.requests, device=self.device)
        one = torch.ones_like(i)
        return Building(
            run_start=i * self.length,
            block_start=one * (self.context // 2),
            block_len=one * self.block,
            window_len=one * self.block,
            num_context=one * self.context,
            kept=one * self.kept,
            kv_start=i * (self.kept + self.block),
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    shape: str
    num_bytes: int
    kernel: Callable[[], object]
    reference: Callable[[], object]


def size_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def packing(at: Setting, heads: int) -> Work:
    """Packing with ``heads`` selections a request; 0 is the dense mode."""
    building = at.building()
    shape = (at.heads, at.head_dim)
    k, v = (at.random(at.requests * at.length, *shape) for _ in "kv")
    pool_k, pool_v = (at.random(at.requests * (at.kept + at.block), *shape) for _ in "kv")
    chosen = None
    if heads > 0:
        chosen = torch.rand(at.requests, heads, at.context, device=at.device).argsort(dim=-1)[..., : at.kept]
    rank = torch.arange(at.kept, device=at.device)
    target = (building.kv_start[:, None] + rank).flatten()
    context_rows = torch.stack(
        [building.rows(i, torch.arange(at.context, device=at.device)) for i in range(at.requests)]
    )
    request = torch.arange(at.requests, device=at.device).repeat_interleave(at.kept)
    ranks = rank.repeat(at.requests)
    head = torch.arange(at.heads, device=at.device)

    def reference() -> None:
        if chosen is None:
            source = context_rows[request, ranks]
            pool_k.index_copy_(0, target, k[source])
            pool_v.index_copy_(0, target, v[source])
            return
        source = context_rows[request.unsqueeze(1), chosen[request, :, ranks]].expand(-1, at.heads)
        pool_k.index_copy_(0, target, k[source, head])
        pool_v.index_copy_(0, target, v[source, head])

    moved = 4 * at.requests * at.kept * at.width * k.element_size()
    return Work(
        shape=f"{at.requests} x {at.kept} of {at.context} rows, {at.heads} x {at.head_dim}",
        num_bytes=moved + at.requests * at.kept * heads * 8,
        kernel=lambda: pack(pool_k, pool_v, k, v, building, chosen, at.kept),
        reference=reference,
    )


def scoring(at: Setting, selection: str) -> Work:
    building = at.building()
    q, k = (at.random(at.requests * at.length, at.heads, at.head_dim) for _ in "qk")
    how = (q, k, building, selection, at.pool_kernel, at.block, at.context)
    heads = 1 if selection == "uniform" else at.heads
    return Work(
        shape=f"{at.requests} x {at.context} rows, {at.heads} x {at.head_dim}",
        num_bytes=size_of(q[:1]) * at.requests * at.length + 4 * at.requests * heads * at.context,
        kernel=partial(scores, *how),  # type: ignore[arg-type]
        reference=partial(scores_reference, *how),  # type: ignore[arg-type]
    )


def selecting(at: Setting) -> Work:
    """``select`` lists by index, the sort by importance."""
    building = at.building()
    score = torch.randn(at.requests, at.heads, at.context, device=at.device)
    return Work(
        shape=f"{at.requests} x {at.heads} x {at.context} scores, {at.kept} kept",
        num_bytes=size_of(score) + 8 * at.requests * at.heads * at.kept,
        kernel=lambda: select(score, building.kept, at.kept),
        reference=lambda: top_rows(score, at.kept),
    )


def reduction(at: Setting) -> Work:
    logits = at.random(at.logits, at.vocabulary)
    suppress_id = at.vocabulary - 1
    return Work(
        shape=f"{at.logits} x {at.vocabulary}",
        num_bytes=size_of(logits) + 12 * at.logits,
        kernel=lambda: confidence(logits, suppress_id),
        reference=lambda: confidence_reference(logits, suppress_id),
    )


def norm(at: Setting) -> Work:
    x, delta, weight = at.random(at.rows, at.width), at.random(at.rows, at.width), at.random(at.width)
    return Work(
        shape=f"{at.rows} x {at.width}, residual added",
        num_bytes=4 * size_of(x) + size_of(weight),
        kernel=lambda: rms_norm(x, weight, 1e-5, delta),
        reference=lambda: rms_norm_reference(x, weight, 1e-5, delta),
    )


def rotation(at: Setting) -> Work:
    q, k = (at.random(at.rows, at.heads, at.head_dim) for _ in "qk")
    angles = torch.outer(torch.arange(at.rows, dtype=torch.float32), inverse_frequencies(at.head_dim, 5e5))
    cos, sin = (table.to(at.device) for table in rotary_tables(angles))
    return Work(
        shape=f"{at.rows} x 2 x {at.heads} x {at.head_dim}",
        num_bytes=2 * size_of(q, k) + size_of(cos, sin) // 2,
        kernel=lambda: rotate(q, k, cos, sin, full_precision=True),
        reference=lambda: rotate_reference(q, k, cos, sin, full_precision=True),
    )


def gating(at: Setting) -> Work:
    gate, up = at.random(at.rows, 3 * at.width), at.random(at.rows, 3 * at.width)
    return Work(
        shape=f"{at.rows} x {3 * at.width}",
        num_bytes=3 * size_of(gate),
        kernel=lambda: swiglu(gate, up),
        reference=lambda: swiglu_reference(gate, up),
    )


CASES: dict[str, Callable[[Setting], Work]] = {
    "pack-head": lambda at: packing(at, at.heads),
    "pack-uniform": lambda at: packing(at, 1),
    "pack-dense": lambda at: packing(at, 0),
    "scores-head": lambda at: scoring(at, "head"),
    "scores-uniform": lambda at: scoring(at, "uniform"),
    "select": selecting,
    "confidence": reduction,
    "rmsnorm": norm,
    "rotary": rotation,
    "swiglu": gating,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    kernel: str
    shape: str
    mib: float
    floor_ms: float
    kernel_ms: float | None
    """None where kernels do not run."""
    reference_ms: float

    @property
    def of_floor(self) -> float | None:
        return None if self.kernel_ms is None else self.kernel_ms / self.floor_ms

    @property
    def speed_up(self) -> float | None:
        return None if self.kernel_ms is None else self.reference_ms / self.kernel_ms


def timed_ms(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median over ``repeats``, after calls to warm up."""
    if device.type != "cuda":
        call()
        seconds = []
        for _ in range(repeats):
            started = perf_counter()
            call()
            seconds.append(perf_counter() - started)
        return median(seconds) * 1e3
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    events = []
    for _ in range(repeats + 3):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        scratch.zero_()
        started.record()
        graph.replay()
        ended.record()
        events.append((started, ended))
    torch.cuda.synchronize(device)
    return median(started.elapsed_time(ended) for started, ended in events[3:])


def measure(name: str, at: Setting, bytes_per_s: float, repeats: int) -> Row:
    torch.manual_seed(0)
    work = CASES[name](at)
    kernel_ms = None
    if at.device.type == "cuda" and available(at.device):
        kernel_ms = timed_ms(work.kernel, at.device, repeats)
    return Row(
        kernel=name,
        shape=work.shape,
        mib=work.num_bytes / 2**20,
        floor_ms=work.num_bytes / bytes_per_s * 1e3,
        kernel_ms=kernel_ms,
        reference_ms=timed_ms(work.reference, at.device, repeats),
    )


def table(rows: Sequence[Row]) -> str:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [
        f"{'kernel':15s} {'shape':36s} {'MiB':>8s} {'floor ms':>9s} {'kernel ms':>9s} {'of floor':>8s} "
        f"{'reference':>9s} {'speed-up':>8s}"
    ]
    lines += [
        f"{r.kernel:15s} {r.shape:36s} {r.mib:8.2f} {r.floor_ms:9.4f} {cell(r.kernel_ms, '.4f'):>9s} "
        f"{cell(r.of_floor, '.2f'):>8s} {r.reference_ms:9.4f} {cell(r.speed_up, '.1f'):>8s}"
        for r in rows
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(CASES)
    parser.add_argument("--kernel", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--rows", type=int, default=4096, help="packed rows of a step")
    parser.add_argument("--requests", type=int, default=8, help="that build their cache")
    parser.add_argument("--length", type=int, default=1024, help="of a request, prompt and answer")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--retention", type=float, default=0.5)
    parser.add_argument("--pool-kernel", type=int, default=3)
    parser.add_argument("--logits", type=int, default=256, help="rows of logits")
    parser.add_argument(
        "--width", type=int, default=4096, help="of the model: heads of 128, three times as much hidden"
    )
    parser.add_argument("--vocabulary", type=int, default=126464)
    parser.add_argument("--repeats", type=int, default=20, help="calls timed")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args(arguments)
    counts = (options.rows, options.requests, options.block, options.logits, options.vocabulary, options.repeats)
    if min(counts) < 1 or options.length <= options.block or not 0 < options.retention <= 1:
        parser.error("sizes count from 1, --length is more than --block, and --retention is in (0, 1]")
    if options.width % 2 or (options.width > 128 and options.width % 128):
        parser.error("--width is even, and above 128 a multiple of it")
    if options.pool_kernel % 2 == 0:
        parser.error("--pool-kernel is odd")

    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    at = Setting(
        device=device,
        dtype=dtype,
        rows=options.rows,
        requests=options.requests,
        length=options.length,
        block=options.block,
        retention=options.retention,
        pool_kernel=options.pool_kernel,
        logits=options.logits,
        width=options.width,
        vocabulary=options.vocabulary,
    )
    bytes_per_s = measured_peaks(device, dtype).bytes_per_s
    facts = {
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "dtype": options.dtype,
        "bytes_per_s": bytes_per_s,
    }
    rows = []
    with torch.inference_mode():
        for name in options.kernel:
            rows.append(measure(name, at, bytes_per_s, options.repeats))
            save(options.json, rows, **facts)
            print(f"{name} timed", file=sys.stderr)
    print(table(rows))
    if all(row.kernel_ms is None for row in rows):
        why = "triton is not installed" if device.type == "cuda" else f"kernels do not run on {device.type}"
        print(f"references only: {why}")


if __name__ == "__main__":
    main()
