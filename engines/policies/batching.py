"""Batching policies decide a worker's next step: which prefills, how many tokens of each, and whether the decode batch runs along.

A batching policy sees the queue, the prefills it has begun, how many sequences decode and how many tokens of K/V there is room for.
It knows neither the time of a step nor who asks. ``Owed`` has the tokens still to be computed, apart from the tasks, which policies may
change. So each token of a task is computed once, on one worker, whatever a policy, a queue or a router does.

To end the most jobs by their due times, one after the other, we use the algorithm of Moore and Hodgson (Moore, Management Science
1968; 1 || sum U_j). It takes jobs by due time, and if one would be late, it gives up the longest so far.
"""

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from engines.data import unwrapped
from engines.errors import RunError
from engines.knobs import Checked, Count, Needs, Range, Tokens
from engines.policies.routing import Decision
from engines.policies.views import IDLE, NextStep, OpenQueue, PrefillTask, Rule, Share, Situation

CHUNK_TOKENS = 2048
"""vLLM's token budget of a step with chunked prefill."""


@dataclass(frozen=True, kw_only=True)
class OneByOne:
    """One whole prefill a step, before decoding (AMPD §3, footnote 3)."""

    def next_step(self, at: Situation, now: float) -> NextStep:
        if at.begun:
            return NextStep([Share(at.begun[0], at.begun[0].left)])
        if not at.queue or at.need_of(at.queue.peek(now)) > at.room:
            return IDLE
        task = at.queue.take(now)
        return NextStep([Share(task, task.tokens)])


ONE_BY_ONE = OneByOne()


@dataclass(frozen=True, kw_only=True)
class _Limited(Checked):
    max_num_batched_tokens: Tokens = 8192
    max_num_seqs: Count = 256


@dataclass(frozen=True, kw_only=True)
class PrefillFirst(_Limited):
    """As many whole prefills as the token budget holds, at least one, before decoding (vLLM without chunking)."""

    def next_step(self, at: Situation, now: float) -> NextStep:
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
        return NextStep(shares) if shares else IDLE


@dataclass(frozen=True, kw_only=True)
class Chunked(_Limited):
    """Decodes first. Prefills get the rest of the token budget, the last one in part (vLLM's chunked prefill)."""

    max_num_batched_tokens: Tokens = CHUNK_TOKENS

    def rule(self) -> Rule:
        return Rule("chunked", limits=(self.max_num_batched_tokens, self.max_num_seqs))

    def next_step(self, at: Situation, now: float) -> NextStep:
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
        return NextStep(shares, decodes=True) if shares else IDLE


_MOST_WAKES = 10_000
"""How many times in a row policies may ask to be asked again without running a prefill."""
_LATEST_S = 1e12


@dataclass(slots=True)
class _Due:
    """The part of a task that is due: as the task was made, less the tokens computed since."""

    task: PrefillTask
    order: int
    ready_s: float
    end: int
    """Tokens of the session once the task is computed."""
    left: int
    worker: int | None = None
    """The worker that began the task."""

    def check(self) -> None:
        """Raises RunError if a policy has changed the task."""
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
        name, (actual, expected) = next(item for item in parts.items() if item[1][0] != item[1][1])
        raise RunError(f"a policy has changed prefill {task.task_id}: {name}={actual!r}, where {expected!r} is due")


