"""Times the CUDA path's kernels against torch and against memory: python -m repro.bench.kernels --help

Shapes are LLaDA-8B's, one layer of it: --requests of --length tokens build their cache, --rows rows pass the
layer's elementwise parts, --logits rows of logits are reduced. Random values.

    mib          read and written, each input and output once
    floor_ms     mib / bandwidth, as peaks.py measures it on this device
    kernel_ms    median of --repeats calls
    of_floor     kernel / floor; 1 is as fast as memory allows
    reference_ms the same in torch: what the executor does without the kernel
    speed_up     reference / kernel

On CUDA a call is captured in a graph and replayed, the device's caches are overwritten before each replay, and events
time it. Kernels do not run on the CPU; there it times references only.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from engines.cost.peaks import measured_peaks, seconds_of
from engines.kernels import available
from engines.kernels.confidence import confidence, confidence_reference
from engines.kernels.pack import Building, pack
from engines.kernels.rowwise import rms_norm, rms_norm_reference, rotate, rotate_reference, swiglu, swiglu_reference
from engines.kernels.scores import scores, scores_reference
from engines.models.layers import inverse_frequencies, rotary_tables
from engines.runtime.graphs import CudaRecorder
from repro.bench.common import Rows, add_counts, add_device, device_of, facts_of, parser_of, run, table

FLUSH_BYTES = 512 * 2**20
"""Several times the largest last-level cache."""


def option(default: int, said: str) -> Any:
    return field(default=default, metadata={"said": said})


@dataclass(frozen=True, kw_only=True)
class KernelSetting:
    device: torch.device
    dtype: torch.dtype
    retention: float
    rows: int = option(4096, "packed rows of a step")
    requests: int = option(8, "that build their cache")
    length: int = option(1024, "of a request, prompt and answer")
    block: int = option(32, "tokens of a block")
    pool_kernel: int = option(3, "of the scores, odd")
    logits: int = option(256, "rows of logits")
    width: int = option(4096, "of the model: heads of 128, three times as much hidden")
    vocabulary: int = option(126464, "of the logits")

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
class KernelWork:
    shape: str
    num_bytes: int
    kernel: Callable[[], object]
    reference: Callable[[], object]


def size_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def packing(at: KernelSetting, heads: int) -> KernelWork:
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
    return KernelWork(
        shape=f"{at.requests} x {at.kept} of {at.context} rows, {at.heads} x {at.head_dim}",
        num_bytes=moved + at.requests * at.kept * heads * 8,
        kernel=lambda: pack(pool_k, pool_v, k, v, building, chosen, at.kept),
        reference=reference,
    )


def scoring(at: KernelSetting, selection: str) -> KernelWork:
    building = at.building()
    q, k = (at.random(at.requests * at.length, at.heads, at.head_dim) for _ in "qk")
    how = (q, k, building, selection, at.pool_kernel, at.block, at.context)
    heads = 1 if selection == "uniform" else at.heads
    return KernelWork(
        shape=f"{at.requests} x {at.context} rows, {at.heads} x {at.head_dim}",
        num_bytes=size_of(q[:1]) * at.requests * at.length + 4 * at.requests * heads * at.context,
        kernel=partial(scores, *how),  # type: ignore[arg-type]
        reference=partial(scores_reference, *how),  # type: ignore[arg-type]
    )


def reduction(at: KernelSetting) -> KernelWork:
    logits = at.random(at.logits, at.vocabulary)
    suppress_id = at.vocabulary - 1
    return KernelWork(
        shape=f"{at.logits} x {at.vocabulary}",
        num_bytes=size_of(logits) + 12 * at.logits,
        kernel=lambda: confidence(logits, suppress_id),
        reference=lambda: confidence_reference(logits, suppress_id),
    )


def norm(at: KernelSetting) -> KernelWork:
    x, delta, weight = at.random(at.rows, at.width), at.random(at.rows, at.width), at.random(at.width)
    return KernelWork(
        shape=f"{at.rows} x {at.width}, residual added",
        num_bytes=4 * size_of(x) + size_of(weight),
        kernel=lambda: rms_norm(x, weight, 1e-5, delta),
        reference=lambda: rms_norm_reference(x, weight, 1e-5, delta),
    )


def rotation(at: KernelSetting) -> KernelWork:
    q, k = (at.random(at.rows, at.heads, at.head_dim) for _ in "qk")
    angles = torch.outer(torch.arange(at.rows, dtype=torch.float32), inverse_frequencies(at.head_dim, 5e5))
    cos, sin = (table.to(at.device) for table in rotary_tables(angles))
    return KernelWork(
        shape=f"{at.rows} x 2 x {at.heads} x {at.head_dim}",
        num_bytes=2 * size_of(q, k) + size_of(cos, sin) // 2,
        kernel=lambda: rotate(q, k, cos, sin, full_precision=True),
        reference=lambda: rotate_reference(q, k, cos, sin, full_precision=True),
    )


def gating(at: KernelSetting) -> KernelWork:
    gate, up = at.random(at.rows, 3 * at.width), at.random(at.rows, 3 * at.width)
    return KernelWork(
        shape=f"{at.rows} x {3 * at.width}",
        num_bytes=3 * size_of(gate),
        kernel=lambda: swiglu(gate, up),
        reference=lambda: swiglu_reference(gate, up),
    )


CASES: dict[str, Callable[[KernelSetting], KernelWork]] = {
    "pack-head": lambda at: packing(at, at.heads),
    "pack-uniform": lambda at: packing(at, 1),
    "pack-dense": lambda at: packing(at, 0),
    "scores-head": lambda at: scoring(at, "head"),
    "scores-uniform": lambda at: scoring(at, "uniform"),
    "confidence": reduction,
    "rmsnorm": norm,
    "rotary": rotation,
    "swiglu": gating,
}


def timed_ms(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median over ``repeats``, after calls to warm up."""
    if device.type != "cuda":
        return 1e3 * median(seconds_of(call, device, repeats))

    def forward() -> Tensor:
        call()
        return torch.empty(0, device=device)

    replay = CudaRecorder(device).record(forward).replay
    scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    events = []
    for _ in range(repeats + 3):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        scratch.zero_()
        started.record()
        replay()
        ended.record()
        events.append((started, ended))
    torch.cuda.synchronize(device)
    return median(started.elapsed_time(ended) for started, ended in events[3:])


