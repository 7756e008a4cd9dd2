"""Which places of a block take their predicted tokens: rules of LLaDA2, SDAR, Fast-dLLM v2 and DiffusionGemma, over plain arrays.

A forward computes a block's rows; a rule sees what was predicted and how surely, and says what is written. A hole is a place
without a token, marked as such: a token that happens to be the mask's id is a token. Shapes: n blocks of B places.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.errors import require
from engines.knobs import Checked, Range
from engines.runtime.rows import Ints

Bools = NDArray[np.bool_]
Floats = NDArray[Any]
Level = Annotated[float, Range(least=0)]
"""A confidence has to be larger; from 1 on none is."""
Steps = Annotated[int, Range(1, 4096)]


class Blocks(NamedTuple):
    """Blocks before a forward."""

    ids: Ints
    """[n, B]; anything where there is a hole."""
    holes: Bools
    """[n, B]"""
    given: Bools
    """[n, B] tokens that no rule may change: the prompt's, and one that the block before gave."""
    step: Ints
    """[n] forwards the block has been denoised by."""
    full: Ints
    """[n] of them those that found no hole; of canvases, those right before this one that found the same tokens likeliest."""

    def of(self, which: list[int]) -> "Blocks":
        return Blocks(self.ids[which], self.holes[which], self.given[which], self.step[which], self.full[which])


class Verdict(NamedTuple):
    take: Bools
    """[n, B] places that take their predicted token."""
    is_done: Bools
    """[n] blocks that are final with that."""


@dataclass(frozen=True, kw_only=True)
class DecodeRule(Checked, ABC):
    edits: ClassVar[bool] = False
    """Whether tokens that were written may change until their block is final."""
    of_canvases: ClassVar[bool] = False
    """Whether blocks are canvases, whose every place is decided anew by each forward."""

    @property
    def is_exact(self) -> bool:
        """Whether every forward computes what one over the whole sequence would."""
        return True

    def check_block(self, length: int) -> None:
        """Raise UserError for blocks that the rule has no meaning for."""
        return

    def wanted(self, blocks: Blocks) -> Bools:
        """[n, B] places whose prediction the rule reads; all others need no logits."""
        return blocks.holes

    def closing_forwards(self, *, changes: bool) -> int:
        """Forwards that SGLang runs a block by that the rule has done with; ``changes`` says that the last one wrote something."""
        return 2 if self.edits and changes else 1

    def span(self, holes: Bools, step: int) -> tuple[int, int]:
        """The rows of a block, holes [B], that its next forward computes."""
        return 0, len(holes)

    @abstractmethod
    def decide(self, blocks: Blocks, tokens: Ints, confidence: Floats) -> Verdict:
        """tokens and confidence [n, B]: predictions; anything where none is wanted."""


def _filled(blocks: Blocks, take: Bools) -> Verdict:
    return Verdict(take, ~anywhere(blocks.holes & ~take))


def anywhere(which: Bools) -> Bools:
    """[n] blocks with any such place."""
    return np.logical_or.reduce(which, axis=1)


def best(confidence: Floats, among: Bools, count: Ints) -> Bools:
    """[n, B] the ``count`` [n] most confident of the places ``among``, or all where there are fewer; of equals the first."""
    order = np.argsort(-np.where(among, confidence, -np.inf), axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(order.shape[1])[None], axis=1)
    return (rank < count[:, None]) & among


def surest(confidence: Floats, among: Bools, level: float, least: Ints) -> Bools:
    """All places ``among`` that are surer than ``level``, if at least ``least`` [n] are; else the ``least`` surest."""
    sure = among & (confidence > level)
    return np.where((sure.sum(axis=1) >= least)[:, None], sure, best(confidence, among, least))


def quota(steps: int, length: int, step: Ints) -> Ints:
    """[n] tokens of a step, counted from 0: ``length`` shared over ``steps``, what is left over going to the first."""
    return length // steps + (step < length % steps)


@dataclass(frozen=True, kw_only=True)
class LowConfidence(DecodeRule):
    """Every hole that is surer than the threshold, at least the surest (SGLang's LowConfidence)."""

    threshold: Level = 0.95

    def decide(self, blocks: Blocks, tokens: Ints, confidence: Floats) -> Verdict:
        return _filled(blocks, surest(confidence, blocks.holes, self.threshold, np.ones(len(tokens), dtype=np.int64)))


@dataclass(frozen=True, kw_only=True)
class JointThreshold(DecodeRule):
    """Holes as ``LowConfidence``, while every token that would be another with some confidence is replaced (LLaDA2.1).

    A block is final once a forward changes nothing, or with the changes of the ``max_post_steps``-th that found no hole.
    """

    edits: ClassVar[bool] = True

    threshold: Level = 0.5
    edit_threshold: Level = 0.0
    max_post_steps: Annotated[int, Range(0, 4096)] = 16

    def wanted(self, blocks: Blocks) -> Bools:
        return ~blocks.given

    def decide(self, blocks: Blocks, tokens: Ints, confidence: Floats) -> Verdict:
        one = anywhere(blocks.holes).astype(np.int64)
        filled = surest(confidence, blocks.holes, self.threshold, one)
        written = ~blocks.holes & ~blocks.given
        edited = written & (confidence > self.edit_threshold) & (tokens != blocks.ids)
        take = filled | edited
        full = blocks.full + (1 - one)
        is_full = ~anywhere(blocks.holes & ~take)
        return Verdict(take, is_full & (~anywhere(take) | (full >= self.max_post_steps)))


