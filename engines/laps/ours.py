"""Reserve and On-time: our batching policies for prefills, whose work is known when they arrive.

Reserve runs the shortest remaining prefill first, among requests that can still be on time. Its steps mix classes, and no request
waits for others to join. In every step late requests have a share of the budget, first come, first served. This bounds the longest
wait (``longest_wait_s``).

On-time is its successor. It gives up as few requests as possible (Moore and Hodgson, ``engines.policies.batching``), and they get a
share of the steps. Shorter ones of the kept requests go first if that makes none late (Smith 1956: the longest that may come last
does). A prefill ends with the step of its last token, so On-time counts whole steps to tell which requests can be on time.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Annotated

from engines.errors import UserError, require
from engines.knobs import Checked, Fixed, Proportion, Range, Seconds
from engines.laps.latency import StepModel
from engines.policies.batching import LateShare, Split, by_arrival, whole_steps_s, work_by
from engines.policies.views import IDLE, NextStep, OpenQueue, PrefillTask, Rule, Share, Situation


class Filling:
    """A step in the making: tokens of each request, within the room for K/V and the places for requests."""

    def __init__(self, at: Situation, model: StepModel, places: int, *, goes_past: bool = False) -> None:
        """``goes_past``: behind a request without room or place, begun requests go on, and no new one is admitted. Otherwise each
        filling ends at such a request."""
        self.shares: dict[int, Share] = {}
        self.admitted: list[PrefillTask] = []
        self._model, self._need_of = model, at.need_of
        self._room, self._places = at.room, places
        self._begun = {task.task_id for task in at.begun}
        self._goes_past, self._is_open = goes_past, True

    def fill(self, tasks: Sequence[PrefillTask], budget_s: float, *, rounds_up: bool = False) -> float:
        """Add tasks in order until the budget is spent, the last one in part. Return the seconds spent.

        An empty step takes at least one token. With ``rounds_up`` the last task may exceed the budget by up to one token.
        """
        token_s, alpha = self._model.token_s, self._model.alpha
        spent_s = 0.0
        for task in tasks:
            share = self.shares.get(task.task_id)
            done = task.computed + (share.tokens if share else 0)
            tokens = task.tokens - done
            if not tokens:
                continue
            slope_s = token_s + 2 * alpha * (task.history + done)
            work_s = tokens * (slope_s + alpha * tokens)
            if spent_s + work_s > budget_s:
                fitting = self._most_tokens_in(budget_s - spent_s, slope_s, alpha)
                tokens = min(fitting + 1, tokens) if rounds_up else fitting
                if not tokens and not self.shares:
                    tokens = 1
                if not tokens:
                    break
                work_s = tokens * (slope_s + alpha * tokens)
            if share is None and not self._admit(task):
                if self._goes_past:
                    continue
                break
            self.shares[task.task_id] = Share(task, tokens + (share.tokens if share else 0))
            spent_s += work_s
            if spent_s >= budget_s:
                break
        return spent_s

    def begun_of(self, tasks: Sequence[PrefillTask]) -> list[PrefillTask]:
        return [task for task in tasks if task.task_id in self._begun]

    def _admit(self, task: PrefillTask) -> bool:
        if not self._places:
            return False
        if task.task_id not in self._begun:
            if not self._is_open:
                return False
            need = self._need_of(task)
            if need > self._room:
                self._is_open = not self._goes_past
                return False
            self._room -= need
            self.admitted.append(task)
        self._places -= 1
        return True

    @staticmethod
    def _most_tokens_in(budget_s: float, slope_s: float, alpha: float) -> int:
        """Most tokens n with n (slope + alpha n) <= budget."""
        if budget_s <= 0:
            return 0
        # 2c / (b + root): the root of the quadratic without cancellation, and right for alpha = 0.
        return int(2 * budget_s / (slope_s + math.sqrt(slope_s * slope_s + 4 * alpha * budget_s)))


# ---- Reserve -------------------------------------------------------------------------------------------------------


StepSeconds = Annotated[float, Range(above=0, most=1e6)]


@dataclass(frozen=True, kw_only=True)
class Belief(Checked):
    misjudged: Annotated[float, Range(0, 10)] = 0.0
    """Sigma of the log-normal factor by which a prompt's work is misjudged; 0: the work is known."""

    def factor(self, task: PrefillTask) -> float:
        return self.factor_of(task.task_id)

    def factor_of(self, number: int) -> float:
        return math.exp(self.misjudged * _deviate(number)) if self.misjudged else 1.0


