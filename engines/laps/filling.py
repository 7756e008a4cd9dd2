"""A step in the making: prefills in an order, each as much of it as a budget of seconds holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from engines.policies.step import Share, Situation
from engines.policies.task import PrefillTask


class WorkModel(Protocol):
    """What policies know about speed (``StepModel``): T = base + request B + token N + alpha sum L (L + 2H)."""

    @property
    def base_s(self) -> float: ...
    @property
    def request_s(self) -> float: ...
    @property
    def token_s(self) -> float: ...
    @property
    def alpha(self) -> float: ...


class Filling:
    """A step in the making: tokens of each request, within room and places."""

    def __init__(self, at: Situation, model: WorkModel, places: int, *, goes_past: bool = False) -> None:
        """``goes_past`` a request that finds no room or place: what is begun goes on, and nothing behind it is admitted. Else each
        filling ends with it."""
        self.shares: dict[int, Share] = {}
        self.admitted: list[PrefillTask] = []
        self._model, self._need_of = model, at.need_of
        self._room, self._places = at.room, places
        self._begun = {task.task_id for task in at.begun}
        self._goes_past, self._is_open = goes_past, True

    def fill(self, tasks: Sequence[PrefillTask], budget_s: float, *, rounds_up: bool = False) -> float:
        """Add tasks in order until the budget is spent, the last one in part; what was spent.

        An empty step takes at least one token. ``rounds_up``: the last one's tokens are as many as spend the budget, or one more.
        """
        token_s, alpha = self._model.token_s, self._model.alpha
        spent_s = 0.0
        for task in tasks:
            given = self.shares.get(task.task_id)
            before = task.computed + (given.tokens if given else 0)
            left = task.tokens - before
            if not left:
                continue
            slope_s = token_s + 2 * alpha * (task.history + before)
            work_s = left * (slope_s + alpha * left)
            if spent_s + work_s > budget_s:
                fitting = self._fitting(budget_s - spent_s, slope_s, alpha)
                left = min(fitting + 1, left) if rounds_up else fitting
                if not left and not self.shares:
                    left = 1
                if not left:
                    break
                work_s = left * (slope_s + alpha * left)
            if given is None and not self._admit(task):
                if self._goes_past:
                    continue
                break
            self.shares[task.task_id] = Share(task, left + (given.tokens if given else 0))
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
    def _fitting(budget_s: float, slope_s: float, alpha: float) -> int:
        """Most tokens n with n (slope + alpha n) <= budget."""
        if budget_s <= 0:
            return 0
        # 2c / (b + root): the root of the quadratic without cancellation, and right for alpha = 0.
        return int(2 * budget_s / (slope_s + math.sqrt(slope_s * slope_s + 4 * alpha * budget_s)))