@dataclass(slots=True, eq=False)
class Owed:
    _open: dict[int, _Due] = field(default_factory=dict)
    """The due parts by task id."""
    _num_wakes: int = 0

    def add(self, task: PrefillTask) -> None:
        """Add a task as it was made, before any policy sees it."""
        self._open[task.task_id] = _Due(task, task.order, task.ready_s, task.history + task.tokens, task.tokens)

    def recompute(self, task: PrefillTask, tokens: int) -> None:
        """Prefill ``tokens`` of the task's history again, because they are not there; a negative number spares tokens."""
        task.history -= tokens
        task.tokens += tokens
        entry = self._open.get(task.task_id)
        if entry is not None:
            entry.left += tokens

    def drop(self, task: PrefillTask) -> None:
        """The task is not wanted any longer."""
        self._open.pop(task.task_id, None)

    def check(self, plan: NextStep, policy: object) -> None:
        """Raises RunError for a plan that cannot be a step. Call this before you use its shares."""
        if plan is IDLE:
            return
        if (fault := self._fault_of(plan)) is not None:
            raise RunError(f"batching policy {type(unwrapped(policy)).__name__} {fault}")

    def _fault_of(self, plan: NextStep) -> str | None:
        if not isinstance(plan, NextStep):
            return f"answers {plan!r:.80}, which is no NextStep"
        shares, _, wake_s, _ = plan
        if wake_s is not None and not (isinstance(wake_s, int | float) and (wake_s <= _LATEST_S or wake_s == math.inf)):
            return f"wants to be asked again at {wake_s!r}, which is no time"
        if not isinstance(shares, (list, tuple)):
            return f"plans {shares!r:.80}, which are no shares of prefills"
        task_ids = set()
        for share in shares:
            if not isinstance(share, Share) or not isinstance(share.task, PrefillTask):
                return f"plans {share!r:.80}, which is no share of a prefill"
            task, tokens = share
            entry = self._open.get(task.task_id)
            if entry is None or entry.task is not task:
                return f"runs prefill {task.task_id}, which has ended or was never asked for"
            if not isinstance(tokens, int) or not 1 <= tokens <= entry.left:
                return f"runs {tokens!r} tokens of prefill {task.task_id}, which has {entry.left} left"
            if task.task_id in task_ids:
                return f"runs prefill {task.task_id} twice in one step"
            task_ids.add(task.task_id)
        return None

    def run(self, shares: Sequence[Share], worker_id: int) -> None:
        """The worker computes these shares now."""
        self._num_wakes = 0
        for task, tokens in shares:
            entry = self._open.get(task.task_id)
            if entry is None or entry.worker not in (None, worker_id):
                raise RunError(f"prefill {task.task_id} runs on worker {worker_id} and on another")
            entry.check()
            entry.left -= tokens
            entry.worker = worker_id

    def end(self, task: PrefillTask) -> None:
        """The step of the task's last token is over."""
        entry = self._open.pop(task.task_id, None)
        if entry is None:
            raise RunError(f"prefill {task.task_id} ends twice, or was never asked for")
        entry.check()

    def count_wake(self) -> None:
        self._num_wakes += 1
        if self._num_wakes > _MOST_WAKES:
            raise RunError(
                f"a batching policy asked to be asked again {_MOST_WAKES} times, and runs nothing of what waits"
            )


def checked_decision(decision: object, router: object, home: int, prefills: Collection[int]) -> Decision:
    """Return the decision. Raises RunError if it leads to no known worker, or calls a worker local that is not the home."""
    if not isinstance(decision, Decision) or tuple(map(type, decision)) != (int, bool, str):
        fault = f"answers {decision!r:.80}, which is no Decision of a worker's id, True or False, and words"
    elif decision.is_local and decision.worker_id != home:
        fault = f"sends a prefill to worker {decision.worker_id} as local, its session lives on {home}"
    elif not decision.is_local and decision.worker_id not in prefills:
        ids = ", ".join(map(str, prefills)) or "none"
        fault = f"sends a prefill to worker {decision.worker_id}, prefill workers are {ids}"
    else:
        return decision
    raise RunError(f"router {type(router).__name__} {fault}")


@dataclass(frozen=True, kw_only=True)
class LateShare(Checked):
    """The share of given-up prefills: work that goes by arrival once one has waited some times its wait first come, first served. With
    share 0 they wait until nothing else does. With share 1 and patience 0 all go by due time."""

    share: Annotated[float, Range(0, 1)] = 0.25
    """Share of the work that goes by arrival, late or not, while a given-up prefill has waited past ``patience``; 0 forgets them."""
    patience: Annotated[float, Range(0, 1e6), Needs(share=Range(above=0))] = 2.0
    """A given-up prefill waits this many times its wait first come, first served (or the objective, if longer) before the share is paid."""

    def is_owed(self, waited_s: float, slo_s: float, first_come_s: float) -> bool:
        return waited_s >= self.patience * max(slo_s, first_come_s)


_ROUNDING_S = 1e-9


def kept_flags(works_s: Sequence[float], limits_s: Sequence[float]) -> list[bool]:
    """Return which jobs, in rising order of their limits, are kept: as many as possible. The work of each and of those kept before it
    is within its limit, up to rounding. O(n log n)."""
    done_s, longest = 0.0, list[tuple[float, int]]()
    is_kept = [True] * len(works_s)
    for index, (work_s, limit_s) in enumerate(zip(works_s, limits_s, strict=True)):
        latest_s = limit_s + _ROUNDING_S
        if work_s > latest_s and not longest:
            is_kept[index] = False
            continue
        done_s += work_s
        # Of equally long jobs, the one that came last goes.
        heapq.heappush(longest, (-work_s, -index))
        if done_s > latest_s:
            negative_s, negative_index = heapq.heappop(longest)
            done_s += negative_s
            is_kept[-negative_index] = False
    return is_kept


