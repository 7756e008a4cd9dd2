"""Where the sequences of a packed batch lie, and what every attention backend makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

Run: TypeAlias = tuple[int, int]
"""(first row, end row) of one sequence in a packed tensor."""


class SpanMetadata(NamedTuple):
    """The int32 arrays of ``Spans`` on the host, for a caller that sends all its metadata in one transfer."""

    cu_q: np.ndarray
    k_start: np.ndarray
    k_len: np.ndarray

    @staticmethod
    def of_lengths(
        q_len: np.ndarray,
        k_start: np.ndarray | None = None,
        k_len: np.ndarray | None = None,
        *,
        size: int | None = None,
    ) -> SpanMetadata:
        """For n sequences, padded to ``size`` by ones of length zero; without keys, each over its own packed rows."""
        assert (k_start is None) == (k_len is None), "k_start and k_len go together"
        n = len(q_len)
        size = n if size is None else size
        assert size >= n, f"{n} sequences do not fit into {size}"
        cu_q = np.zeros(size + 1, dtype=np.int32)
        np.cumsum(q_len, out=cu_q[1 : n + 1])
        cu_q[n + 1 :] = cu_q[n]
        lengths, starts = np.zeros(size, dtype=np.int32), np.zeros(size + 1, dtype=np.int32)
        lengths[:n] = q_len if k_len is None else k_len
        starts[:n] = cu_q[:n] if k_start is None else k_start
        starts[n:] = starts[n - 1] + lengths[n - 1] if n else 0
        return SpanMetadata(cu_q=cu_q, k_start=starts, k_len=lengths)


@dataclass(frozen=True, kw_only=True)
class Spans:
    """n sequences: queries packed one behind the other, keys in runs anywhere in a [Nk, Hkv, D] tensor.

    The tensors are contiguous and on the queries' device, views of a larger buffer included; a captured
    graph reads whatever they hold when it is replayed. A sequence with queries has at least one key;
    sequences without either, at the end, are padding.
    """

    cu_q: Tensor
    """int32 [n + 1]: first query row of each sequence, and the end of the last."""
    k_start: Tensor
    """int32 [n + 1]: first key row of each sequence, and the end of the last one's (kernels want n + 1)."""
    k_len: Tensor
    """int32 [n]"""
    max_q: int
    """No sequence has more queries; exceeding the longest costs empty blocks, in sdpa-padded real work."""
    max_k: int
    q_runs: tuple[Run, ...] | None = None
    """The same on the host, padding sequences included or not; None where a graph is to be captured."""
    k_runs: tuple[Run, ...] | None = None

    def __post_init__(self) -> None:
        n = self.k_len.shape[0]
        for name, size in (("cu_q", n + 1), ("k_start", n + 1), ("k_len", n)):
            tensor = getattr(self, name)
            assert tensor.dtype == torch.int32, f"{name} is {tensor.dtype}, not int32"
            assert tensor.shape == (size,), f"{name} has shape {tuple(tensor.shape)}, not ({size},)"
            assert tensor.is_contiguous(), f"{name} is not contiguous"
        assert (self.q_runs is None) == (self.k_runs is None), "q_runs and k_runs go together"

    @property
    def size(self) -> int:
        """Sequences, padding included."""
        return self.k_len.shape[0]

    @staticmethod
    def of_lengths(
        q_len: np.ndarray,
        k_start: np.ndarray | None = None,
        k_len: np.ndarray | None = None,
        *,
        device: torch.device | str,
        size: int | None = None,
    ) -> Spans:
        """From host arrays, in one transfer, host runs included; see ``SpanMetadata.of_lengths``."""
        host = SpanMetadata.of_lengths(q_len, k_start, k_len, size=size)
        sizes = [len(array) for array in host]
        cu_q, starts, lengths = torch.from_numpy(np.concatenate(host)).to(device).split(sizes)
        n = len(q_len)
        first, begin = host.cu_q.tolist(), host.k_start.tolist()
        return Spans(
            cu_q=cu_q,
            k_start=starts,
            k_len=lengths,
            max_q=int(np.max(q_len, initial=0)),
            max_k=int(np.max(host.k_len, initial=0)),
            q_runs=tuple(pairwise(first[: n + 1])),
            k_runs=tuple((start, start + k) for start, k in zip(begin[:n], host.k_len[:n].tolist(), strict=True)),
        )


class VarlenAttention(Protocol):
    """Bidirectional attention, scale 1/sqrt(D), of ragged sequences; H is a multiple of Hkv."""

    @property
    def name(self) -> str: ...
    @property
    def needs_host_runs(self) -> bool:
        """Reads ``Spans.q_runs``: one launch per sequence, unfit for a captured graph.

        The others neither wait for the device nor let the values of the metadata shape their work.
        """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor | None = None) -> Tensor:
        """[Nq, H, D], in ``out`` where it is given, of q [Nq, H, D]; k, v [Nk, Hkv, D] of one dtype, rows of any stride.

        Rows of the result past ``cu_q[-1]`` hold anything, as rows of k and v outside the runs may, NaN included.
        """


def placed(rows: Tensor, out: Tensor | None) -> Tensor:
    """The rows, copied to ``out`` where it is given."""
    return rows if out is None else out.copy_(rows)
