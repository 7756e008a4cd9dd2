"""Serving on several ranks: rank 0 schedules and decides nothing twice, the others do as it does.

Every rank runs each plan on its own part of the model. Tokens need not be sent round: all ranks decide
them from the same numbers.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from engines.dllm.plan import DelegatingExecutor, Executor, ExecutorError, StepOutcome, StepPlan
from engines.parallel.group import TensorParallel


class Execute(NamedTuple):
    plan: StepPlan


class Release(NamedTuple):
    request_id: int


class Stop(NamedTuple):
    pass


class LeadingExecutor(DelegatingExecutor):
    """Rank 0's executor, whose every step the other ranks run too (``follow``). Call ``stop`` at the end.

    Requests are validated here alone: what is refused is never sent to the others.
    """

    def __init__(self, executor: Executor, group: TensorParallel) -> None:
        super().__init__(executor)
        self._group = group

    def execute(self, plan: StepPlan) -> StepOutcome:
        """An ExecutorError is no longer one: the other ranks may wait for what this one did not send."""
        self._send(Execute(plan))
        try:
            return self.executor.execute(plan)
        except ExecutorError as error:
            raise RuntimeError(f"rank {self._group.rank} could not run a step and the others did: {error}") from error

    def release(self, request_id: int) -> tuple[int, ...] | None:
        self._send(Release(request_id))
        return super().release(request_id)

    def stop(self) -> None:
        """Let the other ranks return from ``follow``, once they have closed their executors; closes this one's."""
        self._send(Stop())
        self.close()

    def close(self) -> None:
        """This rank's executor alone, which has to be before it leaves the group, after an error too: what a
        communicator captured in graphs keeps it from ending."""
        super().close()

    def _send(self, what: Execute | Release | Stop) -> None:
        self._group.from_leader(what)


def follow(executor: Executor, group: TensorParallel) -> None:
    """Do as rank 0's ``LeadingExecutor`` does until it stops, then close the executor; for all other ranks."""
    try:
        _follow(executor, group)
    finally:
        executor.close()


def _follow(executor: Executor, group: TensorParallel) -> None:
    while True:
        command: Execute | Release | Stop = group.from_leader()
        if isinstance(command, Execute):
            executor.execute(command.plan)
        elif isinstance(command, Release):
            with suppress(ExecutorError):  # as on rank 0, which tells of it
                executor.release(command.request_id)
        else:
            return
