"""How a prefill step runs: plain data a batching policy puts into ``StepPlan.mode`` and an executor obeys.

None is the standard kernels, as any policy that knows nothing of graphs asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engines.ar.cost import Chunk


class Bucket(NamedTuple):
    """Replay the graph captured for ``batch`` rows of ``length`` tokens each; the step's chunks are padded to it.

    LAPS §3.1, (L, B). Chunk i runs in row i over its own history; rows and tokens beyond the chunks are padding.
    """

    length: int
    batch: int

    @property
    def tokens(self) -> int:
        return self.length * self.batch


class Rung(NamedTuple):
    """Replay the graph captured for ``tokens`` packed tokens, of however many chunks; the rest is padding."""

    tokens: int


class Fallback(NamedTuple):
    """Standard kernels after a graph was looked for: the same step as None, plus the time of the look-up."""


StepMode = Bucket | Rung | Fallback | None
FALLBACK = Fallback()


def padded_tokens(chunks: Sequence[Chunk], mode: object) -> int:
    """Tokens the step computes, padding included."""
    if isinstance(mode, Bucket | Rung):
        return mode.tokens
    return sum(chunk.tokens for chunk in chunks)


def holds(mode: Bucket | Rung, chunks: Sequence[Chunk]) -> bool:
    """Whether the chunks fit the captured shape."""
    if isinstance(mode, Bucket):
        return len(chunks) <= mode.batch and all(chunk.tokens <= mode.length for chunk in chunks)
    return sum(chunk.tokens for chunk in chunks) <= mode.tokens