@lru_cache(maxsize=2**17)
def _deviate(number: int) -> float:
    """A deviate of the standard normal, always the same for the same number."""
    return NormalDist().inv_cdf((number * 2654435761 % 2**32 + 0.5) / 2**32)


@dataclass(frozen=True, kw_only=True)
class StepSize(Belief):
    """How much work a step takes."""

    min_step_s: StepSeconds = 0.05
    """Least seconds of a step's budget."""
    max_step_s: StepSeconds = 0.15
    """Most seconds of a step's budget: long steps amortise, short ones respond."""
    backlog_share: Annotated[float, Range(0, 1e6)] = 0.15
    """A step's budget as a share of all waiting work, within min_step_s and max_step_s."""
    max_num_seqs: Annotated[int, Range(1, 2**20), Fixed] = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.min_step_s <= self.max_step_s,
            f"min_step_s={self.min_step_s} must not be above max_step_s={self.max_step_s}",
        )


@dataclass(frozen=True, kw_only=True)
class ReserveConfig(StepSize):
    slo_s: Annotated[float, Range(above=0, most=1e6), Fixed] | None = 0.4
    """TTFT objective; None: no deadlines, hence no late requests."""
    share: Proportion | None = None
    """Share of a step's budget for late requests; by default the least that keeps longest_wait_s."""
    longest_wait_s: Seconds | None = None
    """Longest wait of a request that finds one objective's worth of work ahead of it; ten objectives by default."""
    aging: Annotated[float, Range(0, 1e6)] = 0.05
    """In the order of requests, a second of waiting makes up for this many seconds of remaining work."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.share is None or self.longest_wait_s is None,
            f"share={self.share} and longest_wait_s={self.longest_wait_s}: give one, each implies the other",
        )


def longest_wait_s(config: ReserveConfig, share: float, ahead_s: float, model: StepModel) -> float:
    """Upper bound on the TTFT of a request behind ``ahead_s`` of work (its own included) that arrived no later.

    It is late after at most the objective. The step running then ends within T_max = max_step + o, where o is the
    step's overhead. From then on only earlier arrivals go before it in the late share, and they are at most
    ``ahead_s``. A step of budget b takes at most b + o. It does at least share b of that work, unless it finishes all
    of it. So the work takes at most ahead / share (1 + o / min_step) and one last step:

        objective + ahead / share (1 + o / min_step) + 2 T_max

    Work is as the model predicts; ``max_num_seqs`` must leave room for the late share.
    """
    assert config.slo_s is not None
    overhead_s = model.base_s + model.request_s * config.max_num_seqs
    step_s = config.max_step_s + overhead_s
    return config.slo_s + ahead_s / share * (1 + overhead_s / config.min_step_s) + 2 * step_s


def share_for(config: ReserveConfig, model: StepModel) -> float:
    """The least share that keeps the longest wait by the bound above, with one objective's worth of work ahead."""
    if config.slo_s is None:
        return 1.0
    limit_s = 10 * config.slo_s if config.longest_wait_s is None else config.longest_wait_s
    overhead_s = model.base_s + model.request_s * config.max_num_seqs
    left_s = limit_s - config.slo_s - 2 * (config.max_step_s + overhead_s)
    share = config.slo_s * (1 + overhead_s / config.min_step_s) / left_s if left_s > 0 else math.inf
    least_s = limit_s - left_s + config.slo_s * (1 + overhead_s / config.min_step_s)
    require(share <= 1, f"longest_wait_s={limit_s} cannot be kept: give at least {least_s:.2f} s")
    return share


