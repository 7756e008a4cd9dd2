"""What a step computes and what comes of it: plain data between scheduler, executor and engine."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from engines.blockdiffusion.request import BlockSampling
from engines.blockdiffusion.rules import Bools, Floats
from engines.blockdiffusion.tables import SharedTables
from engines.runtime.rows import Ints


class Work(NamedTuple):
    """One request's share of a step."""

    request_id: int
    slot: int
    start: int
    """Tokens with K/V before it."""
    blocks: int
    """Final blocks behind ``start`` whose K/V it makes: PREFILL or COMMIT."""
    rows: tuple[int, int] | None
    """Rows of the block behind those that are denoised, from and to."""
    wants_first: bool
    """Whether the last row of ``blocks`` is to give the next block's first token."""


class StepPlan(NamedTuple):
    works: tuple[Work, ...]
    admitted: tuple[int, ...]
    """Requests whose first step this is, or the first after they were preempted."""
    preempted: tuple[int, ...]
    num_rows: int


class Denoised(NamedTuple):
    """The blocks of a step that are denoised, in the order of its works."""

    ids: Ints
    holes: Bools
    wanted: Bools
    """All [n, B]."""
    sampling: tuple[BlockSampling, ...]
    draw: Ints
    """[n] which draw of its request each is."""
    forward: Ints
    """[n] which of its request's forwards; some draw nothing, for their block is done."""


class Outcome(NamedTuple):
    tokens: Ints
    confidence: Floats
    """Both [denoised, B]; anything where nothing was wanted."""
    first: Ints
    """[works that want one] first tokens."""
    duration_s: float


class Executor(Protocol):
    tables: SharedTables

    @property
    def block(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def shifts(self) -> bool:
        """Whether row i of the logits predicts the token at i + 1."""
        ...

    def open(self, final: Ints) -> int:
        """A slot that holds these ids and no K/V."""
        ...

    def extend(self, slot: int, start: int, ids: Ints) -> None:
        """Final ids behind the first ``start``."""
        ...

    def close_slot(self, slot: int) -> None: ...

    def run(self, plan: StepPlan, denoised: Denoised) -> Outcome: ...


class StepRecord(NamedTuple):
    step: int
    duration_s: float
    num_rows: int
    denoised: int
    """Requests whose block was denoised."""
    committed: int
    """Generated blocks whose K/V was made."""
    prefilled: int
    """Blocks of prompts."""
    taken: int
    """Tokens written, edits included."""
    admitted: tuple[int, ...]
    begun: tuple[int, ...]
    """Requests whose first tokens are final."""
    finished: tuple[int, ...]
    preempted: tuple[int, ...]
    num_running: int
    num_waiting: int


NO_BLOCKS = np.zeros((0, 0), dtype=np.int64)
