"""Reserve: shortest remaining prefill first among requests that can still be on time, and a share kept for late ones.

A prefill's work is known when it arrives, so the order needs no prediction of lengths. Steps mix classes and nothing
waits for company. Late requests cannot be saved and do not push out those that can, but in every step a share of the
budget is theirs, first come, first served; it bounds the longest wait, see ``longest_wait_s``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from engines.errors import UserError, require
from engines.knobs import Checked, Fixed, Proportion, Range, Seconds
from engines.laps.filling import Filling, WorkModel
from engines.policies.step import IDLE, Situation, StepPlan
from engines.policies.task import OpenQueue, PrefillTask

Step = Annotated[float, Range(above=0, most=1e6)]


@dataclass(frozen=True, kw_only=True)
class StepSize(Checked):
    """How much work a step takes."""

    min_step_s: Step = 0.05
    """Least seconds of a step's budget."""
    max_step_s: Step = 0.15
    """Most seconds of a step's budget: long steps amortise, short ones respond."""
    backlog_share: Annotated[float, Range(0, 1e6)] = 0.15
    """A step's budget as a share of all waiting work, between the two."""
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
    """Seconds of remaining work a second of waiting is worth in the order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.share is None or self.longest_wait_s is None,
            f"share={self.share} and longest_wait_s={self.longest_wait_s}: give one, each implies the other",
        )


def longest_wait_s(config: ReserveConfig, share: float, ahead_s: float, model: WorkModel) -> float:
    """Upper bound on the TTFT of a request behind ``ahead_s`` of work (its own included) that arrived no later.

    It is late after at most the objective, and the step running then ends within T_max = max_step + o, where o is the
    step's overhead. From then on only earlier arrivals go before it in the late share, and they are at most
    ``ahead_s``. A step of budget b takes at most b + o and does at least share b of that work, unless it finishes all
    of it; so the work takes at most ahead / share (1 + o / min_step) and one last step:

        objective + ahead / share (1 + o / min_step) + 2 T_max

    Work counts as the model's; ``max_num_seqs`` must leave room for the late share.
    """
    assert config.slo_s is not None
    overhead_s = model.base_s + model.request_s * config.max_num_seqs
    step_s = config.max_step_s + overhead_s
    return config.slo_s + ahead_s / share * (1 + overhead_s / config.min_step_s) + 2 * step_s


def share_for(config: ReserveConfig, model: WorkModel) -> float:
    """The least share by the bound above, for one objective's worth of work ahead."""
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
    """One instance's batching policy; any ``OpenQueue`` will do."""

    def __init__(self, model: WorkModel, config: ReserveConfig) -> None:
        self.config = config
        self.share = share_for(config, model) if config.share is None else config.share
        self._model = model
        self._slo_s = math.inf if config.slo_s is None else config.slo_s

    def next_step(self, at: Situation, now: float) -> StepPlan:
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
            # The first in the order do not fit: those begun, which hold the K/V, go on.
            step.fill(step.begun_of([*late, *on_time]), budget_s)
        for task in step.admitted:
            queue.pull(task)
        return StepPlan(list(step.shares.values())) if step.shares else IDLE

    def _split(self, at: Situation, now: float) -> tuple[list[PrefillTask], list[PrefillTask], float]:
        """On-time requests by remaining work less aging, late ones by arrival, and all their work."""
        model = self._model
        token_s, alpha, latest_s = model.token_s, model.alpha, self._slo_s - model.base_s - now
        aging = self.config.aging
        on_time: list[tuple[float, int, PrefillTask]] = []
        late: list[tuple[float, int, PrefillTask]] = []
        backlog_s = 0.0
        for group in (at.begun, at.queue):
            for task in group:
                done = task.computed
                left = task.tokens - done
                work_s = left * (token_s + alpha * (left + 2 * (task.history + done)))
                backlog_s += work_s
                ready_s = task.ready_s
                if work_s <= ready_s + latest_s:
                    # Aging counts from one origin for all: the order is that of work - aging * wait.
                    on_time.append((work_s + aging * ready_s, task.task_id, task))
                else:
                    late.append((ready_s, task.task_id, task))
        on_time.sort()
        late.sort()
        return [task for *_, task in on_time], [task for *_, task in late], backlog_s
