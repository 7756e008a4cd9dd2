"""What a worker does next: which prefills, how many tokens of each, and whether the decode batch comes along.

A batching policy sees the queue, the prefills it has begun, how many sequences decode and how many
tokens of K/V there is room for. It neither knows the time a step takes nor who asks.

Tokens of prefills that are still to be computed: kept apart from the tasks, which policies hold and may change.

A worker asks before every step, so that what is recorded as prefilled was computed: every token of a task, once, on one
worker, whatever a batching policy, a queue or a router says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engines.errors import RunError
from engines.knobs import Checked, Count, Tokens
from engines.policies.routing import Decision
from engines.policies.views import IDLE, PrefillTask, Share, Situation, StepPlan

CHUNK_TOKENS = 2048
"""vLLM's token budget of a step with chunked prefill."""


@dataclass(frozen=True, kw_only=True)
class OneByOne:
    """One whole prefill a step, before decoding (AMPD §3, footnote 3)."""

    def next_step(self, at: Situation, now: float) -> StepPlan:
        if at.begun:
            return StepPlan([Share(at.begun[0], at.begun[0].left)])
        if not at.queue or at.need_of(at.queue.peek(now)) > at.room:
            return IDLE
        task = at.queue.take(now)
        return StepPlan([Share(task, task.tokens)])


ONE_BY_ONE = OneByOne()


@dataclass(frozen=True, kw_only=True)
class _Limited(Checked):
    max_num_batched_tokens: Tokens = 8192
    max_num_seqs: Count = 256


@dataclass(frozen=True, kw_only=True)
class PrefillFirst(_Limited):
    """As many whole prefills as the token budget holds, at least one, before decoding (vLLM without chunking)."""

    def next_step(self, at: Situation, now: float) -> StepPlan:
        shares = [Share(task, task.left) for task in at.begun]
        budget = self.max_num_batched_tokens - sum(share.tokens for share in shares)
        places = self.max_num_seqs - at.decoding - len(shares)
        room = at.room
        while at.queue and places > 0:
            task = at.queue.peek(now)
            need = at.need_of(task)
            if need > room or (shares and task.tokens > budget):
                break
            at.queue.take(now)
            shares.append(Share(task, task.tokens))
            budget -= task.tokens
            room -= need
            places -= 1
        return StepPlan(shares) if shares else IDLE


@dataclass(frozen=True, kw_only=True)
class Chunked(_Limited):
    """Decodes first, prefills in what is left of the token budget, the last one in part (vLLM's chunked prefill)."""

    max_num_batched_tokens: Tokens = CHUNK_TOKENS

    def next_step(self, at: Situation, now: float) -> StepPlan:
        shares: list[Share] = []
        budget = max(self.max_num_batched_tokens - at.decoding, 1)
        for task in at.begun:
            tokens = min(task.left, budget)
            if tokens == 0:
                break
            shares.append(Share(task, tokens))
            budget -= tokens
        places = self.max_num_seqs - at.decoding - len(at.begun)
        room = at.room
        while at.queue and budget > 0 and places > 0:
            need = at.need_of(at.queue.peek(now))
            if need > room:
                break
            task = at.queue.take(now)
            tokens = min(task.tokens, budget)
            shares.append(Share(task, tokens))
            budget -= tokens
            room -= need
            places -= 1
        return StepPlan(shares, decodes=True) if shares else IDLE


_MOST_WAKES = 10_000
"""Times in a row that policies ask to be asked again without a prefill."""
_LATEST_S = 1e12


@dataclass(slots=True)
class _Due:
    """What is due of a task: as it was made, and less what was computed since."""

    task: PrefillTask
    order: int
    ready_s: float
    end: int
    """Tokens of its session when it is computed."""
    left: int
    worker: int | None = None
    """The one that began it."""

    def check(self) -> None:
        """Raise RunError where the task is not as it was."""
        task = self.task
        if (
            task.tokens - task.computed == self.left
            and task.history + task.tokens == self.end
            and task.order == self.order
            and task.ready_s == self.ready_s
        ):
            return
        parts = {
            "left": (task.tokens - task.computed, self.left),
            "history + tokens": (task.history + task.tokens, self.end),
            "order": (task.order, self.order),
            "ready_s": (task.ready_s, self.ready_s),
        }
        name, (found, due) = next(each for each in parts.items() if each[1][0] != each[1][1])
        raise RunError(f"a policy has changed prefill {task.task_id}: {name}={found!r}, where {due!r} is due")


