"""Temporal disaggregation: one instance, two queues, every step of one class alone (LAPS §3.2).

While short requests wait for company, a long chunk may run: the instance never idles with a long request queued, unless
``while_waiting`` says that it does.
Short requests go first; a long one that has waited ``max_long_wait_s`` gets every other step. From then on at most
one short batch runs between two long steps, so it starts after at most as many short batches as long steps are
ahead of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engines.errors import UserError
from engines.knobs import Checked, Seconds, Tokens
from engines.laps.waiting import AdaptiveWait, ClassQueue, Joins
from engines.policies.step import Share, Situation, StepPlan
from engines.policies.task import PrefillTask

LongDispatch = Literal["single", "pack"]
ClassRule = Literal["short-first", "urgency"]


@dataclass(frozen=True, kw_only=True)
class TemporalConfig(Checked):
    chunk_tokens: Tokens = 2048
    """C_l: tokens of a long prompt in a step."""
    long_dispatch: LongDispatch = "pack"
    """single: a step advances one request by C_l tokens, as printed. pack: several short of C_l tokens share it."""
    class_rule: ClassRule = "short-first"
    """urgency: the class whose deadline is nearer than sigma, else the one with the larger backlog in steps."""
    max_long_wait_s: Seconds = 1.0
    """Seconds after which a long request gets every other step."""
    short_tokens: Tokens = 8192
    """M: most tokens of a short batch."""
    joins: Joins = "all"
    """Which short prompts join the oldest one's batch: those of the same bucket of length alone, as printed (§3.1); shorter ones too,
    which pad no further; or all, whatever a graph then pads."""
    while_waiting: Literal["long", "idle"] = "long"
    """What an instance does while short prompts wait for company: a step of long ones, or nothing."""


@dataclass(slots=True)
class TemporalDisaggregation:
    """Alone on an instance; or in a pool, whose queue then holds one class only and migrations drain the other."""

    wait: AdaptiveWait
    config: TemporalConfig
    _was_long: bool = False
    """The class of the step before."""

    def next_step(self, at: Situation, now: float) -> StepPlan:
        queue = at.queue
        if not isinstance(queue, ClassQueue):
            raise UserError(
                f"queue={type(queue).__name__}: temporal disaggregation keeps two queues, give a ClassQueue"
            )
        short = self.wait.next_batch(queue, now) if queue.num_short and not self._long_is_due(at, queue, now) else None
        if short is None and not queue.num_short and self.wait.config.wait == "printed":
            short = self.wait.next_batch(queue, now)
        shares = self._short_shares(at, queue, short.depth) if short is not None and short.depth else []
        if shares:
            self._was_long = False
            return StepPlan(shares)
        is_held = short is not None and short.wake_s is not None and self.config.while_waiting == "idle"
        shares = [] if is_held else self._long_shares(at, queue, now)
        if shares:
            self._was_long = True
            return StepPlan(shares)
        return StepPlan(wake_s=None if short is None else short.wake_s)

    # ---- which class ---------------------------------------------------------------------------------

    def _long_is_due(self, at: Situation, queue: ClassQueue, now: float) -> bool:
        oldest = min(at.begun, key=lambda task: task.ready_s) if at.begun else next(iter(queue.longs.values()), None)
        if oldest is None:
            return False
        if now - oldest.ready_s >= self.config.max_long_wait_s:
            return not self._was_long
        return self.config.class_rule == "urgency" and self._long_is_more_urgent(oldest, at, queue, now)

    def _long_is_more_urgent(self, long: PrefillTask, at: Situation, queue: ClassQueue, now: float) -> bool:
        short = queue.oldest_short()
        assert short is not None
        slo_s, sigma_s = self.wait.config.deadline_s, self.wait.config.slack_s
        # Both classes have the same objective: the older request has the nearer deadline.
        if min(long.ready_s, short.ready_s) + slo_s - now <= sigma_s and slo_s < math.inf:
            return long.ready_s < short.ready_s
        long_tokens = queue.backlog_tokens - queue.short_tokens + sum(task.left for task in at.begun)
        return long_tokens / self.config.chunk_tokens > queue.short_tokens / self.config.short_tokens

    # ---- what of it -------------------------------------------------------------------------------------

    def _short_shares(self, at: Situation, queue: ClassQueue, depth: int) -> list[Share]:
        """Bucket first, within the token budget (Algorithm 1, line 5)."""
        budget, room = self.config.short_tokens, at.room
        chosen: list[PrefillTask] = []
        for task in queue.shorts_by_bucket(self.config.joins):
            need = at.need_of(task)
            if len(chosen) == depth or need > room or (chosen and task.tokens > budget):
                break
            chosen.append(task)
            budget -= task.tokens
            room -= need
        return [Share(queue.pull(task), task.tokens) for task in chosen]

    def _long_shares(self, at: Situation, queue: ClassQueue, now: float) -> list[Share]:
        budget, room = self.config.chunk_tokens, at.room
        shares: list[Share] = []
        candidates: Sequence[PrefillTask] = (
            [*at.begun, *queue.longs.values()] if at.begun else list(queue.longs.values())
        )
        num_begun = len(at.begun)
        for index, task in enumerate(candidates):
            if index >= num_begun:
                need = at.need_of(task)
                if need > room:
                    break
                room -= need
                queue.pull(task)
            tokens = min(task.left, budget)
            shares.append(Share(task, tokens))
            budget -= tokens
            if not budget or self.config.long_dispatch == "single":
                break
        return shares
