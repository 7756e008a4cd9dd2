"""The step loop: schedule, execute, book. The same for every executor, clock and system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

from engines.dllm.plan import Executor, ExecutorError, PlanItem, StepOutcome, StepPlan
from engines.dllm.request import Request, StepRecord
from engines.dllm.scheduling.scheduler import Completion, Scheduler

NOTHING_RUN = StepOutcome(committed=(), query_rows=0, logit_rows=0, forward_s=0.0, duration_s=None)


class Occupancy(NamedTuple):
    """While a step runs: what it finishes is still there."""

    kv_rows: int
    num_running: int


class Engine:
    """``submit`` requests, call ``step`` until it returns None; outputs are kept until taken."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.num_steps = 0
        self._outputs: dict[int, tuple[int, ...] | None] = {}
        self._executed: list[int] = []
        """Number of execution -> number of step."""

    def submit(self, request: Request) -> None:
        self.executor.validate(request)
        self.scheduler.submit(request)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    def take_output(self, request_id: int) -> tuple[int, ...] | None:
        """The gen_length ids of a finished request (None on a simulated executor); may be taken once."""
        return self._outputs.pop(request_id)

    def step(self) -> StepRecord | None:
        """Run one iteration; None when there is nothing to run."""
        started = perf_counter()
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        occupancy = Occupancy(self.scheduler.pool.used_rows, len(self.scheduler.running))
        try:
            outcome = self.executor.execute(plan)
        except ExecutorError as error:
            # The requests of a step that could not be run are lost; the engine goes on with the others.
            lost = self.scheduler.fail(plan)
            for request_id in lost:
                self.executor.release(request_id)
            failed = tuple((request_id, str(error)) for request_id in lost)
            return self._record(plan, (), NOTHING_RUN, Completion(), started, occupancy, failed)
        self._executed.append(self.num_steps)
        done = self.scheduler.complete(plan, outcome.committed, outcome.stops)
        if done.first_block:
            # A request's times are stamped at the end of this step, which a device may not have reached.
            self.executor.wait()
        for request_id in done.finished:
            self._outputs[request_id] = self.executor.release(request_id)
        return self._record(plan, plan.items, outcome, done, started, occupancy)

    def _record(
        self,
        plan: StepPlan,
        ran: Sequence[PlanItem],
        outcome: StepOutcome,
        done: Completion,
        started: float,
        occupancy: Occupancy,
        failed: tuple[tuple[int, str], ...] = (),
    ) -> StepRecord:
        duration = perf_counter() - started if outcome.duration_s is None else outcome.duration_s
        num_refresh = sum(item.phase.is_refresh for item in ran)
        record = StepRecord(
            step=self.num_steps,
            duration_s=duration,
            forward_s=outcome.forward_s,
            num_refresh=num_refresh,
            num_reuse=len(ran) - num_refresh,
            query_tokens=outcome.query_rows,
            scheduled_tokens=plan.scheduled_tokens,
            logit_rows=outcome.logit_rows,
            committed_tokens=sum(outcome.committed),
            kv_rows_used=occupancy.kv_rows,
            kv_rows_total=self.scheduler.pool.num_rows,
            num_running=occupancy.num_running,
            num_waiting=len(self.scheduler.waiting),
            admitted=tuple(request.request_id for request in plan.admitted),
            first_block=done.first_block,
            finished=done.finished,
            stopped=done.stopped,
            failed=failed,
            graph=outcome.graph,
            parts=None if outcome.parts is None else _with_rest(outcome.parts, duration),
            bound_s=outcome.bound_s,
        )
        self.num_steps += 1
        return record

    def settled(self, records: Sequence[StepRecord]) -> list[StepRecord]:
        """The records with what the device took for their steps; waits for it."""
        times = self.executor.times()
        found = {self._executed[execution]: taken for execution, taken in times.items()}
        return [
            record._replace(forward_s=found[record.step].forward_s, parts=found[record.step].parts)
            if record.step in found
            else record
            for record in records
        ]

    def run(self) -> list[StepRecord]:
        """Step until everything submitted is finished."""
        records = []
        while (record := self.step()) is not None:
            records.append(record)
        return self.settled(records)


def _with_rest(parts: Mapping[str, float], duration_s: float) -> Mapping[str, float]:
    """Parts known as soon as the step is over leave out the engine's own time, in which nothing was computed."""
    return {**parts, "idle": parts["idle"] + max(0.0, duration_s - sum(parts.values()))}
