"""What a run of the engine takes in and leaves behind: prompts, and plain tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.ar.cluster.record import Table
from engines.ar.session import Session
from engines.runtime.rows import Ints

ROUND_COLUMNS = (
    "session_id",
    "round",
    "ready_s",
    "history",
    "prefill_tokens",
    "decode_tokens",
    "started_s",
    "first_token_s",
    "finished_s",
)
"""One row per round that became ready; TTFT is ``first_token_s`` - ``ready_s``; null where it never came."""
STEP_COLUMNS = ("start_s", "end_s", "decide_s", "run_s", "prefills", "tokens", "decoding", "rows", "mode")
"""``decide_s`` is the policy's time and ``run_s`` the step's, both of the wall; ``rows`` counts padding, too; ``mode``
is what the step ran in: null, a bucket "64x8" or a rung "512"."""
Prompts = Callable[[Session, int], Ints]
"""The ids that round i of a session adds."""


def random_prompts(vocab_size: int, seed: int) -> Prompts:
    """Ids that depend on (seed, session, round) alone."""

    def prompt(session: Session, round_index: int) -> Ints:
        random = np.random.default_rng((seed, session.session_id, round_index))
        return random.integers(vocab_size, size=session.rounds[round_index].prefill_tokens, dtype=np.int64)

    return prompt


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    rounds: Table
    steps: Table
    answers: Mapping[int, list[list[int]]]
    """Session -> generated ids of its finished rounds."""
    facts: Mapping[str, Any]
    """num_preemptions, evicted_blocks, end_s; ``stop_reason`` where sessions are unfinished."""