def measure(name: str, at: KernelSetting, bytes_per_s: float, repeats: int) -> dict[str, Any]:
    """A row; what is of a kernel is None where kernels do not run."""
    torch.manual_seed(0)
    work = CASES[name](at)
    floor_ms = work.num_bytes / bytes_per_s * 1e3
    has_kernels = at.device.type == "cuda" and available(at.device)
    kernel_ms = timed_ms(work.kernel, at.device, repeats) if has_kernels else None
    reference_ms = timed_ms(work.reference, at.device, repeats)
    return {
        "kernel": name,
        "shape": work.shape,
        "mib": work.num_bytes / 2**20,
        "floor_ms": floor_ms,
        "kernel_ms": kernel_ms,
        "of_floor": None if kernel_ms is None else kernel_ms / floor_ms,
        "reference_ms": reference_ms,
        "speed_up": None if kernel_ms is None else reference_ms / kernel_ms,
    }


def main() -> None:
    parser = parser_of(__doc__)
    names = list(CASES)
    parser.add_argument("--kernel", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    add_device(parser)
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument("--retention", type=float, default=0.5)
    sizes: dict[str, Any] = {
        each.name: (each.default, each.metadata["said"]) for each in fields(KernelSetting) if each.metadata
    }
    add_counts(parser, repeats=(20, "calls timed"), **sizes)
    options = parser.parse_args()
    if options.length <= options.block or not 0 < options.retention <= 1:
        parser.error("--length is more than --block, and --retention is in (0, 1]")
    if options.width % 2 or (options.width > 128 and options.width % 128):
        parser.error("--width is even, and above 128 a multiple of it")
    if options.pool_kernel % 2 == 0:
        parser.error("--pool-kernel is odd")

    device, dtype = device_of(options)
    asked = {name: getattr(options, name) for name in ("retention", *sizes)}
    at = KernelSetting(device=device, dtype=dtype, **asked)
    bytes_per_s = measured_peaks(device, dtype).bytes_per_s
    rows = Rows(options.json, {**facts_of(device, dtype), "bytes_per_s": bytes_per_s})
    with torch.inference_mode():
        for name in options.kernel:
            rows.add(measure(name, at, bytes_per_s, options.repeats))
            print(f"{name} timed", file=sys.stderr)
    print(table(rows.rows))
    if all(row["kernel_ms"] is None for row in rows.rows):
        why = "triton is not installed" if device.type == "cuda" else f"kernels do not run on {device.type}"
        print(f"references only: {why}")


if __name__ == "__main__":
    run(main)
