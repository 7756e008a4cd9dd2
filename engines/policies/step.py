"""A step of a worker: what a batching policy sees before it, and the plan it answers with, as plain data.

``StepPlan.mode`` says how a prefill step runs, and an executor obeys. None is the standard kernels, as any policy that knows
nothing of graphs asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from engines.policies.task import PrefillQueue, PrefillTask


class Chunk(NamedTuple):
    """``tokens`` of one prompt prefilled over ``history`` tokens whose K/V exist."""

    history: int
    tokens: int


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


def padded_tokens(tokens: int, mode: object) -> int:
    """Tokens that a step of so many computes, padding included."""
    return mode.tokens if isinstance(mode, Bucket | Rung) else tokens


class StepTimes(Protocol):
    """A predicted step time. ``StepModel`` is one; so is a cost model, where prediction shall have no error."""

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float: ...


class Share(NamedTuple):
    """``tokens`` of a prefill in one step."""

    task: PrefillTask
    tokens: int


class StepPlan(NamedTuple):
    """No shares: decode if there is something to decode, else wait."""

    shares: Sequence[Share] = ()
    decodes: bool = False
    """Whether the decode batch advances by one token in the same step."""
    wake_s: float | None = None
    """Ask again at this time at the latest (a batching window)."""
    mode: object = None
    """For the worker's cost model, where it has several ways to run a step (LAPS: a captured graph)."""


IDLE = StepPlan()


class Situation(NamedTuple):
    """A worker between two steps."""

    queue: PrefillQueue
    begun: Sequence[PrefillTask]
    """Admitted prefills with tokens left."""
    decoding: int
    """Sequences in the decode batch."""
    room: int
    """Tokens of K/V that may be admitted."""
    need_of: Callable[[PrefillTask], int]
    """Tokens of K/V that admitting a task takes, without what the worker still has of its history."""


class Batching(Protocol):
    def next_step(self, at: Situation, now: float) -> StepPlan:
        """New prefills are taken from ``at.queue``; what is left in ``at.begun`` comes again."""
        ...
