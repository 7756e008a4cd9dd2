"""Attention backends: where the sequences of a packed batch lie, and how each backend attends to them.

``host``, for CPUs: one call for all sequences of a step, by a kernel compiled for the machine.

``sdpa``, the reference backend, also for CPUs without a compiler. Each sequence is a zero-copy view of the packed rows, so its result
cannot depend on which other sequences share the step.

``sdpa-padded``: ragged sequences as one padded batch with a key mask, if no flash kernel serves. It costs copies of the keys, masked work
for sequences shorter than the longest, and a copy of the keys per group of grouped heads. With ``enable_gqa`` the fused kernel that takes a
mask would refuse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engines.kernels.host import Runs, attend_runs

Run: TypeAlias = tuple[int, int]
"""(first row, end row) of one sequence in a packed tensor; the end row is not part of it."""


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
    ) -> "SpanMetadata":
        """Make the arrays for n sequences, padded to ``size`` by empty ones; without keys, each attends to its own packed rows."""
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
    """n sequences: queries packed one after the other, keys in runs anywhere in a [Nk, Hkv, D] tensor.

    The tensors are contiguous and on the queries' device; they may be views of a larger buffer. A captured graph reads whatever they hold
    when it is replayed. A sequence with queries has at least one key; sequences without either, at the end, are padding.
    """

    cu_q: Tensor
    """int32 [n + 1]: first query row of each sequence, and the end of the last."""
    k_start: Tensor
    """int32 [n + 1]: first key row of each sequence, and the end of the last one's keys (kernels want n + 1)."""
    k_len: Tensor
    """int32 [n]: number of keys of each sequence."""
    max_q: int
    """No sequence has more queries. A bound above the longest costs empty blocks, and in sdpa-padded real work."""
    max_k: int
    q_runs: tuple[Run, ...] | None = None
    """The query runs on the host, with or without padding sequences; None if a graph is to be captured."""
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
    ) -> "Spans":
        """Make the spans from host arrays in one transfer, host runs included; see ``SpanMetadata.of_lengths``."""
        host = SpanMetadata.of_lengths(q_len, k_start, k_len, size=size)
        sizes = [len(array) for array in host]
        cu_q, starts, lengths = torch.from_numpy(np.concatenate(host)).to(device).split(sizes)
        n = len(q_len)
        q_starts, k_starts = host.cu_q.tolist(), host.k_start.tolist()
        return Spans(
            cu_q=cu_q,
            k_start=starts,
            k_len=lengths,
            max_q=int(np.max(q_len, initial=0)),
            max_k=int(np.max(host.k_len, initial=0)),
            q_runs=tuple(pairwise(q_starts[: n + 1])),
            k_runs=tuple((start, start + k) for start, k in zip(k_starts[:n], host.k_len[:n].tolist(), strict=True)),
        )


class VarlenAttention(Protocol):
    """Bidirectional attention, scale 1/sqrt(D), of ragged sequences; H is a multiple of Hkv."""

    @property
    def name(self) -> str: ...
    @property
    def needs_host_runs(self) -> bool:
        """Whether the backend reads ``Spans.q_runs``: one launch per sequence, unfit for a captured graph.

        The other backends neither wait for the device nor let the values of the metadata shape their work.
        """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor | None = None) -> Tensor:
        """Attend q [Nq, H, D] to k and v [Nk, Hkv, D] of one dtype, with rows of any stride. The result is [Nq, H, D], in ``out`` if given.

        Its rows past ``cu_q[-1]`` are arbitrary. So may be rows of k and v outside the runs, even NaN.
        """


def copy_to(rows: Tensor, out: Tensor | None) -> Tensor:
    """Return the rows, copied to ``out`` if it is given."""
    return rows if out is None else out.copy_(rows)


