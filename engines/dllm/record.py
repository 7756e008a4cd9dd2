"""What one step of the engine reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engines.dllm.plan import PlanItem, StepOutcome, StepPlan


class PlanFacts(NamedTuple):
    """What stays of a plan: its items would outgrow a long run's memory."""

    num_refresh: int
    num_reuse: int
    scheduled_tokens: int
    """Query tokens charged against max_num_batched_tokens."""
    admitted: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: StepPlan, ran: Sequence[PlanItem]) -> PlanFacts:
        """``ran`` are the items that were executed: none of a step that failed."""
        num_refresh = sum([item.phase.is_refresh for item in ran])
        admitted = tuple([request.request_id for request in plan.admitted])
        return cls(num_refresh, len(ran) - num_refresh, plan.scheduled_tokens, admitted)


class Completion(NamedTuple):
    """What became of requests in a step."""

    first_block: tuple[int, ...] = ()
    """Requests whose first block completed (what a client can see first)."""
    finished: tuple[int, ...] = ()
    stopped: tuple[tuple[int, int], ...] = ()
    """The finished requests that a stop token ended, each with its tokens up to and including it."""
    failed: tuple[tuple[int, str], ...] = ()
    """Requests given up, each with one sentence why."""

    def without(self, lost: Mapping[int, str]) -> Completion:
        """Requests that finished with an output that may not be used failed; ``lost`` says why of each."""
        return self._replace(
            finished=tuple(i for i in self.finished if i not in lost),
            stopped=tuple((i, length) for i, length in self.stopped if i not in lost),
            failed=(*self.failed, *lost.items()),
        )


class Occupancy(NamedTuple):
    """While the step ran, what it finished is still there; ``num_waiting`` is counted at its end."""

    kv_rows_used: int
    kv_rows_total: int
    num_running: int
    num_waiting: int


class StepRecord(NamedTuple):
    """One engine iteration. Times of requests are stamped at the END of the step they happen in,
    except admission, which is stamped at its start."""

    step: int
    duration_s: float
    """Wall seconds (torch) or charged seconds (roofline) of the whole step."""
    plan: PlanFacts
    outcome: StepOutcome
    """Its times are settled by ``Engine.settled`` where a device is not waited for."""
    done: Completion
    occupancy: Occupancy
