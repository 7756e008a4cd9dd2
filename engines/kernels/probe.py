"""Decides which kernels serve a model, and what replaces the others.

Each is tried on a small fixed example before it serves: a compiler's mistake costs speed, not correctness.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from engines.compiled import CompilerError, load_library
from engines.errors import first_line
from engines.kernels import available, host
from engines.kernels.confidence import (
    Partial,
    combine,
    combine_reference,
    confidence,
    confidence_reference,
    partial,
    partial_reference,
)
from engines.kernels.pack import Building, pack, pack_reference, store
from engines.kernels.rowwise import rms_norm, rms_norm_reference, rotate, rotate_reference, swiglu, swiglu_reference
from engines.kernels.scores import scores, scores_reference
from engines.models.layers import FusedOps
from engines.runtime.device import Store, store_by_index

ROUNDING = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-5}
"""Largest difference that rounding explains, relative to values of order 1."""

_Outputs = tuple[Tensor, ...]


class Examples:
    """Inputs of one dtype on one device; each method runs a kernel or its reference."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._random = torch.Generator().manual_seed(0)
        self.q, self.k, self.v = self.draw(37, 4, 32), self.draw(37, 2, 32), self.draw(37, 2, 32)
        self.x, self.y, self.weight = self.draw(37, 320), self.draw(37, 320), self.draw(320)
        self.logits = self.draw(9, 5000)
        angles = torch.rand(37, 16, generator=self._random) * 6
        self.cos = torch.cat((angles.cos(), angles.cos()), dim=1).unsqueeze(1).to(device)
        self.sin = torch.cat((-angles.sin(), angles.sin()), dim=1).unsqueeze(1).to(device)
        # Rows 0 .. 20 and 20 .. 37; blocks of 4 and 3; 7 and 5 rows kept.
        table = [[0, 20], [6, 9], [4, 3], [4, 3], [16, 14], [7, 5], [11, 0]]
        self.building = Building.of(torch.tensor(table).to(device))
        order = [torch.randperm(14, generator=self._random) for _ in range(4)]
        self.rows = (torch.randperm(60, generator=self._random)[:37]).to(device)
        self.chosen = torch.stack(order).view(2, 2, 14).to(device)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random).to(self.device, self.dtype)

    def run_pack(self, run: Callable[..., None]) -> _Outputs:
        pools = torch.zeros(2, 20, 2, 32, dtype=self.dtype, device=self.device).unbind()
        run(*pools, self.k, self.v, self.building, self.chosen, 7)
        return pools

    def run_scores(self, run: Callable[..., Tensor]) -> _Outputs:
        return tuple(
            run(self.q, self.k, self.building, selection, 3, 4, 16) / 32**0.5 for selection in ("head", "uniform")
        )

    def run_confidence(self, run: Callable[..., _Outputs]) -> _Outputs:
        return run(self.logits, 17)

    def run_partial(self, run: tuple[Callable[..., Partial], Callable[[Partial], _Outputs]]) -> _Outputs:
        part, join = run
        halves = [part(self.logits[:, :2500], 17, 0), part(self.logits[:, 2500:], 17, 2500)]
        return join(Partial(*(torch.stack(fields) for fields in zip(*halves, strict=True))))

    def run_rms_norm(self, run: Callable[..., Tensor]) -> _Outputs:
        summed = self.x.clone()
        return run(self.x, self.weight, 1e-5), run(summed, self.weight, 1e-5, self.y), summed

    def run_rotate(self, run: Callable[..., None]) -> _Outputs:
        outputs: list[Tensor] = []
        for full_precision in (True, False):
            q, k = self.q.clone(), self.k.clone()
            run(q, k, self.cos, self.sin, full_precision=full_precision)
            outputs += [q, k]
        return tuple(outputs)

    def run_store(self, run: Callable[..., None]) -> _Outputs:
        pools = torch.zeros(2, 60, 2, 32, dtype=self.dtype, device=self.device).unbind()
        run(*pools, self.rows, self.k, self.v)
        return pools

    def run_swiglu(self, run: Callable[..., Tensor]) -> _Outputs:
        return (run(self.x, self.y),)

    def run_decode(self, run: Callable[..., Tensor]) -> _Outputs:
        """Run sequences of 33, 1 and 16 tokens in blocks in no order, and a row past them."""
        return (run(self.q[:4], *self._paged(), *self._place()),)

    def run_attend(self, run: Callable[..., Tensor]) -> _Outputs:
        """Like ``run_decode``, from a joined product."""
        pools, rows = self._paged(), torch.tensor([112, 48, 31, 0], device=self.device)
        qkv = torch.cat([x[:4].flatten(1) for x in (self.q, self.k, self.v)], dim=1)
        cos, sin = (x[:4].to(self.dtype) for x in (self.cos, self.sin))
        return (run(qkv, cos, sin, *pools, rows, self._place()), *pools)

    def run_runs(self, run: Callable[..., Tensor]) -> _Outputs:
        """Run two sequences over runs in no order, one of which sees only a part, and a row of no sequence."""
        runs = torch.tensor([[0, 17], [16, 36], [3, 0], [33, 7], [25, 7]], dtype=torch.int32, device=self.device)
        return (run(self.q, self.k, self.v, host.Runs(*runs.unbind()), torch.zeros_like(self.q)),)

    def _paged(self) -> list[Tensor]:
        return list(self.logits.flatten()[: 2 * 128 * 64].view(2, 128, 2, 32).clone().unbind())

    def _place(self) -> tuple[Tensor, Tensor, Tensor, int]:
        table = torch.tensor([[5, 0, 7], [3, 0, 0], [1, 6, 0]], dtype=torch.int32, device=self.device)
        slots, lengths = torch.tensor([[0, 1, 2], [33, 1, 16]], device=self.device).unbind()
        return slots, lengths, table, 16