@dataclass(frozen=True, kw_only=True)
class HostVarlen:
    """The backend ``host``. A sequence's result does not depend on which other sequences share the step."""

    name: ClassVar[str] = "host"
    needs_host_runs: ClassVar[bool] = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype)
            out[spans.cu_q[-1] :] = 0  # arbitrary bits may be slow to compute with
        return attend_runs(q, k, v, Runs(spans.cu_q[:-1], spans.cu_q[1:], spans.k_start[:-1], spans.k_len), out)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
    """Attention with scale 1/sqrt(D) of q [n, Lq, H, D] to k and v [n, Lk, Hkv, D]. A mask [n, 1, 1 or Lq, Lk] marks visible keys, or is
    added to the scores. With ``is_causal``, query i sees keys 0 … i."""
    group = q.shape[2] // k.shape[2]
    shares_keys = group > 1 and q.device.type == "cpu"
    if group > 1 and not shares_keys:  # CUDA's fused kernels refuse grouped heads together with a mask
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=is_causal,
        enable_gqa=shares_keys,
    )
    return out.transpose(1, 2)


def varlen_attention(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, q_runs: Sequence[Run], k_runs: Sequence[Run]
) -> None:
    """Attend each q run to its k run and write into ``out``; q, out [Nq, H, D], k and v [Nk, Hkv, D].

    Runs of k may lie anywhere (a KV pool), in any order; nothing is gathered or concatenated.
    """
    for (q0, q1), (k0, k1) in zip(q_runs, k_runs, strict=True):
        if q0 < q1:
            out[q0:q1] = sdpa(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1])[0]


@dataclass(frozen=True)
class Sdpa:
    """``varlen_attention`` behind the protocol: one launch per sequence."""

    name: ClassVar[str] = "sdpa"
    needs_host_runs: ClassVar[bool] = True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor | None = None) -> Tensor:
        assert spans.q_runs is not None, "sdpa needs host runs"
        assert spans.k_runs is not None
        out = torch.empty_like(q) if out is None else out
        varlen_attention(out, q, k, v, spans.q_runs, spans.k_runs)
        return out


@dataclass(frozen=True)
class SdpaPadded:
    """The backend ``sdpa-padded``. ``memory_limit`` bounds the bytes of gathered keys and scores: more sequences go into further calls."""

    memory_limit: int = 1 << 30

    name: ClassVar[str] = "sdpa-padded"
    needs_host_runs: ClassVar[bool] = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor | None = None) -> Tensor:
        n, max_q, max_k = spans.size, spans.max_q, spans.max_k
        if min(n, max_q, max_k, q.shape[0]) == 0:
            return torch.empty_like(q) if out is None else out
        offset = torch.arange(max(max_q, max_k, q.shape[0]), dtype=torch.int32, device=q.device)
        # Past its end a run repeats its last row: rows behind it may be NaN, which no mask removes.
        last_key = (spans.k_len - 1).clamp_(min=0)
        key_rows = (spans.k_start[:-1, None] + torch.minimum(offset[:max_k], last_key[:, None])).clamp_(
            max=k.shape[0] - 1
        )
        mask = (offset[:max_k] < spans.k_len[:, None])[:, None, None, :]
        query_rows = (spans.cu_q[:-1, None] + offset[:max_q]).clamp_(max=q.shape[0] - 1)

        step = self._sequences_at_once(q, k, spans)
        parts = [
            sdpa(
                gather_rows(q, query_rows[i : i + step]),
                gather_rows(k, key_rows[i : i + step]),
                gather_rows(v, key_rows[i : i + step]),
                mask[i : i + step],
            ).flatten(0, 1)
            for i in range(0, n, step)
        ]
        padded = parts[0] if len(parts) == 1 else torch.cat(parts)

        row = offset[: q.shape[0]]
        # Rows past cu_q[-1] belong to no sequence, and get number n.
        sequence = torch.searchsorted(spans.cu_q[1:], row, right=True, out_int32=True)
        index = (sequence * max_q + row - spans.cu_q.index_select(0, sequence)).clamp_(max=n * max_q - 1)
        return copy_to(padded.index_select(0, index), out)

    def _sequences_at_once(self, q: Tensor, k: Tensor, spans: Spans) -> int:
        heads, width = q.shape[1], q.shape[2]
        copies = 2 if k.shape[1] == heads else 2 + 2 * k.shape[1] / heads
        keys = copies * heads * width * q.element_size()
        # Without a fused kernel, scores and their softmax are held in float32.
        scores = 2 * heads * spans.max_q * 4
        return max(1, int(self.memory_limit // (spans.max_k * (keys + scores))))


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows [n, L] of x [N, H, D]: [n, L, H, D]."""
    return x.index_select(0, rows.flatten()).unflatten(0, rows.shape)
