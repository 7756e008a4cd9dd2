"""Schedulers that can forget a request before its end."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from engines.dllm.scheduling.lookahead import LookaheadScheduler
from engines.dllm.scheduling.scheduler import Scheduler
from engines.dllm.sequence import Sequence

if TYPE_CHECKING:
    _Base = Scheduler
else:
    _Base = object


class Cancelling(_Base):
    """Mixed into a scheduler, in front of it."""

    def find(self, request_id: int) -> Sequence | None:
        """The request's state; None where it has ended, or never was."""
        return self._by_id.get(request_id)

    def cancel(self, request_id: int) -> bool:
        """Drop the request and free its rows; whether it had been admitted."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return False
        if any(running is sequence for running in self.running):
            self._drop(sequence)
            self.running = [running for running in self.running if running is not sequence]
            return True
        self.waiting.remove(sequence)
        self._withdraw(sequence)
        return False

    def _withdraw(self, sequence: Sequence) -> None:
        """Forget a request that holds no rows yet. A scheduler with tables of its own clears them here."""
        request_id = sequence.request.request_id
        del self._by_id[request_id]
        if isinstance(self, LookaheadScheduler):
            del self._trajectories[request_id]


def cancelling(scheduler: Scheduler) -> tuple[Scheduler, Cancelling]:
    """A scheduler like ``scheduler``, which has no requests yet, that can cancel; the same object as both."""
    kind = _cancelling(type(scheduler))
    made = kind(scheduler.config, scheduler.pool, scheduler.rule, exact_steps=scheduler.exact_steps)
    assert isinstance(made, Cancelling)
    return made, made


@cache
def _cancelling(kind: type[Scheduler]) -> type[Scheduler]:
    return type(f"Cancelling{kind.__name__}", (Cancelling, kind), {})