class Reserve:
    """The batching policy of one instance, over any ``OpenQueue``."""

    def __init__(self, model: StepModel, config: ReserveConfig) -> None:
        self.config = config
        self.share = share_for(config, model) if config.share is None else config.share
        self._model = model
        self._slo_s = math.inf if config.slo_s is None else config.slo_s

    def rule(self, kind: str = "reserve") -> Rule:
        config = self.config
        sizes = config.backlog_share, config.min_step_s, config.max_step_s, config.max_num_seqs
        return Rule(kind, limits=(self.share, self._slo_s, *sizes, config.aging), terms=self._model.terms)

    def next_step(self, at: Situation, now: float) -> NextStep:
        queue = at.queue
        if not isinstance(queue, OpenQueue):
            raise UserError(f"queue={type(queue).__name__}: Reserve takes requests out of turn, give an OpenQueue")
        if not queue and not at.begun:
            return IDLE
        on_time, late, backlog_s = self._split(at, now)
        config = self.config
        budget_s = min(max(config.backlog_share * backlog_s, config.min_step_s), config.max_step_s)
        step = Filling(at, self._model, config.max_num_seqs)
        spent_s = step.fill(late, self.share * budget_s)
        spent_s += step.fill(on_time, budget_s - spent_s)
        step.fill(late, budget_s - spent_s)
        if not step.shares:
            # The first requests do not fit, so the begun ones, which hold the K/V, go on.
            step.fill(step.begun_of([*late, *on_time]), budget_s)
        for task in step.admitted:
            queue.pull(task)
        return NextStep(list(step.shares.values())) if step.shares else IDLE

    def _split(self, at: Situation, now: float) -> tuple[list[PrefillTask], list[PrefillTask], float]:
        """Return on-time requests by remaining work less aging, late ones by arrival, and the work of all."""
        model = self._model
        token_s, alpha, latest_s = model.token_s, model.alpha, self._slo_s - model.base_s - now
        aging, factor = self.config.aging, self.config.factor
        on_time: list[tuple[float, int, PrefillTask]] = []
        late: list[tuple[float, int, PrefillTask]] = []
        backlog_s = 0.0
        for group in (at.begun, at.queue):
            for task in group:
                done = task.computed
                left = task.tokens - done
                work_s = left * (token_s + alpha * (left + 2 * (task.history + done))) * factor(task)
                backlog_s += work_s
                ready_s = task.ready_s
                if work_s <= ready_s + latest_s:
                    # Aging counts from the same origin for all, so the order is that of work - aging * wait.
                    on_time.append((work_s + aging * ready_s, task.task_id, task))
                else:
                    late.append((ready_s, task.task_id, task))
        on_time.sort()
        late.sort()
        return [task for *_, task in on_time], [task for *_, task in late], backlog_s


class MooreHodgson(Reserve):
    """Runs as many requests as can be on time by due time, as one machine's jobs without steps; then the others by arrival (Moore 1968)."""

    def __init__(self, model: StepModel, config: ReserveConfig) -> None:
        super().__init__(model, replace(config, share=1.0))
        self.share = 0.0

    def rule(self, kind: str = "moore-hodgson") -> Rule:
        return super().rule(kind)

    def _split(self, at: Situation, now: float) -> tuple[list[PrefillTask], list[PrefillTask], float]:
        model, tasks = self._model, sorted([*at.begun, *at.queue], key=by_arrival)
        works_s = [
            task.left
            * (model.token_s + model.alpha * (task.left + 2 * (task.history + task.computed)))
            * self.config.factor(task)
            for task in tasks
        ]
        latest_s = self._slo_s - model.base_s - now
        on_time, late = Split.of(tasks, works_s, [task.ready_s + latest_s for task in tasks])
        return on_time, late, sum(works_s)


# ---- On-time -------------------------------------------------------------------------------------------------------


ObjectiveShare = Annotated[float, Range(above=0, most=1e6)]
_PACE_WEIGHT = 0.1
"""Weight of the newest step in the mean pace of steps."""
_MOST_PACE = 4.0
"""The highest pace that a measured step counts with, and its inverse the lowest: anything beyond is not a step's time."""
HALVINGS = 3
"""How often we halve a step's budget if prefills would be given up."""


