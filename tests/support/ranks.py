"""Ranks that compare what each of them has found."""

from typing import Any

from engines.dllm.plan import DelegatingExecutor, Executor, StepOutcome, StepPlan
from engines.parallel.group import TensorParallel


def wait_for_ever(group: TensorParallel) -> None:
    group.from_leader()


class RanksDiffer(AssertionError):
    """Ranks that should have got the same result did not."""


class ComparingExecutor(DelegatingExecutor):
    """A rank's executor, whose counts after each step and ids at the end of a request must be every rank's."""

    def __init__(self, executor: Executor, group: TensorParallel) -> None:
        super().__init__(executor)
        self._group = group

    def execute(self, plan: StepPlan) -> StepOutcome:
        outcome = self.executor.execute(plan)
        self._compare((outcome.committed, sorted(outcome.stops.items())), "committed tokens of a step")
        return outcome

    def release(self, request_id: int) -> tuple[int, ...] | None:
        ids = super().release(request_id)
        self._compare(ids, f"ids of request {request_id}")
        return ids

    def _compare(self, value: Any, what: str) -> None:
        values = self._group.gather_objects(value)
        others = [rank for rank, other in enumerate(values) if other != values[0]]
        if others:
            raise RanksDiffer(
                f"{what} on rank {others[0]} differ from those on rank 0: {values[others[0]]} and {values[0]}"
            )
