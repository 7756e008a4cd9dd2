"""On-time: by due time while all that waits is on time; else as few as possible are given up, and a share of the steps is theirs.

The successor of Reserve. A prefill's work is known when it arrives, and it ends with the step that has its last token: which
prefills can all be on time is a question of the steps to come, and the fewest that must be given up are Moore's and Hodgson's
(engines.policies.on_time). Going by due time costs a long prompt nothing until there is too much work for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from engines.errors import UserError, require
from engines.knobs import Fixed, Range
from engines.laps.filling import Filling, WorkModel
from engines.policies.on_time import LateShare, Split, by_arrival, whole_steps_s, work_by
from engines.policies.step import IDLE, Share, Situation, StepPlan
from engines.policies.task import OpenQueue, PrefillTask

Part = Annotated[float, Range(above=0, most=1e6)]
_PACE_WEIGHT = 0.1
"""Weight of the newest step in the mean of how long steps take."""
_MOST_PACE = 4.0
"""And its inverse: what is beyond is no step's."""
_HALVINGS = 3
"""Shorter steps that are tried where prefills would be given up."""


class StepTimeModel(WorkModel, Protocol):
    @property
    def floor_s(self) -> float:
        """A step with less work takes as long."""
        ...


@dataclass(frozen=True, kw_only=True)
class OnTimeConfig(LateShare):
    slo_s: Annotated[float, Range(above=0, most=1e6), Fixed] | None = 0.4
    """TTFT objective; None: no due times, first come, first served."""
    min_step: Part = 0.125
    """Least budget of a step as a part of the objective; of 0.4 s where there is none."""
    max_step: Part = 0.375
    """Most: long steps amortise, short ones respond."""
    backlog_share: Annotated[float, Range(0, 1e6)] = 0.5
    """A step's budget as a share of all waiting work, between the two."""
    max_num_seqs: Annotated[int, Range(1, 2**20), Fixed] = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.min_step <= self.max_step, f"min_step={self.min_step} must not be above max_step={self.max_step}")

    @property
    def unit_s(self) -> float:
        return 0.4 if self.slo_s is None else self.slo_s


def longest_wait_s(config: OnTimeConfig, ahead_s: float, num_ahead: int, model: StepTimeModel) -> float:
    """Upper bound on the TTFT of a request behind ``ahead_s`` of work and ``num_ahead`` requests (its own included) that arrived no later.

    A step of budget b takes at most b + o, where o is its overhead, so that first come, first served it would wait F = ahead (1 + o
    / b_min) + o at most once it is seen. By max(objective, patience max(objective, F)) it is late, so given up, and the share is
    paid; the step running then ends within T_max = b_max + o. The share goes by arrival: before it are at most ``ahead_s``. A step
    does at least share b of that work, or finishes as many requests as it has places, ``max_num_seqs``, or all of them; so the work
    takes at most ahead / share (1 + o / b_min), a step for every so many requests, and one last step:

        max(objective, patience max(objective, F)) + ahead / share (1 + o / b_min) + (2 + n_ahead / max_num_seqs) T_max

    Budgets are no less than the floor below which a step takes as long, so that b + o is what it takes. Work counts as the model's,
    whose steps are true; the rest of a step leaves room for the token that the share is rounded up to. Where one of the share finds no K/V, nobody is admitted until it does.
    """
    assert config.slo_s is not None
    if not config.share:
        return math.inf
    overhead_s = model.base_s + model.request_s * config.max_num_seqs
    least_s = max(config.min_step * config.slo_s / 2**_HALVINGS, model.floor_s)
    most_s = max(config.max_step * config.slo_s, model.floor_s)
    step_s, work_s = most_s + overhead_s, ahead_s * (1 + overhead_s / least_s)
    return (
        config.from_s(config.slo_s, work_s + overhead_s)
        + work_s / config.share
        + (2 + num_ahead / config.max_num_seqs) * step_s
    )


