"""What every attention backend is, and what they share."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engines.attention.spans import Spans


class VarlenAttention(Protocol):
    """Bidirectional attention, scale 1/sqrt(D), of ragged sequences; H is a multiple of Hkv."""

    @property
    def name(self) -> str: ...
    @property
    def needs_host_runs(self) -> bool:
        """Reads ``Spans.q_runs``: one launch per sequence, unfit for a captured graph.

        The others neither wait for the device nor let the values of the metadata shape their work.
        """
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor) -> None:
        """q, out [Nq, H, D]; k, v [Nk, Hkv, D] of one dtype. Rows of ``out`` past ``cu_q[-1]`` stay as they are.

        Rows of k and v outside the runs may hold anything, NaN included.
        """
        ...


def store(rows: Tensor, cu_q: Tensor, out: Tensor) -> None:
    """Copy rows [Nq, H, D] to ``out``, but for those past ``cu_q[-1]``."""
    row = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
    torch.where((row < cu_q[-1])[:, None, None], rows, out, out=out)
