"""Attention backends by name, and which of them serve here.

A small fixed example finds out what a kernel does, because its version says little. It has three sequences of unequal lengths, one longer
than a kernel's tile. Their runs lie in descending order with gaps between them. A fourth sequence is padding, as are the last query rows.
Gaps hold NaN, so a kernel that reads them shows.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engines.attention.backends import HostVarlen, Sdpa, SdpaPadded, Spans, VarlenAttention
from engines.attention.flash import FlashVarlen, VarlenKernel, flash_attn_kernels, torch_varlen_kernels
from engines.errors import UserError, first_line
from engines.kernels.probe import HostKernels

TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4}
"""Largest difference from the reference that rounding explains, for outputs of order 1."""
_Q_LEN, _K_START, _K_LEN = np.array([5, 1, 70]), np.array([203, 141, 2]), np.array([33, 50, 131])
_NUM_KEYS, _PADDING_ROWS, _FILL = 240, 3, 7.0


class Example(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    spans: Spans
    expected: Tensor
    """float32; only the rows that belong to a sequence."""

    @staticmethod
    def make(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> "Example":
        """Make an example with two key-value heads, of ``group`` query heads each."""
        random = torch.Generator().manual_seed(0)

        def draw(rows: int, heads: int) -> Tensor:
            return torch.randn(rows, heads, head_dim, generator=random).to(dtype)

        q = draw(int(_Q_LEN.sum()) + _PADDING_ROWS, 2 * group)
        k, v = draw(_NUM_KEYS, 2), draw(_NUM_KEYS, 2)
        is_gap = np.ones(_NUM_KEYS, dtype=bool)
        for start, length in zip(_K_START, _K_LEN, strict=True):
            is_gap[start : start + length] = False
        k[torch.from_numpy(is_gap)] = torch.nan
        v[torch.from_numpy(is_gap)] = torch.nan

        on_host = Spans.of_lengths(_Q_LEN, _K_START, _K_LEN, device="cpu")
        expected = Sdpa()(q.float(), k.float(), v.float(), on_host)[:-_PADDING_ROWS]
        spans = Spans.of_lengths(_Q_LEN, _K_START, _K_LEN, device=device, size=4)
        # The host does not know the lengths, as in a captured graph.
        spans = replace(spans, q_runs=None, k_runs=None)
        return Example(q.to(device), k.to(device), v.to(device), spans, expected)

    def fault(self, backend: VarlenAttention) -> str | None:
        """Return the backend's fault; None if it gives the reference's numbers."""
        num_rows = len(self.expected)
        try:
            buffer = torch.full((num_rows + 2 * _PADDING_ROWS, *self.q.shape[1:]), _FILL, dtype=self.q.dtype).to(self.q)
            output = buffer[_PADDING_ROWS : _PADDING_ROWS + len(self.q)]
            outputs = [backend(self.q, self.k, self.v, self.spans)]
            outputs.append(backend(self.q, self.k, self.v, self.spans, output))
            outside = torch.cat((buffer[:_PADDING_ROWS], buffer[_PADDING_ROWS + len(self.q) :]))
            if (outside != _FILL).any():
                return "it writes outside its output"
            outputs = [out[:num_rows].float().cpu() for out in (*outputs, output)]
        except Exception as error:
            return f"{type(error).__name__}: {first_line(error)}"
        if any(out.isnan().any() for out in outputs):
            return "it reads keys outside the runs"
        difference = max((out - self.expected).abs().max().item() for out in outputs)
        if difference > TOLERANCE[self.q.dtype]:
            return f"it is off by {difference:.2g}"
        return None


@lru_cache(maxsize=64)
def probe(
    name: str, kernels: tuple[VarlenKernel, ...], device: torch.device, dtype: torch.dtype, head_dim: int, group: int
) -> FlashVarlen | str:
    """Return the first kernel that reads keys where they lie and is right, or why there is none."""
    example = Example.make(device, dtype, head_dim, group)
    faults = []
    for kernel in kernels:
        if not kernel.takes_used_k:
            continue
        backend = FlashVarlen(name, kernel)
        fault = example.fault(backend)
        if fault is None:
            return backend
        faults.append(f"{type(kernel).__name__}: {fault}")
    return "; ".join(faults) or "it has no varlen kernel that takes seqused_k"


BACKENDS = ("flash-attn", "torch-varlen", "sdpa-padded", "sdpa")
"""Names, in order of preference on a GPU; for a CPU see ``batch_attention``."""
_KERNELS: Mapping[str, Callable[[], tuple[VarlenKernel, ...]]] = {
    "flash-attn": flash_attn_kernels,
    "torch-varlen": torch_varlen_kernels,
}
_INSTALL = {"flash-attn": "install the extra 'cuda' with --no-build-isolation", "torch-varlen": "install a newer torch"}


def availability(
    device: torch.device, dtype: torch.dtype, head_dim: int, n_heads: int, n_kv_heads: int
) -> Mapping[str, str | None]:
    """Return, for each backend, why it does not serve; None if it does. Flash kernels are tried on the device the first time."""
    backends = {name: _backend(name, device, dtype, head_dim, n_heads, n_kv_heads) for name in BACKENDS}
    return {name: backend if isinstance(backend, str) else None for name, backend in backends.items()}


def attention_backend(
    name: str | None, device: torch.device, dtype: torch.dtype, head_dim: int, n_heads: int, n_kv_heads: int
) -> VarlenAttention:
    """Return the backend of that name. None or 'auto' takes the first of BACKENDS that serves, and on a CPU ``batch_attention``'s.

    Raises UserError for a name that is unknown, or does not serve here.
    """
    if name is None or name == "auto":
        if device.type == "cpu":
            return batch_attention(torch.empty(0, dtype=dtype), head_dim)
        candidates = (_backend(candidate, device, dtype, head_dim, n_heads, n_kv_heads) for candidate in BACKENDS)
        return next(backend for backend in candidates if not isinstance(backend, str))
    if name not in BACKENDS:
        raise UserError(f"attention backend {name!r} is not known: give auto or one of {', '.join(BACKENDS)}")
    backend = _backend(name, device, dtype, head_dim, n_heads, n_kv_heads)
    if isinstance(backend, str):
        raise UserError(
            f"attention backend {name!r} does not serve {_dtype_name(dtype)} on {device}: {backend}; or give auto, which "
            "takes one that does"
        )
    return backend


def batch_attention(like: torch.Tensor, head_dim: int) -> HostVarlen | Sdpa:
    """Return the backend of a system without a choice. On a CPU this is its kernel if that serves such tensors, else ``sdpa``."""
    return HostVarlen() if HostKernels(device=like.device, dtype=like.dtype).serve_heads(head_dim) else Sdpa()


def _backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, n_heads: int, n_kv_heads: int
) -> VarlenAttention | str:
    """Return the backend, or why it does not serve and what to do."""
    if name == "sdpa":
        return Sdpa()
    if name == "sdpa-padded":
        return SdpaPadded()
    if device.type != "cuda":
        return "it runs on CUDA devices: give one"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its kernel takes bfloat16 and float16, not {_dtype_name(dtype)}: give one of them"
    if head_dim % 8 or head_dim > 256:
        return f"its kernel takes head widths in multiples of 8 up to 256, not {head_dim}: give another backend"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "its kernel needs compute capability 8.0 (Ampere): give another backend"
    try:
        kernels = _KERNELS[name]()
    except ImportError as error:
        return f"it is not installed ({error}): {_INSTALL[name]}"
    backend = probe(name, kernels, device, dtype, head_dim, n_heads // n_kv_heads)
    return f"no way to call it is right here ({backend}): give another backend" if isinstance(backend, str) else backend


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
