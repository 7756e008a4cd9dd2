"""Sequences that decode together, as columns: a step advances them by array arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engines.ar.sampling import GREEDY, Logprobs, SamplingParams
from engines.ar.torch.rows import StepWork
from engines.cluster.sessions import Session
from engines.policies.views import PrefillTask


@dataclass(slots=True, eq=False)
class Sequence:
    """A session in the engine."""

    session: Session
    order: int
    """Rank by arrival; the lower is the older."""
    sampling: SamplingParams = GREEDY
    slot: int = -1
    """-1 until its first prefill begins."""
    round_index: int = 0
    context: int = 0
    """Tokens so far, the newest included. Behind while it decodes (``DecodeColumns``)."""
    computed: int = 0
    """Tokens whose K/V is in the pool: all but the newest, unless it was evicted. Behind while it decodes."""
    left: int = 0
    """Tokens of the round still to come. Behind while it decodes."""
    row: int = -1
    """Row of the record that the current round has."""
    num_written: int = 0
    """Tokens that were written to its slot; those it got there itself count from the end of their round on."""
    saved: list[int] | None = None
    """Its tokens, while a preemption has taken its slot."""
    task: PrefillTask | None = None
    """Its prefill, while that waits or goes on."""
    answers: list[list[int]] = field(default_factory=list)
    """Generated ids of the rounds that are over."""
    logprobs: Logprobs | None = None
    """That of its newest token, where ``sampling`` asks for them."""
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    """Those of its prompt's tokens from the second on, as far as it is prefilled, where ``sampling`` asks for them."""


class DecodeColumns:
    def __init__(self) -> None:
        self.members: list[Sequence] = []
        self.slots, self.contexts, self._left = np.zeros((3, 0), dtype=np.int64)

    @property
    def size(self) -> int:
        return len(self.members)

    def join(self, sequence: Sequence) -> None:
        """It has a newest token and at least one to come."""
        self.members.append(sequence)
        self.slots = np.append(self.slots, sequence.slot)
        self.contexts = np.append(self.contexts, sequence.context)
        self._left = np.append(self._left, sequence.left)

    def work(self) -> StepWork:
        """The newest token of each, for the next."""
        size = self.size
        return StepWork(self.slots, self.contexts - 1, np.ones(size, dtype=np.int64), np.ones(size, dtype=bool))

    def end(self, which: np.ndarray) -> None:
        """Have the next token of these members be their last."""
        self._left = np.where(which, 1, self._left)

    def advance(self) -> list[Sequence]:
        """Every member has a token more; those that have all of theirs leave, the oldest first."""
        self.contexts = self.contexts + 1
        self._left = self._left - 1
        done = self._left == 0
        if not done.any():
            return []
        return sorted(self._take(done), key=lambda sequence: sequence.order)

    def youngest(self) -> Sequence:
        return max(self.members, key=lambda sequence: sequence.order)

    def leave(self, sequence: Sequence) -> None:
        self._take(np.array([member is sequence for member in self.members]))

    def _take(self, which: np.ndarray) -> list[Sequence]:
        """Bring members up to date and let them go."""
        gone = []
        for index in np.flatnonzero(which).tolist():
            sequence = self.members[index]
            sequence.context, sequence.left = int(self.contexts[index]), int(self._left[index])
            sequence.computed = sequence.context - 1
            gone.append(sequence)
        stay = ~which
        self.members = [member for member, stays in zip(self.members, stay.tolist(), strict=True) if stays]
        self.slots, self.contexts, self._left = self.slots[stay], self.contexts[stay], self._left[stay]
        return gone