_Case = tuple[Callable[..., _Outputs], Any, Any]
"""A method of ``Examples``, with the kernel that it tries, and the kernel's reference."""
_CASES: Mapping[str, _Case] = {
    "pack": (Examples.run_pack, pack, pack_reference),
    "scores": (Examples.run_scores, scores, scores_reference),
    "confidence": (Examples.run_confidence, confidence, confidence_reference),
    "partial": (Examples.run_partial, (partial, combine), (partial_reference, combine_reference)),
    "rms_norm": (Examples.run_rms_norm, rms_norm, rms_norm_reference),
    "rotate": (Examples.run_rotate, rotate, rotate_reference),
    "store": (Examples.run_store, store, store_by_index),
    "swiglu": (Examples.run_swiglu, swiglu, swiglu_reference),
}
_HOST_CASES: Mapping[str, _Case] = {
    "rms_norm": (Examples.run_rms_norm, host.rms_norm, rms_norm_reference),
    "rotate": (Examples.run_rotate, host.rotate, rotate_reference),
    "store": (Examples.run_store, host.store, store_by_index),
    "swiglu": (Examples.run_swiglu, host.swiglu, swiglu_reference),
    "decode": (Examples.run_decode, host.decode, host.decode_reference),
    "attend": (Examples.run_attend, host.attend, host.attend_reference),
    "runs": (Examples.run_runs, host.attend_runs, host.attend_runs_reference),
}


@lru_cache(maxsize=16)
def faults(device: torch.device, dtype: torch.dtype) -> Mapping[str, str]:
    """Return the fault of each kernel that does not give its reference's numbers here. Compiles them all."""
    if not available(device):
        return dict.fromkeys(_CASES, "triton is not installed" if device.type == "cuda" else "they run on CUDA")
    return _faults(_CASES, Examples(device, dtype))


@lru_cache(maxsize=4)
def host_fault(dtype: torch.dtype) -> str | None:
    """Return the first fault of the kernels for CPUs, which serve all together or not at all. Compiles them."""
    if dtype not in host.DTYPES:
        return f"they are not made for {dtype}"
    try:
        load_library(host.LIBRARY)
    except CompilerError as error:
        return str(error)
    faults = _faults(_HOST_CASES, Examples(torch.device("cpu"), dtype))
    return next((f"{name}: {fault}" for name, fault in faults.items()), None)


def _faults(cases: Mapping[str, _Case], examples: Examples) -> dict[str, str]:
    reasons = {name: _fault(*case, examples) for name, case in cases.items()}
    return {name: fault for name, fault in reasons.items() if fault is not None}


def _fault(run: Callable[..., _Outputs], kernel: Any, reference: Any, examples: Examples) -> str | None:
    try:
        outputs = [t.cpu() for t in run(examples, kernel)]
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    for output, expected in zip(outputs, run(examples, reference), strict=True):
        expected = expected.cpu()
        if output.dtype == torch.int64:
            if not torch.equal(output, expected):
                return "it chooses other tokens"
            continue
        tolerance = ROUNDING[examples.dtype]
        if not torch.allclose(output.float(), expected.float(), rtol=tolerance, atol=tolerance):
            return f"it is off by {(output.float() - expected.float()).abs().nan_to_num().max().item():.2g}"
    return None


@dataclass(frozen=True, kw_only=True)
class TritonKernels:
    """The Triton kernels that serve one device and dtype. None serve if they are not wanted, or in float32, which is for comparisons,
    operator by operator."""

    device: torch.device
    dtype: torch.dtype
    is_wanted: bool = True

    def serve(self, *names: str) -> bool:
        """Whether all of these serve; without names, whether any can."""
        if not self.is_wanted or self.dtype == torch.float32 or not available(self.device):
            return False
        return all(name not in faults(self.device, self.dtype) for name in names)

    @property
    def store(self) -> Store:
        return store if self.serve("store") else store_by_index

    def ops(self, fallback: FusedOps) -> FusedOps:
        """Kernels for a model's layers; ``fallback`` if none can serve."""
        if not self.serve():
            return fallback
        broken = faults(self.device, self.dtype)
        return FusedOps(
            rms_norm=None if "rms_norm" in broken else rms_norm,
            rotate=None if "rotate" in broken else rotate,
            swiglu=None if "swiglu" in broken else swiglu,
            joins=True,
        )

    def faults(self) -> Mapping[str, str]:
        """Return the fault of each kernel that does not give its reference's numbers."""
        if not self.serve():
            return {}
        return faults(self.device, self.dtype)


@dataclass(frozen=True, kw_only=True)
class HostKernels:
    """The kernels of ``engines.kernels.host``: all of them serve a device and dtype, or none."""

    device: torch.device
    dtype: torch.dtype

    @property
    def fault(self) -> str | None:
        """Why they do not serve; None if they do."""
        if self.device.type != "cpu":
            return "they run on CPUs"
        return host_fault(self.dtype)

    def serve_heads(self, width: int) -> bool:
        """Whether attention over heads of this width is served."""
        return width <= host.MOST_WIDTH and self.fault is None

    def store(self, fallback: Store) -> Store:
        return fallback if self.fault else host.store

    def ops(self, fallback: FusedOps) -> FusedOps:
        if self.fault:
            return fallback
        return FusedOps(rms_norm=host.rms_norm, rotate=host.rotate, swiglu=host.swiglu, joins=True)