class Split(NamedTuple):
    kept: list[PrefillTask]
    """By due time."""
    given_up: list[PrefillTask]
    """By arrival."""

    @staticmethod
    def of(tasks: Sequence[PrefillTask], works_s: Sequence[float], limits_s: Sequence[float]) -> "Split":
        flags = kept_flags(works_s, limits_s)
        pairs = list(zip(tasks, flags, strict=True))
        return Split([task for task, is_kept in pairs if is_kept], [task for task, is_kept in pairs if not is_kept])

    def owes(self, late: LateShare, slo_s: float, first_come_s: Mapping[int, float], now: float) -> bool:
        """Whether a given-up task has waited long enough for the share to be paid; ``first_come_s`` is each task's wait, first come,
        first served."""
        return late.share > 0 and any(
            late.is_owed(now - task.ready_s, slo_s, first_come_s[task.task_id]) for task in self.given_up
        )


def by_arrival(task: PrefillTask) -> tuple[float, int]:
    """A sort key by arrival. With one objective for all, it also sorts by due time."""
    return task.ready_s, task.task_id


class OnTimeQueue(OpenQueue):
    """Prefills run whole, one after the other (AMPD §3). Next is the first by due time of those that can all be on time. As often
    as its share of the work is due, it is the oldest.

    A prefill may find ``A`` seconds of work, including its own, of prefills that came no later. It starts and ends within

        max(objective, patience max(objective, A)) + A / share + 3 / share E

    where E is the longest prefill. After the first term it is given up, and another prefill may be running. Let V be the work then
    taken by arrival, ``A`` at most, and U the work of others meanwhile. The field ``_owed_s`` grows by share x work of the others.
    It falls by (1 - share) x work taken by arrival. Its sign decides whose turn it is, so it stays between -E and E, and
    share U <= (1 - share) V + 2 E. Work counts as estimated.
    """

    def __init__(self, *, ttft_s: float, late: LateShare) -> None:
        super().__init__()
        self.ttft_s, self.late = ttft_s, late
        self._peeked: tuple[float, list[PrefillTask], PrefillTask, float] | None = None
        self._owed_s = 0.0
        """Work that the oldest are owed. It does not add up while no share is to be paid."""
        self._first_come_s: dict[int, float] = {}
        """The work that waited when each task came, including its own."""

    def rule(self) -> Rule:
        return Rule("queue", limits=(0, self.ttft_s, 2, self.late.share, self.late.patience))

    def push(self, task: PrefillTask) -> None:
        super().push(task)
        self._first_come_s[task.task_id] = self.backlog_s

    def pull(self, task: PrefillTask) -> PrefillTask:
        del self._first_come_s[task.task_id]
        return super().pull(task)

    def peek(self, now: float) -> PrefillTask:
        """The next task. We do not choose again for the same ``now`` and waiting tasks."""
        tasks = list(self)
        if self._peeked is None or self._peeked[:2] != (now, tasks):
            self._peeked = now, tasks, *self._next(now)
        return self._peeked[2]

    def take(self, now: float) -> PrefillTask:
        self.peek(now)
        assert self._peeked is not None
        (_, _, task, self._owed_s), self._peeked = self._peeked, None
        for other in self:
            if other is task:
                break
            other.postponed += 1
        return self.pull(task)

    def _next(self, now: float) -> tuple[PrefillTask, float]:
        """Return the next task, and the work that is owed once it is taken."""
        tasks = sorted(self, key=by_arrival)
        split, share = self._split(tasks, now, 1.0), self.late.share
        is_owed = split.owes(self.late, self.ttft_s, self._first_come_s, now)
        if is_owed and share < 1:
            # Which tasks are on time when the share is paid.
            split = self._split(tasks, now, 1 - share)
        if is_owed and self._owed_s >= 0:
            return tasks[0], self._owed_s - (1 - share) * tasks[0].estimate_s
        if not split.kept:
            return split.given_up[0], self._owed_s
        task = split.kept[0]
        owed_s = self._owed_s + share * task.estimate_s
        return task, owed_s if is_owed else min(owed_s, 0.0)

    def _split(self, tasks: Sequence[PrefillTask], now: float, rate: float) -> Split:
        limits_s = [rate * (task.ready_s + self.ttft_s - now) for task in tasks]
        return Split.of(tasks, [task.estimate_s for task in tasks], limits_s)


def whole_steps_s(work_s: float, budget_s: float, overhead_s: float) -> float:
    """How long the steps take that do all of the work. All but the last are full."""
    return work_s + math.ceil(work_s / budget_s - 1e-9) * overhead_s


def work_by(slacks_s: Sequence[float], *, budget_s: float, overhead_s: float, rate: float, all_s: float) -> list[float]:
    """The most work, in its order, that ends within each of the slacks. Only whole steps count, as a prefill ends with its step.
    ``all_s`` is all work there is, with a shorter last step."""
    whole_s = whole_steps_s(all_s, budget_s, overhead_s) if rate == 1 else math.inf
    paid_s, step_s, floor = rate * budget_s, budget_s + overhead_s, math.floor
    return [math.inf if whole_s <= slack_s else paid_s * floor(slack_s / step_s + 1e-9) for slack_s in slacks_s]