@dataclass(frozen=True, kw_only=True)
class OnTimeConfig(LateShare, Belief):
    slo_s: Annotated[float, Range(above=0, most=1e6), Fixed] | None = 0.4
    """TTFT objective; None: no due times, first come, first served."""
    share: Annotated[float, Range(0, 1)] = 0.125
    """Share of the work that goes by arrival, late or not, while a given-up prefill has waited past ``patience``; 0 forgets them."""
    haste: Annotated[float, Range(0, 1)] = 0.8
    """Part of the time to a kept prefill's due time that shorter ones may take before it; 0 goes by due time."""
    aging: Annotated[float, Range(0, 1e6)] = 0.05
    """In the order of given-up prefills, a second of waiting makes up for this many seconds of remaining work."""
    min_step: ObjectiveShare = 0.0625
    """Least budget of a step as a part of the objective; of 0.4 s if there is none."""
    max_step: ObjectiveShare = 0.1875
    """Most budget of a step, as a part likewise: long steps amortise, short ones respond."""
    backlog_share: Annotated[float, Range(0, 1e6)] = 0.5
    """A step's budget as a share of all waiting work, within min_step and max_step."""
    max_num_seqs: Annotated[int, Range(1, 2**20), Fixed] = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.min_step <= self.max_step, f"min_step={self.min_step} must not be above max_step={self.max_step}")

    @property
    def unit_s(self) -> float:
        return 0.4 if self.slo_s is None else self.slo_s


def shorter_first(works_s: Sequence[float], limits_s: Sequence[float]) -> list[int]:
    """Order jobs, given by rising limits, so that each ends within its limit and the mean completion time is least. Return their
    places. Each place, from the last on, gets the longest job that may be there, or the latest if none may (Smith 1956). O(n log n)."""
    done_s, latest = sum(works_s), len(works_s) - 1
    longest, order = list[tuple[float, int]](), list[int]()
    while len(order) < len(works_s):
        while latest >= 0 and (limits_s[latest] >= done_s or not longest):
            heapq.heappush(longest, (-works_s[latest], -latest))
            latest -= 1
            if limits_s[latest + 1] < done_s:
                break
        negative_s, negative_index = heapq.heappop(longest)
        order.append(-negative_index)
        done_s += negative_s
    return order[::-1]


