"""Finds out what a kernel does by a small fixed example, since its version says little.

Three sequences of unequal lengths, one longer than a kernel's tile, whose runs lie in descending order with
gaps between them; a fourth is padding, as are the last query rows. Gaps hold NaN: a kernel that reads them shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engines.attention.flash import FlashVarlen
from engines.attention.kernels import VarlenKernel
from engines.attention.reference import Sdpa
from engines.attention.spans import Spans, VarlenAttention

TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4}
"""Largest difference to the reference that rounding explains, for outputs of order 1."""
_Q_LEN, _K_START, _K_LEN = np.array([5, 1, 70]), np.array([203, 141, 2]), np.array([33, 50, 131])
_NUM_KEYS, _PADDING_ROWS, _FILL = 240, 3, 7.0


class Example(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    spans: Spans
    expected: Tensor
    """float32, of the rows that belong to a sequence."""

    @staticmethod
    def make(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> Example:
        """Two key-value heads, ``group`` query heads each."""
        random = torch.Generator().manual_seed(0)

        def draw(rows: int, heads: int) -> Tensor:
            return torch.randn(rows, heads, head_dim, generator=random).to(dtype)

        q = draw(int(_Q_LEN.sum()) + _PADDING_ROWS, 2 * group)
        k, v = draw(_NUM_KEYS, 2), draw(_NUM_KEYS, 2)
        gaps = np.ones(_NUM_KEYS, dtype=bool)
        for start, length in zip(_K_START, _K_LEN, strict=True):
            gaps[start : start + length] = False
        k[torch.from_numpy(gaps)] = torch.nan
        v[torch.from_numpy(gaps)] = torch.nan

        on_host = Spans.of_lengths(_Q_LEN, _K_START, _K_LEN, device="cpu")
        expected = Sdpa()(q.float(), k.float(), v.float(), on_host)[:-_PADDING_ROWS]
        spans = Spans.of_lengths(_Q_LEN, _K_START, _K_LEN, device=device, size=4)
        # As in a captured graph, where the lengths are not known on the host.
        spans = replace(spans, q_runs=None, k_runs=None)
        return Example(q.to(device), k.to(device), v.to(device), spans, expected)

    def fault(self, backend: VarlenAttention) -> str | None:
        """What is wrong with a backend; None where it gives the reference's numbers."""
        num_rows = len(self.expected)
        try:
            given = torch.full((num_rows + 2 * _PADDING_ROWS, *self.q.shape[1:]), _FILL, dtype=self.q.dtype).to(self.q)
            own = given[_PADDING_ROWS : _PADDING_ROWS + len(self.q)]
            found = [backend(self.q, self.k, self.v, self.spans)]
            found.append(backend(self.q, self.k, self.v, self.spans, own))
            outside = torch.cat((given[:_PADDING_ROWS], given[_PADDING_ROWS + len(self.q) :]))
            if (outside != _FILL).any():
                return "it writes outside its output"
            found = [out[:num_rows].float().cpu() for out in (*found, own)]
        except Exception as error:
            said = (str(error).strip() or "no message").splitlines()[0]
            return f"{type(error).__name__}: {said}"
        if any(out.isnan().any() for out in found):
            return "it reads keys outside the runs"
        difference = max((out - self.expected).abs().max().item() for out in found)
        if difference > TOLERANCE[self.q.dtype]:
            return f"it is off by {difference:.2g}"
        return None


def attempts(name: str, kernels: tuple[VarlenKernel, ...], group: int) -> Iterator[FlashVarlen]:
    """Every way to use the kernels, the cheapest first."""
    for kernel in kernels:
        if kernel.takes_used_k:
            yield FlashVarlen(name, kernel, "runs")
    for kernel in kernels:
        yield FlashVarlen(name, kernel, "gather")
    if group > 1:
        for kernel in kernels:
            yield FlashVarlen(name, kernel, "gather", repeats_heads=True)


@lru_cache(maxsize=64)
def probe(
    name: str, kernels: tuple[VarlenKernel, ...], device: torch.device, dtype: torch.dtype, head_dim: int, group: int
) -> FlashVarlen | str:
    """The first way to use the kernels that is right, or why there is none."""
    example = Example.make(device, dtype, head_dim, group)
    faults = []
    for backend in attempts(name, kernels, group):
        fault = example.fault(backend)
        if fault is None:
            return backend
        heads = " with repeated heads" if backend.repeats_heads else ""
        faults.append(f"{type(backend.kernel).__name__} over {backend.layout}{heads}: {fault}")
    return "; ".join(faults) or "it has no varlen kernel"
