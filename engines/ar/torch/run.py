"""What a run of the engine takes in and leaves behind: prompts, and plain tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.cluster.record import RoundRow, Table
from engines.cluster.sessions import Session
from engines.runtime.rows import Ints

Prompts = Callable[[Session, int], Ints]
"""The ids that round i of a session adds."""


def random_prompts(vocab_size: int, seed: int) -> Prompts:
    """Ids that depend on (seed, session, round) alone."""

    def prompt(session: Session, round_index: int) -> Ints:
        random = np.random.default_rng((seed, session.session_id, round_index))
        return random.integers(vocab_size, size=session.rounds[round_index].prefill_tokens, dtype=np.int64)

    return prompt


@dataclass(slots=True)
class EngineRound(RoundRow):
    started_s: float | None = None
    """When its prefill was admitted."""


@dataclass(slots=True)
class StepRow:
    start_s: float
    end_s: float
    decide_s: float
    """The policy's time, of the wall."""
    run_s: float
    """The step's, of the wall."""
    prefills: int
    tokens: int
    decoding: int
    rows: int
    """Padding included."""
    mode: str | None
    """What the step ran in: null, a bucket "64x8" or a rung "512"."""


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    rounds: Table
    steps: Table
    answers: Mapping[int, list[list[int]]]
    """Session -> generated ids of its finished rounds."""
    facts: Mapping[str, Any]
    """num_preemptions, evicted_blocks, end_s; ``stop_reason`` where sessions are unfinished."""
