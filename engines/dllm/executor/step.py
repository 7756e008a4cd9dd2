"""What the parts of the torch executor hand each other in one step.

Shapes: n requests, those in a Refresh first; N packed rows; B the longest active block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from engines.attention import Run, Spans
from engines.dllm.cache.selection import Pack
from engines.dllm.decode.denoise import Reduced, Sampling
from engines.dllm.executor.rows import ItemTable, PackedRows
from engines.dllm.plan import PlanItem, StepPlan
from engines.models.protocol import Attend, Rotary
from engines.runtime.rows import Ints


class StepRows(NamedTuple):
    """N packed rows on the device, the first ``num_refresh_rows`` of Refresh requests."""

    num_rows: int
    num_refresh_rows: int
    position: Tensor
    flat: Tensor
    """Index into the flattened token store."""
    pool_row: Tensor
    refresh_runs: list[Run]
    reuse_q_runs: list[Run]
    reuse_k_runs: list[Run]
    spans: tuple[Spans, Spans] | None
    """The same runs on the device, of Refresh and of Reuse requests; None where attention reads the host's."""
    pack: Pack | None
    """Where some requests build their cache."""
    selecting: StepRows | None = None
    """The same rows with the runs of keys of layers that select, where one keeps every row; None where all layers are alike."""


class Block(NamedTuple):
    """[n, B] places of the active blocks on the device: position, packed row, index into the token store."""

    positions: Tensor
    packed: Tensor
    flat: Tensor
    padding: Tensor | None
    """Places past the end of a block shorter than the longest; None where all are equally long."""
    slot: Tensor
    """[n] of the requests."""
    step: Tensor | None = None
    """[n, 1] of the requests in their blocks; None where no row settles."""


class Fresh(NamedTuple):
    """Rows of the blocks that a step computes where others have settled: the last M of the packed rows."""

    position: Tensor
    """[M]; so the next two."""
    flat: Tensor
    pool_row: Tensor
    packed: Tensor
    """[n, B] as ``Block.packed``, of all requests of the step; of a settled place any row."""

    def write(self, num_rows: int, position: Tensor, flat: Tensor, pool_row: Tensor, num_refresh_rows: int) -> None:
        """Into the rows of a step of so many, of which ``pool_row`` lacks those of Refresh requests."""
        first = num_rows - len(self.position)
        position[first:num_rows] = self.position
        flat[first:num_rows] = self.flat
        pool_row[first - num_refresh_rows : num_rows - num_refresh_rows] = self.pool_row


class Candidates(NamedTuple):
    """``size`` places that get logits: index into a flattened [n, B] grid, packed row, item of the step; padded to
    MIN_ROWS with repetitions of one."""

    size: int
    cell: Tensor
    row: Tensor
    item: Ints
    is_every_row: bool = False
    """Whether they are all of the packed rows, in order."""


class EagerRows(NamedTuple):
    """What a forward launched operator by operator runs on."""

    rows: StepRows
    rotary: Rotary
    attend: Attend


class GraphKey(NamedTuple):
    """The size of a captured graph."""

    rows: int
    sequences: int
    max_q: int
    has_refresh: bool
    """Full forwards among the rows, in front of those of Reuse requests."""

    def holds(self, other: GraphKey) -> bool:
        sizes = zip(self[:3], other[:3], strict=True)
        return self.has_refresh == other.has_refresh and all(size >= wanted for size, wanted in sizes)


class GraphRows(NamedTuple):
    """What a captured graph is replayed on."""

    key: GraphKey
    table: ItemTable
    packed: PackedRows
    fresh: Fresh | None = None


class StepLayout(NamedTuple):
    """What of a step follows from the rows it computes, whatever they hold: the steps of a block share it."""

    num_rows: int
    rows: EagerRows | GraphRows | None
    """None where the forward keeps its own."""
    block: Block
    every: Candidates | None
    """All places of the blocks, where committed ones get logits too."""


class BlockTokens(NamedTuple):
    """[n, B] the active blocks as a step finds them."""

    ids: Tensor
    fixed: Tensor
    """Places that hold a token already, or belong to no position."""


class Guidance(NamedTuple):
    """Classifier-free guidance of one step, by packed row; scale 0 leaves a row as it is."""

    hidden: Tensor
    scale: Tensor


class Forwarded(NamedTuple):
    hidden: Tensor
    """[N, d] final-norm states, the step's rows first."""
    guidance: Guidance | None
    query_rows: int
    """Rows that were computed, padding of the system included."""


class Forward(Protocol):
    """The model's layers over a step's rows."""

    def __call__(self, plan: StepPlan, items: Sequence[PlanItem], layout: StepLayout) -> Forwarded: ...

    def rest(self) -> None:
        """No request is left: what was kept between steps may go."""


class AttendFactory(Protocol):
    """Attention of the layers of one step."""

    def __call__(self, items: Sequence[PlanItem], rows: StepRows, pad_to: int | None) -> Attend: ...


class Head(Protocol):
    """The output head: hidden states to a token and a confidence per candidate."""

    def __call__(
        self, hidden: Tensor, guidance: Guidance | None, candidates: Candidates, sampling: Sampling | None
    ) -> Reduced:
        """[at least candidates.size] each."""

    def logit_rows(self, num_rows: int, wanted: int) -> int:
        """Rows projected onto the vocabulary in a step of ``num_rows`` with ``wanted`` candidates."""
