"""Rules that decide which places of a block take their predicted tokens: of LLaDA2, SDAR, Fast-dLLM v2, DiffusionGemma, on plain arrays.

A forward computes a block's rows; a rule sees predictions and confidences, and decides which tokens are written. A hole is a place marked
as having no token: a token that happens to be the mask's id is a token. Shapes: n blocks of B places.
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
"""A confidence must be larger than this; at 1 or more none is."""
Steps = Annotated[int, Range(1, 4096)]


class Blocks(NamedTuple):
    """The denoised blocks, as a forward finds them."""

    ids: Ints
    """[n, B] token ids; those of holes are arbitrary."""
    holes: Bools
    """[n, B]"""
    given: Bools
    """[n, B] tokens that no rule may change: the prompt's, and one that the previous block gave."""
    step: Ints
    """[n] how many forwards have denoised the block."""
    full: Ints
    """[n] how many of these found no hole. For canvases: how many right before this one found the same tokens likeliest."""

    def of(self, rows: list[int]) -> "Blocks":
        return Blocks(self.ids[rows], self.holes[rows], self.given[rows], self.step[rows], self.full[rows])


class Verdict(NamedTuple):
    take: Bools
    """[n, B] places that take their predicted token."""
    is_done: Bools
    """[n] blocks that are then final."""


@dataclass(frozen=True, kw_only=True)
class DecodeRule(Checked, ABC):
    edits: ClassVar[bool] = False
    """Whether written tokens may change until their block is final."""
    of_canvases: ClassVar[bool] = False
    """Whether blocks are canvases, all of whose places each forward decides anew."""

    @property
    def is_exact(self) -> bool:
        """Whether each forward computes what one over the whole sequence would."""
        return True

    def check_block(self, length: int) -> None:
        """Raise UserError if the rule has no meaning for blocks of this length."""
        return

    def wanted(self, blocks: Blocks) -> Bools:
        """[n, B] places whose prediction the rule reads; all others need no logits."""
        return blocks.holes

    def closing_forwards(self, *, changes: bool) -> int:
        """How many more forwards SGLang runs on a block after its rule is done; ``changes`` says whether the last one wrote something."""
        return 2 if self.edits and changes else 1

    def span(self, holes: Bools, step: int) -> tuple[int, int]:
        """The rows of a block, with holes [B], that its next forward computes."""
        return 0, len(holes)

    @abstractmethod
    def decide(self, blocks: Blocks, tokens: Ints, confidence: Floats) -> Verdict:
        """Decide by the predicted tokens and confidence [n, B], which are arbitrary where none is wanted."""


def _verdict(blocks: Blocks, take: Bools) -> Verdict:
    return Verdict(take, ~anywhere(blocks.holes & ~take))


def anywhere(which: Bools) -> Bools:
    """[n] whether a block has any such place."""
    return np.logical_or.reduce(which, axis=1)


def best(confidence: Floats, among: Bools, count: Ints) -> Bools:
    """[n, B] the ``count`` [n] most confident of the places ``among``, or all if there are fewer; of equals the first."""
    order = np.argsort(-np.where(among, confidence, -np.inf), axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(order.shape[1])[None], axis=1)
    return (rank < count[:, None]) & among


def surest(confidence: Floats, among: Bools, level: float, least: Ints) -> Bools:
    """All places ``among`` that are surer than ``level``, if there are at least ``least`` [n]; else the ``least`` surest."""
    sure = among & (confidence > level)
    return np.where((sure.sum(axis=1) >= least)[:, None], sure, best(confidence, among, least))


def quota(steps: int, length: int, step: Ints) -> Ints:
    """[n] tokens of a step, counted from 0: ``length`` shared over ``steps``, with the remainder going to the first steps."""
    return length // steps + (step < length % steps)


@dataclass(frozen=True, kw_only=True)
class LowConfidence(DecodeRule):
    """Takes every hole that is surer than the threshold, and always the surest (SGLang's LowConfidence)."""

    threshold: Level = 0.95

    def decide(self, blocks: Blocks, tokens: Ints, confidence: Floats) -> Verdict:
        return _verdict(blocks, surest(confidence, blocks.holes, self.threshold, np.ones(len(tokens), dtype=np.int64)))