class OnTime:
    """The batching policy of one instance, over any ``OpenQueue``.

    It sees when its steps begin, and so how long they take. This corrects a model that is wrong by a factor.
    """

    def __init__(self, model: StepModel, config: OnTimeConfig) -> None:
        self.config = config
        self._model = model
        self._slo_s = math.inf if config.slo_s is None else config.slo_s
        self._pace = 1.0
        """Recent mean of a step's measured time over its predicted time. Decode steps in between count as part of a step."""
        self._num_measured = 0
        self._last: tuple[float, float] | None = None
        """When the last step began, and how long it should take."""
        self._first_come_s: dict[int, float] = {}
        """For each task at the last step, the wait that first come, first served would give it, as of when it was first seen."""

    def rule(self) -> Rule:
        config = self.config
        order = self.config.share, self._slo_s, config.patience, config.haste, config.aging
        sizes = config.min_step, config.max_step, config.backlog_share, config.max_num_seqs, config.unit_s
        return Rule("on-time", limits=(*order, *sizes), terms=self._model.terms)

    def next_step(self, at: Situation, now: float) -> NextStep:
        queue = at.queue
        if not isinstance(queue, OpenQueue):
            raise UserError(f"queue={type(queue).__name__}: On-time takes requests out of turn, give an OpenQueue")
        tasks = sorted([*at.begun, *queue], key=by_arrival)
        self._measure(tasks, now)
        if not tasks:
            self._first_come_s = {}
            return IDLE
        split, budget_s, share = self._choose_split(tasks, now)
        step = Filling(at, self._model, self.config.max_num_seqs, goes_past=True)
        spent_s = step.fill(tasks, share * budget_s, rounds_up=True) if share else 0.0
        spent_s += step.fill(self._hasten(split.kept, budget_s, 1 - share, now), budget_s - spent_s)
        aging = self.config.aging
        given_up = sorted(split.given_up, key=lambda task: (self._work_s(task) + aging * task.ready_s, task.task_id))
        step.fill(given_up, budget_s - spent_s)
        for task in step.admitted:
            queue.pull(task)
        shares = list(step.shares.values())
        if shares:
            self._last = now, self._step_s(shares)
        return NextStep(shares) if shares else IDLE

    def _hasten(self, kept: Sequence[PrefillTask], budget_s: float, rate: float, now: float) -> Sequence[PrefillTask]:
        haste, overhead_s = self.config.haste, self._model.base_s
        if len(kept) < 2 or self._slo_s == math.inf:
            return kept
        works_s = [self._work_s(task) for task in kept]
        slacks_s = [haste / self._pace * (task.ready_s + self._slo_s - now) for task in kept]
        limits_s = work_by(slacks_s, budget_s=budget_s, overhead_s=overhead_s, rate=rate, all_s=sum(works_s))
        return [kept[index] for index in shorter_first(works_s, limits_s)]

    def _measure(self, tasks: Sequence[PrefillTask], now: float) -> None:
        """Update the pace if a task of the last step is still there: then this step follows it at once. Otherwise time may have passed."""
        goes_on = any(task.task_id in self._first_come_s for task in tasks)
        if goes_on and self._last is not None and now > self._last[0]:
            start_s, step_s = self._last
            pace = min(max((now - start_s) / step_s, 1 / _MOST_PACE), _MOST_PACE)
            self._num_measured += 1
            self._pace += max(_PACE_WEIGHT, 1 / self._num_measured) * (pace - self._pace)
        self._last = None

    def _step_s(self, shares: Sequence[Share]) -> float:
        model = self._model
        work_s = sum(
            tokens * (model.token_s + model.alpha * (tokens + 2 * (task.history + task.computed)))
            for task, tokens in shares
        )
        return model.base_s + model.request_s * len(shares) + max(model.floor_s, work_s)

    def _choose_split(self, tasks: Sequence[PrefillTask], now: float) -> tuple[Split, float, float]:
        """Return who is given up, the step's budget, and the share that is paid. The backlog sets the budget, unless fewer are given up
        with a shorter step, which ends sooner but costs its overhead more often."""
        config, model = self.config, self._model
        works_s = [self._work_s(task) for task in tasks]
        all_s = sum(works_s)
        # From here on, seconds are the model's.
        unit_s, pace = config.unit_s / self._pace, self._pace
        budget_s = min(max(config.backlog_share * all_s, config.min_step * unit_s), config.max_step * unit_s)
        budget_s = max(budget_s, model.floor_s)

        slacks_s = [(task.ready_s + self._slo_s - now) / pace for task in tasks]

        def split(budget_s: float, rate: float) -> Split:
            limits_s = work_by(slacks_s, budget_s=budget_s, overhead_s=model.base_s, rate=rate, all_s=all_s)
            return Split.of(tasks, works_s, limits_s)

        best, share = split(budget_s, 1.0), 0.0
        self._first_come_s = self._waits_s(tasks, works_s, budget_s)
        if best.owes(config, self._slo_s, self._first_come_s, now):
            share = config.share
            if share < 1:
                # Which tasks are on time when the share is paid.
                best = split(budget_s, 1 - share)
        rate, shorter_s = 1 - share, budget_s
        least_s = max(config.min_step * unit_s / 2**HALVINGS, model.floor_s)
        while share < 1 and best.given_up and shorter_s > least_s:
            shorter_s = max(shorter_s / 2, least_s)
            other = split(shorter_s, rate)
            if len(other.given_up) < len(best.given_up):
                best, budget_s = other, shorter_s
        return best, budget_s, share

    def _waits_s(self, tasks: Sequence[PrefillTask], works_s: Sequence[float], budget_s: float) -> dict[int, float]:
        """Return how long the work takes that came no later than each task. ``tasks`` are by arrival; known ones keep their wait."""
        known_s, done_s, waits_s = self._first_come_s, 0.0, dict[int, float]()
        for task, work_s in zip(tasks, works_s, strict=True):
            done_s += work_s
            wait_s = known_s.get(task.task_id)
            if wait_s is None:
                wait_s = self._pace * whole_steps_s(done_s, budget_s, self._model.base_s)
            waits_s[task.task_id] = wait_s
        return waits_s

    def _work_s(self, task: PrefillTask) -> float:
        model, left, done = self._model, task.left, task.history + task.computed
        work_s = left * (model.token_s + model.alpha * (left + 2 * done))
        return model.request_s + work_s * self.config.factor(task)
