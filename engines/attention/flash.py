"""``flash-attn`` and ``torch-varlen``: one launch for all sequences, behind one interface.

FlashAttention 2 takes a sequence's first key row from ``cu_seqlens_k`` and its number of keys from ``seqused_k``. It never reads
``cu_seqlens_k[i + 1]``: runs may lie anywhere, in any order, and nothing is copied. It needs no ``block_table``, whose pages are multiples
of 256 rows, while the KV pool hands out single rows.

Signatures change between versions, and no document says what kernels read; ``probe`` decides what works.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from engines.attention.backends import Spans, copy_to


class KernelSpans(NamedTuple):
    """The sequences of a launch on the device, int32. Query rows past ``cu_q[-1]`` belong to no sequence."""

    cu_q: Tensor
    """[n + 1] first query row of each sequence, and the end of the last."""
    cu_k: Tensor
    """[n + 1] the same for the keys; with a table, as if they were packed."""
    used_k: Tensor | None
    """[n] number of keys; None if a sequence's keys are all those up to the next sequence's."""
    table: Tensor | None
    """[n, width] blocks of k and v. Attention is then causal: queries stand at the end of their keys."""
    max_q: int
    max_k: int


class VarlenKernel(Protocol):
    """One callable of one package; hashable, and equal if the callable is the same."""

    @property
    def takes_used_k(self) -> bool: ...

    @property
    def takes_table(self) -> bool: ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: KernelSpans, out: Tensor | None = None) -> Tensor:
        """Attend q [N, H, D] to k and v [rows, Hkv, D], or with a table [blocks, block_size, Hkv, D]. Returns [N, H, D], in ``out`` if
        given. Rows of no sequence are arbitrary."""


@dataclass(frozen=True)
class FlashAttnKernel:
    """``flash_attn`` 2; its own output tensor is copied if another one is given."""

    function: Callable[..., Any]
    takes_used_k: bool
    takes_table: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: KernelSpans, out: Tensor | None = None) -> Tensor:
        options: dict[str, Any] = {}
        if spans.table is not None:
            options["block_table"] = spans.table
        elif spans.used_k is not None:
            options["seqused_k"] = spans.used_k
        result = self.function(
            q,
            k,
            v,
            cu_seqlens_q=spans.cu_q,
            cu_seqlens_k=spans.cu_k,
            max_seqlen_q=spans.max_q,
            max_seqlen_k=spans.max_k,
            dropout_p=0.0,
            softmax_scale=q.shape[-1] ** -0.5,
            causal=spans.table is not None,
            **options,
        )
        return copy_to(result[0] if isinstance(result, tuple | list) else result, out)


@dataclass(frozen=True)
class TorchVarlenKernel:
    """``torch.nn.attention.varlen``; ``varlen_attn_out`` (torch 2.12) writes to ``out`` itself."""

    function: Callable[..., Any]
    takes_used_k: bool
    takes_out: bool
    takes_gqa: bool
    """Whether the call must name grouped heads (torch 2.12); earlier kernels see them themselves."""
    takes_table: bool = False
    gives_cu_k: bool = True
    """Whether it takes ``cu_seq_k`` beside a table; some kernels do not."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: KernelSpans, out: Tensor | None = None) -> Tensor:
        options: dict[str, Any] = {} if spans.used_k is None else {"seqused_k": spans.used_k}
        if self.takes_gqa:
            options["enable_gqa"] = q.shape[-2] != k.shape[-2]
        if spans.table is not None:
            options |= {"block_table": spans.table, "window_size": (-1, 0)}
        arguments = q, k, v, spans.cu_q, spans.cu_k if self.gives_cu_k else None, spans.max_q, spans.max_k
        if not self.takes_out:
            return copy_to(self.function(*arguments, **options), out)
        out = torch.empty_like(q) if out is None else out
        self.function(out, *arguments, **options)
        return out


@dataclass(frozen=True)
class AtenVarlenKernel:
    """The operator behind ``varlen_attn``; it took ``seqused_k`` before ``varlen_attn`` did (torch 2.11)."""

    takes_used_k: bool
    takes_table = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: KernelSpans, out: Tensor | None = None) -> Tensor:
        options = {} if spans.used_k is None else {"seqused_k": spans.used_k}
        bounds = spans.cu_q, spans.cu_k, spans.max_q, spans.max_k
        result = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, False, False, **options)
        return copy_to(result[0], out)


def parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a function's parameters; a torch custom operator shows them on the function it wraps."""
    return frozenset(inspect.signature(getattr(function, "_init_fn", function)).parameters)


def flash_attn_kernels() -> tuple[VarlenKernel, ...]:
    """Kernels of the package ``flash_attn``, the best first. Raises ImportError if it is not installed or does not load."""
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    kernels = []
    for name in ("_flash_attn_varlen_forward", "flash_attn_varlen_func"):
        if hasattr(interface, name):
            function = getattr(interface, name)
            names = parameters_of(function)
            takes_table = name == "flash_attn_varlen_func" and "block_table" in names
            kernels.append(FlashAttnKernel(function, "seqused_k" in names, takes_table))
    return tuple(kernels)


def torch_varlen_kernels() -> tuple[VarlenKernel, ...]:
    """Kernels of this torch, the best first. Raises ImportError if it has none."""
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
                    takes_table=name == "varlen_attn" and "block_table" in names,
                )
            )
    operator = torch.ops.aten._flash_attention_forward.default
    kernels.append(AtenVarlenKernel("seqused_k" in {argument.name for argument in operator._schema.arguments}))
    return tuple(kernels)


@dataclass(frozen=True)
class FlashVarlen:
    name: str
    kernel: VarlenKernel

    needs_host_runs: ClassVar[bool] = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor | None = None) -> Tensor:
        if min(spans.size, spans.max_q, spans.max_k, q.shape[0]) == 0:
            return torch.empty_like(q) if out is None else out
        # With max_q of 1 and grouped heads, FlashAttention folds the group into the queries. It then assumes one row of q per sequence,
        # whatever cu_q says: with padding that is wrong.
        max_q = max(spans.max_q, 2)
        return self.kernel(q, k, v, KernelSpans(spans.cu_q, spans.k_start, spans.k_len, None, max_q, spans.max_k), out)
