"""Attention backends by name, and which of them serve here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from engines.attention.host import HostVarlen
from engines.attention.kernels import VarlenKernel, flash_attn_kernels, torch_varlen_kernels
from engines.attention.padded import SdpaPadded
from engines.attention.probe import probe
from engines.attention.reference import Sdpa
from engines.attention.spans import VarlenAttention
from engines.errors import UserError
from engines.kernels.choice import HostKernels

BACKENDS = ("flash-attn", "torch-varlen", "sdpa-padded", "sdpa")
"""In order of preference on a GPU, and by name; see ``batch_attention`` for a CPU."""
_KERNELS: Mapping[str, Callable[[], tuple[VarlenKernel, ...]]] = {
    "flash-attn": flash_attn_kernels,
    "torch-varlen": torch_varlen_kernels,
}
_INSTALL = {"flash-attn": "install the extra 'cuda' with --no-build-isolation", "torch-varlen": "install a newer torch"}


def availability(
    device: torch.device, dtype: torch.dtype, head_dim: int, n_heads: int, n_kv_heads: int
) -> Mapping[str, str | None]:
    """Why a backend does not serve; None where it does. Flash kernels are tried on the device the first time."""
    found = {name: _backend(name, device, dtype, head_dim, n_heads, n_kv_heads) for name in BACKENDS}
    return {name: backend if isinstance(backend, str) else None for name, backend in found.items()}


def attention_backend(
    name: str | None, device: torch.device, dtype: torch.dtype, head_dim: int, n_heads: int, n_kv_heads: int
) -> VarlenAttention:
    """The backend of that name; None or 'auto' takes the first of BACKENDS that serves, on a CPU ``batch_attention``'s.

    UserError for a name that is unknown, or does not serve here.
    """
    if name is None or name == "auto":
        if device.type == "cpu":
            return batch_attention(torch.empty(0, dtype=dtype), head_dim)
        candidates = (_backend(each, device, dtype, head_dim, n_heads, n_kv_heads) for each in BACKENDS)
        return next(backend for backend in candidates if not isinstance(backend, str))
    if name not in BACKENDS:
        raise UserError(f"attention backend {name!r} is not known: give auto or one of {', '.join(BACKENDS)}")
    backend = _backend(name, device, dtype, head_dim, n_heads, n_kv_heads)
    if isinstance(backend, str):
        raise UserError(
            f"attention backend {name!r} does not serve {_short(dtype)} on {device}: {backend}; or give auto, which "
            "takes one that does"
        )
    return backend


def batch_attention(like: torch.Tensor, head_dim: int) -> HostVarlen | Sdpa:
    """The backend of a system without a choice: on a CPU its kernel where that serves such tensors, else ``sdpa``."""
    return HostVarlen() if HostKernels(device=like.device, dtype=like.dtype).serve_heads(head_dim) else Sdpa()


def _backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, n_heads: int, n_kv_heads: int
) -> VarlenAttention | str:
    """The backend, or why it does not serve and what to do."""
    if name == "sdpa":
        return Sdpa()
    if name == "sdpa-padded":
        return SdpaPadded()
    if device.type != "cuda":
        return "it runs on CUDA devices: give one"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its kernel takes bfloat16 and float16, not {_short(dtype)}: give one of them"
    if head_dim % 8 or head_dim > 256:
        return f"its kernel takes head widths in multiples of 8 up to 256, not {head_dim}: give another backend"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "its kernel needs compute capability 8.0 (Ampere): give another backend"
    try:
        kernels = _KERNELS[name]()
    except ImportError as error:
        return f"it is not installed ({error}): {_INSTALL[name]}"
    found = probe(name, kernels, device, dtype, head_dim, n_heads // n_kv_heads)
    return f"no way to call it is right here ({found}): give another backend" if isinstance(found, str) else found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
