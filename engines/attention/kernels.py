"""Flash varlen kernels that may be installed, brought to one call.

Their signatures change between versions, and no document says what they read; ``probe`` decides what works.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engines.attention.protocol import placed


class VarlenKernel(Protocol):
    """One callable of one package; hashable, equal where the callable is the same."""

    @property
    def takes_used_k(self) -> bool: ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        used_k: Tensor | None,
        max_q: int,
        max_k: int,
        out: Tensor | None,
    ) -> Tensor:
        """Shapes as in ``VarlenAttention``; sequence i reads k from ``cu_k[i]``, ``used_k[i]`` rows or up to
        ``cu_k[i + 1]``. The result is ``out`` where it is given; its rows past ``cu_q[-1]`` hold anything."""
        ...


@dataclass(frozen=True)
class FlashAttnKernel:
    """``flash_attn`` 2; its own output tensor is copied where another is given."""

    function: Callable[..., Any]
    takes_used_k: bool

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        used_k: Tensor | None,
        max_q: int,
        max_k: int,
        out: Tensor | None,
    ) -> Tensor:
        used = {} if used_k is None else {"seqused_k": used_k}
        found = self.function(
            q,
            k,
            v,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            dropout_p=0.0,
            softmax_scale=q.shape[-1] ** -0.5,
            causal=False,
            **used,
        )
        return placed(found[0] if isinstance(found, tuple | list) else found, out)


@dataclass(frozen=True)
class TorchVarlenKernel:
    """``torch.nn.attention.varlen``; ``varlen_attn_out`` (torch 2.12) writes to ``out`` itself."""

    function: Callable[..., Any]
    takes_used_k: bool
    takes_out: bool
    takes_gqa: bool
    """Has to be told of grouped heads (torch 2.12); before, the kernel sees them itself."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        used_k: Tensor | None,
        max_q: int,
        max_k: int,
        out: Tensor | None,
    ) -> Tensor:
        options: dict[str, Any] = {} if used_k is None else {"seqused_k": used_k}
        if self.takes_gqa:
            options["enable_gqa"] = q.shape[1] != k.shape[1]
        if not self.takes_out:
            return placed(self.function(q, k, v, cu_q, cu_k, max_q, max_k, **options), out)
        out = torch.empty_like(q) if out is None else out
        self.function(out, q, k, v, cu_q, cu_k, max_q, max_k, **options)
        return out


@dataclass(frozen=True)
class AtenVarlenKernel:
    """The operator behind ``varlen_attn``; it took ``seqused_k`` before ``varlen_attn`` did (torch 2.11)."""

    takes_used_k: bool

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        used_k: Tensor | None,
        max_q: int,
        max_k: int,
        out: Tensor | None,
    ) -> Tensor:
        used = {} if used_k is None else {"seqused_k": used_k}
        found = torch.ops.aten._flash_attention_forward(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, False, False, **used)
        return placed(found[0], out)


def parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    """Names a function takes; a torch custom operator shows them on the function it wraps."""
    return frozenset(inspect.signature(getattr(function, "_init_fn", function)).parameters)


def flash_attn_kernels() -> tuple[VarlenKernel, ...]:
    """Those of the package ``flash_attn``, the best first; ImportError where it is not installed or does not load."""
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    found = [
        getattr(interface, name)
        for name in ("_flash_attn_varlen_forward", "flash_attn_varlen_func")
        if hasattr(interface, name)
    ]
    return tuple(FlashAttnKernel(function, "seqused_k" in parameters_of(function)) for function in found)


def torch_varlen_kernels() -> tuple[VarlenKernel, ...]:
    """Those of this torch, the best first; ImportError where it has none."""
    varlen = importlib.import_module("torch.nn.attention.varlen")
    kernels: list[VarlenKernel] = []
    for name in ("varlen_attn_out", "varlen_attn"):
        if hasattr(varlen, name):
            names = parameters_of(getattr(varlen, name))
            kernels.append(
                TorchVarlenKernel(
                    getattr(varlen, name),
                    takes_used_k="seqused_k" in names,
                    takes_out="out" in names,
                    takes_gqa="enable_gqa" in names,
                )
            )
    operator = torch.ops.aten._flash_attention_forward.default
    kernels.append(AtenVarlenKernel("seqused_k" in {argument.name for argument in operator._schema.arguments}))
    return tuple(kernels)