@dataclass(frozen=True, kw_only=True)
class JointThreshold(DecodeRule):
    """Takes holes as ``LowConfidence`` does, and replaces every token whose confident prediction is another token (LLaDA2.1).

    A block is final once a forward changes nothing, or after the changes of the ``max_post_steps``-th forward that found no hole.
    """

    edits: ClassVar[bool] = True

    threshold: Level = 0.5
    edit_threshold: Level = 0.0
    max_post_steps: Annotated[int, Range(0, 4096)] = 16

    def wanted(self, blocks: Blocks) -> Bools:
        return ~blocks.given

    def decide(self, blocks: Blocks, tokens: Ints, confidence: Floats) -> Verdict:
        has_holes = anywhere(blocks.holes).astype(np.int64)
        filled = surest(confidence, blocks.holes, self.threshold, has_holes)
        written = ~blocks.holes & ~blocks.given
        edited = written & (confidence > self.edit_threshold) & (tokens != blocks.ids)
        take = filled | edited
        full = blocks.full + (1 - has_holes)
        is_full = ~anywhere(blocks.holes & ~take)
        return Verdict(take, is_full & (~anywhere(take) | (full >= self.max_post_steps)))


@dataclass(frozen=True, kw_only=True)
class _Scheduled(DecodeRule):
    steps: Steps
    """Number of forwards that share the holes of a block."""

    def check_block(self, length: int) -> None:
        require(self.steps <= length, f"steps={self.steps} exceeds the block's {length} tokens: lower it")


@dataclass(frozen=True, kw_only=True)
class Static(_Scheduled):
    """Takes the surest holes, a fixed number per step (SDAR's low_confidence_static). It takes only holes: the published script also takes
    other places, even the prompt's."""

    def decide(self, blocks: Blocks, tokens: Ints, confidence: Floats) -> Verdict:
        count = quota(self.steps, tokens.shape[1], blocks.step)
        return _verdict(blocks, best(confidence, blocks.holes, count))


@dataclass(frozen=True, kw_only=True)
class Dynamic(_Scheduled):
    """Takes all holes surer than the threshold if there are as many as ``Static`` takes, else those of ``Static`` (SDAR's
    low_confidence_dynamic; LLaDA2.0's generate)."""

    threshold: Level = 0.85

    def decide(self, blocks: Blocks, tokens: Ints, confidence: Floats) -> Verdict:
        count = quota(self.steps, tokens.shape[1], blocks.step)
        return _verdict(blocks, surest(confidence, blocks.holes, self.threshold, count))


@dataclass(frozen=True, kw_only=True)
class Sequential(_Scheduled):
    """Takes the leftmost holes, a fixed number per step (SDAR's sequential)."""

    def decide(self, blocks: Blocks, tokens: Ints, confidence: Floats) -> Verdict:
        count = quota(self.steps, tokens.shape[1], blocks.step)
        return _verdict(blocks, blocks.holes & (blocks.holes.cumsum(axis=1) <= count[:, None]))


@dataclass(frozen=True, kw_only=True)
class SubBlocks(DecodeRule):
    """``LowConfidence`` in the leftmost part of the block that has holes (Fast-dLLM v2).

    With ``dual_cache``, once the part's first place has a token, a forward computes that part alone. It uses K/V of the rest of the block
    from an earlier forward: an approximation, not what the model says of the block.
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
        # A block without holes is computed whole for its K/V, which later blocks read.
        if not self.dual_cache or step == 0 or holes[first] or not holes.any():
            return 0, len(holes)
        return first, first + self.length

    def decide(self, blocks: Blocks, tokens: Ints, confidence: Floats) -> Verdict:
        ones = np.ones(len(tokens), dtype=np.int64)
        return _verdict(blocks, surest(confidence, self.wanted(blocks), self.threshold, ones))


@dataclass(frozen=True, kw_only=True)
class EntropyBudget(DecodeRule):
    """The places of least entropy keep their draw, as long as the entropy sum before each is within a bound. All others get a random token
    (DiffusionGemma).

    Confidence is negated entropy in nats. A canvas ends with its last forward's likeliest tokens: once these stayed the same for
    ``stability`` forwards and mean entropy is small, or after ``steps``.
    """

    edits: ClassVar[bool] = True
    of_canvases: ClassVar[bool] = True

    steps: Steps = 48
    """Most forwards of a canvas."""
    entropy_bound: Annotated[float, Range(above=0, most=1e9)] = 0.1
    stability: Annotated[int, Range(0, 4096)] = 1
    confidence: Annotated[float, Range(0, 1e9)] = 0.005
    """A canvas may end if its mean entropy is below this; with 0 every canvas runs all its ``steps``."""
    t_min: Annotated[float, Range(0, 1e6)] | None = 0.4
    """Temperature falls from ``t_max`` towards this; None draws at temperature 1."""
    t_max: Annotated[float, Range(0, 1e6)] = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.t_min is None or self.t_max > self.t_min,
            f"t_min={self.t_min} must be below t_max={self.t_max}: lower it",
        )

    @property
    def is_exact(self) -> bool:
        """Always false: a canvas that loses its K/V begins anew, because it loses its forwards' results, too."""
        return False

    def temperature(self, step: int) -> float:
        """Temperature of the forward after ``step`` others. After the last it stays the same, if a canvas waits for others."""
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
