"""Look-ahead admission: a request enters only where its whole trajectory fits (ours).

The paper (§7) leaves a "Budgeting-Aware Scheduler" to future work: it would pre-compute the
trajectory of tokens over the generation window, so that admitted requests never violate the cap.
This is our design of one. On a fixed schedule the query tokens of every step that a request will
ever run are known when it arrives: T where the step is a Refresh, the window where it is a Reuse. The
trajectories of all running requests add up to the demand committed to each coming step. The head of
the queue is admitted at the first step from which its own trajectory, on top of that demand, stays
within ``max_num_batched_tokens`` to its end, a slot and its KV rows being free.

An admitted request therefore runs at every step: it is never held, and its service takes exactly as
many steps as it has. Admission is strictly first come, first served. A later request that fits
does not overtake: its demand could push back the first step at which the head fits.

How far to look. Where every block but a request's last takes the same number of steps S in all
requests, a request costs no more at step t + S than at t. So does their sum, and what fits for S
steps fits for good: one period is exact. Unequal settings break that, so the whole trajectory is compared:
one vectorised comparison of at most ``steps`` numbers, without a case distinction.

Where confidence or chance decides how many tokens a step commits, Refreshes move and nothing can be
promised; such requests are refused. ``stop_at_eos`` and a cancellation only cut a trajectory short: the
rest is given back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.plan import Request, StepPlan
from engines.dllm.scheduling.phase import RefreshRule, SeeingRule
from engines.dllm.scheduling.scheduler import Completion, Confidences, KvPool, PhaseScheduler, plan_item
from engines.dllm.sequence import Sequence, is_open_ended
from engines.errors import UserError, require

Tokens = npt.NDArray[np.int64]
"""Query tokens of consecutive steps."""

MAX_PATTERNS = 64
"""Generation settings whose trajectories are kept for the next request that asks for the same."""


class CommittedDemand:
    """Query tokens that admitted requests will take in the coming steps.

    A buffer of twice the longest look, moved back to its start when used up: a ring in constant
    amortised time per step, in which every look ahead is one contiguous slice.
    """

    def __init__(self) -> None:
        self.step = 0
        """Steps executed so far."""
        self._tokens: Tokens = np.zeros(2, dtype=np.int64)
        self._head = 0

    def ahead(self, num_steps: int) -> Tokens:
        """A view of the coming ``num_steps`` steps, the next one first; write to it to commit."""
        if self._head + num_steps > len(self._tokens):
            moved = np.zeros(2 * num_steps, dtype=np.int64)
            left = self._tokens[self._head :]
            moved[: len(left)] = left
            self._tokens, self._head = moved, 0
        return self._tokens[self._head : self._head + num_steps]

    def advance(self) -> None:
        self.step += 1
        self._head += 1


class LookaheadScheduler(PhaseScheduler):
    """Charged like ``phase``; see the module for when a request enters."""

    def __init__(
        self, config: EngineConfig, pool: KvPool, rule: RefreshRule, *, exact_steps: bool = False, own: Any = None
    ) -> None:
        super().__init__(config, pool, rule, exact_steps=exact_steps, own=own)
        self.check_rule(rule)
        self._demand = CommittedDemand()
        self._trajectories: dict[int, Tokens] = {}
        self._entered_at: dict[int, int] = {}
        self._pattern = lru_cache(maxsize=MAX_PATTERNS)(self._reuse_tokens)

    @classmethod
    def check(cls, config: EngineConfig, generation: GenerationConfig) -> None:
        if is_open_ended(generation, config.decode):
            values = {"threshold": generation.threshold, "factor": generation.factor, "quota": config.decode.quota}
            name, value = next((name, value) for name, value in values.items() if value is not None)
            raise UserError(
                f"{name}={value!r} leaves open how many steps a block takes, and scheduler='lookahead' plans every step "
                f"at admission: use scheduler='phase'"
            )

    @classmethod
    def check_rule(cls, rule: RefreshRule) -> None:
        require(
            not isinstance(rule, SeeingRule),
            f"refresh rule {type(rule).__name__} decides as it goes, and scheduler='lookahead' plans every step at "
            f"admission: use scheduler='phase'",
        )

    def submit(self, request: Request) -> None:
        super().submit(request)
        reuse = self._pattern(replace(request.generation, seed=0))
        self._trajectories[request.request_id] = np.where(reuse > 0, reuse, request.total_len)

    def _reuse_tokens(self, generation: GenerationConfig) -> Tokens:
        """Query tokens of every step, 0 where it is a Refresh: those alone depend on the prompt."""
        request = Request(request_id=0, prompt_len=1, generation=generation)
        sequence = Sequence.of(request, self.rule, self.config, exact_steps=self.exact_steps)
        steps = [0 if phase.is_refresh else tokens for phase, tokens in sequence.trajectory()]
        return np.array(steps, dtype=np.int64)

    def schedule(self) -> StepPlan | None:
        admitted: list[Request] = []
        while self.waiting and len(self.running) < self.config.max_num_seqs and self._enter(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            admitted.append(sequence.request)
        if not self.running:
            return None
        return StepPlan(
            items=tuple(map(plan_item, self.running)),
            admitted=tuple(admitted),
            scheduled_tokens=int(self._demand.ahead(1)[0]),
        )

    def _enter(self, sequence: Sequence) -> bool:
        request_id = sequence.request.request_id
        trajectory = self._trajectories[request_id]
        ahead = self._demand.ahead(len(trajectory))
        if (ahead + trajectory).max() > self.config.max_num_batched_tokens or not self._reserve(sequence):
            return False
        ahead += trajectory
        self._entered_at[request_id] = self._demand.step
        return True

    def complete(
        self,
        plan: StepPlan,
        committed: tuple[int, ...],
        stops: Mapping[int, int] = MappingProxyType({}),
        **told: Confidences,
    ) -> Completion:
        self._demand.advance()
        return super().complete(plan, committed, stops, **told)

    def fail(self, plan: StepPlan) -> tuple[int, ...]:
        self._demand.advance()
        return super().fail(plan)

    def _drop(self, sequence: Sequence) -> None:
        super()._drop(sequence)
        request_id = sequence.request.request_id
        trajectory = self._trajectories.pop(request_id)
        if request_id not in self._entered_at:
            return
        rest = trajectory[self._demand.step - self._entered_at.pop(request_id) :]
        if len(rest):
            self._demand.ahead(len(rest))[:] -= rest
