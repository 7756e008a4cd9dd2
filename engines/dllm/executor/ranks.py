"""Serving on several ranks: rank 0 schedules and decides nothing twice, the others do as it does.

Every rank runs each plan on its own part of the model. Tokens need not be sent round: all ranks decide
them from the same numbers.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple
from zlib import crc32

from engines.dllm.plan import DelegatingExecutor, Executor, ExecutorError, StepOutcome, StepPlan
from engines.parallel.group import TensorParallel


class Execute(NamedTuple):
    plan: StepPlan


class Release(NamedTuple):
    request_id: int


class Stop(NamedTuple):
    pass


class Command(NamedTuple):
    what: Execute | Release | Stop
    verify: bool


class RanksDiffer(RuntimeError):
    """Ranks that should have got the same result did not: their numbers can no longer be trusted."""


class LeadingExecutor(DelegatingExecutor):
    """Rank 0's executor, whose every step the other ranks run too (``follow``). Call ``stop`` at the end.

    Requests are validated here alone: what is refused is never sent to the others.

    ``verify`` compares the ranks' counts after each step and their tokens when a request ends, for debugging: all
    ranks then wait for each other.
    """

    def __init__(self, executor: Executor, group: TensorParallel, *, verify: bool = False) -> None:
        super().__init__(executor)
        self._group = group
        self._verify = verify

    def execute(self, plan: StepPlan) -> StepOutcome:
        """An ExecutorError is no longer one: the other ranks may wait for what this one did not send."""
        self._send(Execute(plan))
        try:
            return _execute(self.executor, plan, self._group, self._verify)
        except ExecutorError as error:
            raise RuntimeError(f"rank {self._group.rank} could not run a step and the others did: {error}") from error

    def release(self, request_id: int) -> tuple[int, ...] | None:
        self._send(Release(request_id))
        return _release(self.executor, request_id, self._group, self._verify)

    def stop(self) -> None:
        """Let the other ranks return from ``follow``, once they have closed their executors; closes this one's."""
        self._send(Stop())
        self.close()

    def close(self) -> None:
        """This rank's executor alone, which has to be before it leaves the group, after an error too: what a
        communicator captured in graphs keeps it from ending."""
        super().close()

    def _send(self, what: Execute | Release | Stop) -> None:
        self._group.from_leader(Command(what, self._verify))


def follow(executor: Executor, group: TensorParallel) -> None:
    """Do as rank 0's ``LeadingExecutor`` does until it stops, then close the executor; for all other ranks."""
    try:
        _follow(executor, group)
    finally:
        executor.close()


def _follow(executor: Executor, group: TensorParallel) -> None:
    while True:
        command: Command = group.from_leader()
        if isinstance(command.what, Execute):
            _execute(executor, command.what.plan, group, command.verify)
        elif isinstance(command.what, Release):
            with suppress(ExecutorError):  # as on rank 0, which tells of it
                _release(executor, command.what.request_id, group, command.verify)
        else:
            return


def _execute(executor: Executor, plan: StepPlan, group: TensorParallel, verify: bool) -> StepOutcome:
    outcome = executor.execute(plan)
    if verify:
        _compare(group, (outcome.committed, sorted(outcome.stops.items())), "committed tokens of a step")
    return outcome


def _release(executor: Executor, request_id: int, group: TensorParallel, verify: bool) -> tuple[int, ...] | None:
    ids = executor.release(request_id)
    if verify:
        _compare(group, crc32(repr(ids).encode()), f"ids of request {request_id}")
    return ids


def _compare(group: TensorParallel, value: Any, what: str) -> None:
    values = group.gathered(value)
    others = [rank for rank, other in enumerate(values) if other != values[0]]
    if others:
        raise RanksDiffer(
            f"{what} on rank {others[0]} differ from those on rank 0: {values[others[0]]} and {values[0]}"
        )
