"""What every attention backend is, and what they share."""

from __future__ import annotations

from typing import Protocol

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

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor | None = None) -> Tensor:
        """[Nq, H, D], in ``out`` where it is given, of q [Nq, H, D]; k, v [Nk, Hkv, D] of one dtype, rows of any stride.

        Rows of the result past ``cu_q[-1]`` hold anything, as rows of k and v outside the runs may, NaN included.
        """
        ...


def placed(rows: Tensor, out: Tensor | None) -> Tensor:
    """The rows, copied to ``out`` where it is given."""
    return rows if out is None else out.copy_(rows)