@dataclass(slots=True, eq=False)
class Owed:
    _open: dict[int, _Due] = field(default_factory=dict)
    """By task id."""
    _num_wakes: int = 0

    def add(self, task: PrefillTask) -> None:
        """A task as it was made, before any policy sees it."""
        self._open[task.task_id] = _Due(task, task.order, task.ready_s, task.history + task.tokens, task.tokens)

    def more(self, task: PrefillTask, missing: int) -> None:
        """So many tokens of its history, which are not there, are prefilled again."""
        task.history -= missing
        task.tokens += missing
        due = self._open.get(task.task_id)
        if due is not None:
            due.left += missing

    def drop(self, task: PrefillTask) -> None:
        """It is not wanted any longer."""
        self._open.pop(task.task_id, None)

    def check(self, plan: StepPlan, policy: object) -> None:
        """Raise RunError for a plan that cannot be a step: before its shares are looked at."""
        if plan is IDLE:
            return
        if (fault := self._fault_of(plan)) is not None:
            raise RunError(f"batching policy {type(policy).__name__} {fault}")

    def _fault_of(self, plan: StepPlan) -> str | None:
        if not isinstance(plan, StepPlan):
            return f"answers {plan!r:.80}, which is no StepPlan"
        shares, _, wake_s, _ = plan
        if wake_s is not None and not (isinstance(wake_s, int | float) and (wake_s <= _LATEST_S or wake_s == math.inf)):
            return f"wants to be asked again at {wake_s!r}, which is no time"
        if not isinstance(shares, (list, tuple)):
            return f"plans {shares!r:.80}, which are no shares of prefills"
        seen = set()
        for share in shares:
            if not isinstance(share, Share) or not isinstance(share.task, PrefillTask):
                return f"plans {share!r:.80}, which is no share of a prefill"
            task, tokens = share
            due = self._open.get(task.task_id)
            if due is None or due.task is not task:
                return f"runs prefill {task.task_id}, which has ended or was never asked for"
            if not isinstance(tokens, int) or not 1 <= tokens <= due.left:
                return f"runs {tokens!r} tokens of prefill {task.task_id}, which has {due.left} left"
            if task.task_id in seen:
                return f"runs prefill {task.task_id} twice in one step"
            seen.add(task.task_id)
        return None

    def run(self, shares: Sequence[Share], worker_id: int) -> None:
        """These are computed now."""
        self._num_wakes = 0
        for task, tokens in shares:
            due = self._open.get(task.task_id)
            if due is None or due.worker not in (None, worker_id):
                raise RunError(f"prefill {task.task_id} runs on worker {worker_id} and on another")
            due.check()
            due.left -= tokens
            due.worker = worker_id

    def ended(self, task: PrefillTask) -> None:
        """The step of its last token is over."""
        due = self._open.pop(task.task_id, None)
        if due is None:
            raise RunError(f"prefill {task.task_id} ends twice, or was never asked for")
        due.check()

    def woken(self) -> None:
        self._num_wakes += 1
        if self._num_wakes > _MOST_WAKES:
            raise RunError(
                f"a batching policy asked to be asked again {_MOST_WAKES} times, and runs nothing of what waits"
            )


def checked_decision(decision: object, router: object, home: int, prefills: Collection[int]) -> Decision:
    """Raise RunError for a route that leads nowhere, or says another way than it goes."""
    if not isinstance(decision, Decision) or tuple(map(type, decision)) != (int, bool, str):
        fault = f"answers {decision!r:.80}, which is no Decision of a worker's id, True or False, and words"
    elif decision.is_local and decision.worker_id != home:
        fault = f"sends a prefill to worker {decision.worker_id} as local, its session lives on {home}"
    elif not decision.is_local and decision.worker_id not in prefills:
        known = ", ".join(map(str, prefills)) or "none"
        fault = f"sends a prefill to worker {decision.worker_id}, prefill workers are {known}"
    else:
        return decision
    raise RunError(f"router {type(router).__name__} {fault}")