class OnTime:
    """One instance's batching policy; any ``OpenQueue`` will do.

    It sees when its steps begin, and so how long they take: a model that is wrong by a factor is set right.
    """

    def __init__(self, model: StepTimeModel, config: OnTimeConfig) -> None:
        self.config = config
        self._model = model
        self._slo_s = math.inf if config.slo_s is None else config.slo_s
        self._pace = 1.0
        """How many times as long as the model says steps take, lately: what decodes in between counts as theirs."""
        self._num_measured = 0
        self._last: tuple[float, float] | None = None
        """When the last step began and what it should take."""
        self._first_come_s: dict[int, float] = {}
        """What each that waited at the last step would wait, first come, first served, when it was first seen."""

    def next_step(self, at: Situation, now: float) -> StepPlan:
        queue = at.queue
        if not isinstance(queue, OpenQueue):
            raise UserError(f"queue={type(queue).__name__}: On-time takes requests out of turn, give an OpenQueue")
        tasks = sorted([*at.begun, *queue], key=by_arrival)
        self._measure(tasks, now)
        if not tasks:
            self._first_come_s = {}
            return IDLE
        split, budget_s, share = self._chosen(tasks, now)
        step = Filling(at, self._model, self.config.max_num_seqs, goes_past=True)
        spent_s = step.fill(tasks, share * budget_s, rounds_up=True) if share else 0.0
        spent_s += step.fill(split.kept, budget_s - spent_s)
        step.fill(split.given_up, budget_s - spent_s)
        for task in step.admitted:
            queue.pull(task)
        shares = list(step.shares.values())
        if shares:
            self._last = now, self._step_s(shares)
        return StepPlan(shares) if shares else IDLE

    def _measure(self, tasks: Sequence[PrefillTask], now: float) -> None:
        """A step is followed at once where one it left is still there. Else they ended, or their clients went away, and time passed."""
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

    def _chosen(self, tasks: Sequence[PrefillTask], now: float) -> tuple[Split, float, float]:
        """Who is given up, the step's budget, and the share that is paid: as backlog asks, and a shorter step where fewer are given
        up with it, which ends sooner and costs its overhead more often."""
        config, model = self.config, self._model
        works_s = [self._work_s(task) for task in tasks]
        all_s = sum(works_s)
        # Seconds are the model's from here on.
        unit_s, pace = config.unit_s / self._pace, self._pace
        budget_s = min(max(config.backlog_share * all_s, config.min_step * unit_s), config.max_step * unit_s)
        budget_s = max(budget_s, model.floor_s)

        slacks_s = [(task.ready_s + self._slo_s - now) / pace for task in tasks]

        def split(budget_s: float, rate: float) -> Split:
            limits_s = work_by(slacks_s, budget_s=budget_s, overhead_s=model.base_s, rate=rate, all_s=all_s)
            return Split.of(tasks, works_s, limits_s)

        found, share = split(budget_s, 1.0), 0.0
        self._first_come_s = self._waits_s(tasks, works_s, budget_s)
        if found.owes(config, self._slo_s, self._first_come_s, now):
            share = config.share
            if share < 1:
                # What is on time with the share paid.
                found = split(budget_s, 1 - share)
        rate, shorter_s = 1 - share, budget_s
        least_s = max(config.min_step * unit_s / 2**_HALVINGS, model.floor_s)
        while share < 1 and found.given_up and shorter_s > least_s:
            shorter_s = max(shorter_s / 2, least_s)
            other = split(shorter_s, rate)
            if len(other.given_up) < len(found.given_up):
                found, budget_s = other, shorter_s
        return found, budget_s, share

    def _waits_s(self, tasks: Sequence[PrefillTask], works_s: Sequence[float], budget_s: float) -> dict[int, float]:
        """How long the work takes that came no later than each of the tasks, which are by arrival; of those seen before as it was."""
        known, done_s, waits_s = self._first_come_s, 0.0, dict[int, float]()
        for task, work_s in zip(tasks, works_s, strict=True):
            done_s += work_s
            wait_s = known.get(task.task_id)
            if wait_s is None:
                wait_s = self._pace * whole_steps_s(done_s, budget_s, self._model.base_s)
            waits_s[task.task_id] = wait_s
        return waits_s

    def _work_s(self, task: PrefillTask) -> float:
        model, left, done = self._model, task.left, task.history + task.computed
        return model.request_s + left * (model.token_s + model.alpha * (left + 2 * done))