@dataclass(frozen=True, kw_only=True)
class _Scheduled(DecodeRule):
    steps: Steps
    """Forwards that a block of holes is shared over."""

    def check_block(self, length: int) -> None:
        require(self.steps <= length, f"steps={self.steps} exceeds the block's {length} tokens: lower it")


@dataclass(frozen=True, kw_only=True)
class Static(_Scheduled):
    """The surest holes, so many a step (SDAR's low_confidence_static). At most those that are left: the published script takes
    others besides, the prompt's too."""

    def decide(self, blocks: Blocks, tokens: Ints, confidence: Floats) -> Verdict:
        count = quota(self.steps, tokens.shape[1], blocks.step)
        return _filled(blocks, best(confidence, blocks.holes, count))


@dataclass(frozen=True, kw_only=True)
class Dynamic(_Scheduled):
    """All holes that are surer than the threshold if they are as many as ``Static`` takes, else those (SDAR's
    low_confidence_dynamic; LLaDA2.0's generate)."""

    threshold: Level = 0.85

    def decide(self, blocks: Blocks, tokens: Ints, confidence: Floats) -> Verdict:
        count = quota(self.steps, tokens.shape[1], blocks.step)
        return _filled(blocks, surest(confidence, blocks.holes, self.threshold, count))


@dataclass(frozen=True, kw_only=True)
class Sequential(_Scheduled):
    """The leftmost holes, so many a step (SDAR's sequential)."""

    def decide(self, blocks: Blocks, tokens: Ints, confidence: Floats) -> Verdict:
        count = quota(self.steps, tokens.shape[1], blocks.step)
        return _filled(blocks, blocks.holes & (blocks.holes.cumsum(axis=1) <= count[:, None]))


@dataclass(frozen=True, kw_only=True)
class SubBlocks(DecodeRule):
    """``LowConfidence`` in the leftmost part of the block that has holes (Fast-dLLM v2).

    With ``dual_cache`` a forward computes that part alone once its first place has a token, against K/V of the rest of the
    block as an earlier forward left it: an approximation, not what the model says of the block.
    """

    length: Annotated[int, Range(1, 4096)] = 8
    threshold: Level = 0.95
    dual_cache: bool = False

    @property
    def is_exact(self) -> bool:
        return not self.dual_cache

    def check_block(self, length: int) -> None:
        require(
            length % self.length == 0,
            f"sub_block={self.length} must divide the block's {length} tokens: give one that does",
        )

    def wanted(self, blocks: Blocks) -> Bools:
        parts = blocks.holes.reshape(len(blocks.holes), -1, self.length).any(axis=2)
        is_first = parts & (parts.cumsum(axis=1) == 1)
        return blocks.holes & is_first.repeat(self.length, axis=1)

    def span(self, holes: Bools, step: int) -> tuple[int, int]:
        first = int(np.argmax(holes)) // self.length * self.length
        # A block without holes is computed for its K/V, all of which later blocks read.
        if not self.dual_cache or step == 0 or holes[first] or not holes.any():
            return 0, len(holes)
        return first, first + self.length

    def decide(self, blocks: Blocks, tokens: Ints, confidence: Floats) -> Verdict:
        one = np.ones(len(tokens), dtype=np.int64)
        return _filled(blocks, surest(confidence, self.wanted(blocks), self.threshold, one))


@dataclass(frozen=True, kw_only=True)
class EntropyBudget(DecodeRule):
    """The places of least entropy whose sum before each is within a bound keep their draw, all others get a random token (DiffusionGemma).

    Confidence is entropy in nats, negated. What a canvas ends with is the likeliest tokens of its last forward: once these were the same
    for ``stability`` forwards before and mean entropy is small, or after ``steps``.
    """

    edits: ClassVar[bool] = True
    of_canvases: ClassVar[bool] = True

    steps: Steps = 48
    """Forwards of a canvas, at most."""
    entropy_bound: Annotated[float, Range(above=0, most=1e9)] = 0.1
    stability: Annotated[int, Range(0, 4096)] = 1
    confidence: Annotated[float, Range(0, 1e9)] = 0.005
    """Mean entropy below which a canvas may end; 0 leaves every canvas its ``steps``."""
    t_min: Annotated[float, Range(0, 1e6)] | None = 0.4
    """Temperature falls from ``t_max`` towards it; None draws at temperature 1."""
    t_max: Annotated[float, Range(0, 1e6)] = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.t_min is None or self.t_max > self.t_min,
            f"t_min={self.t_min} must be below t_max={self.t_max}: lower it",
        )

    @property
    def is_exact(self) -> bool:
        """A canvas whose memory is lost begins anew: what its forwards thought of it is lost, too."""
        return False

    def temperature(self, step: int) -> float:
        """The forward's that comes after ``step`` others; after the last the same again, where a canvas waits for others."""
        if self.t_min is None:
            return 1.0
        return self.t_min + (self.t_max - self.t_min) * max(1, self.steps - step) / self.steps

    def wanted(self, blocks: Blocks) -> Bools:
        return np.ones_like(blocks.holes)

    def closing_forwards(self, *, changes: bool) -> int:
        return 0

    def decide(self, blocks: Blocks, tokens: Ints, confidence: Floats) -> Verdict:
        entropy = -confidence.astype(np.float64)
        order = np.argsort(entropy, axis=1, kind="stable")
        rising = np.take_along_axis(entropy, order, axis=1)
        take = np.empty_like(blocks.holes)
        np.put_along_axis(take, order, rising.cumsum(axis=1) - rising <= self.entropy_bound, axis=1)
        is_sure = (blocks.full >= self.stability) & (entropy.mean(axis=1) < self.confidence)
        return Verdict(take, is_sure | (blocks.step + 1 >= self.steps))
