"""The step loop: schedule, execute, book. The same for every executor, clock and system."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter

from engines.dllm.ledger import Ledger
from engines.dllm.plan import (
    Completion,
    Executor,
    ExecutorError,
    Occupancy,
    PlanFacts,
    Request,
    StepOutcome,
    StepPlan,
    StepRecord,
)
from engines.dllm.scheduling.scheduler import Scheduler
from engines.named import asked

NOTHING_RUN = StepOutcome(committed=(), query_rows=0, logit_rows=0, forward_s=0.0, duration_s=None)


class Engine:
    """``submit`` requests, call ``step`` until it returns None; outputs are kept until taken."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.num_steps = 0
        self._ledger = Ledger(scheduler)
        self._outputs: dict[int, tuple[int, ...] | None] = {}
        self._num_executed = 0
        self._executed: dict[int, int] = {}
        """Number of execution -> number of step, of those since ``settled`` was called last."""

    def submit(self, request: Request) -> None:
        self.executor.validate(request)
        asked(self.scheduler.submit, request)
        self._ledger.submit(request)

    def cancel(self, request_id: int) -> None:
        """Forget a request, between two steps, whether it waits or runs; one that has finished keeps its output."""
        self.scheduler.cancel(request_id)
        if self._ledger.drop(request_id):
            with suppress(ExecutorError):  # nobody reads the ids
                self.executor.release(request_id)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def num_running(self) -> int:
        return self._ledger.num_running

    @property
    def num_waiting(self) -> int:
        return self._ledger.num_waiting

    def take_output(self, request_id: int) -> tuple[int, ...] | None:
        """The gen_length ids of a finished request (None on a simulated executor); may be taken once."""
        return self._outputs.pop(request_id)

    def step(self) -> StepRecord | None:
        """Run one iteration; None when there is nothing to run. Raises RunError where the scheduler plans what is not due."""
        started = perf_counter()
        plan = asked(self.scheduler.schedule)
        if plan is None:
            return None
        ledger, pool = self._ledger, self.scheduler.pool
        ledger.begin(plan)
        # A static batch reserves more than its members need.
        num_running, kv_rows_used = ledger.num_running, max(pool.used_rows, ledger.kv_rows_used)
        num_refresh, num_ran = sum([item.phase.is_refresh for item in plan.items]), len(plan.items)
        try:
            outcome = self.executor.execute(plan)
        except ExecutorError as error:
            num_refresh = num_ran = 0
            outcome, done = NOTHING_RUN, self._fail(plan, str(error))
        else:
            self._executed[self._num_executed] = self.num_steps
            self._num_executed += 1
            done = self._complete(plan, outcome)
        duration = perf_counter() - started if outcome.duration_s is None else outcome.duration_s
        if outcome.parts is not None:
            # Parts known as soon as the step is over leave out the engine's own time, in which nothing was computed.
            idle = outcome.parts["idle"] + max(0.0, duration - sum(outcome.parts.values()))
            outcome = outcome._replace(parts={**outcome.parts, "idle": idle})
        self.num_steps += 1
        return StepRecord(
            step=self.num_steps - 1,
            duration_s=duration,
            plan=PlanFacts(
                num_refresh=num_refresh,
                num_reuse=num_ran - num_refresh,
                scheduled_tokens=plan.scheduled_tokens,
                admitted=tuple([request.request_id for request in plan.admitted]),
            ),
            outcome=outcome,
            done=done,
            occupancy=Occupancy(kv_rows_used, ledger.kv_rows_total, num_running, ledger.num_waiting),
        )

    def _complete(self, plan: StepPlan, outcome: StepOutcome) -> Completion:
        done: Completion = asked(self.scheduler.complete, plan, outcome.committed, outcome.stops)
        self._ledger.end(plan, outcome, done)
        if done.first_block:
            # A request's times are stamped at the end of this step, which a device may not have reached.
            self.executor.wait()
        lost = {}
        for request_id in done.finished:
            try:
                self._outputs[request_id] = self.executor.release(request_id)
            except ExecutorError as error:
                lost[request_id] = str(error)
        return done.without(lost) if lost else done

    def _fail(self, plan: StepPlan, reason: str) -> Completion:
        """The requests of a step that could not be run are lost; the engine goes on with the others."""
        self.scheduler.fail(plan)
        lost = [item.request_id for item in plan.items]
        for request_id in lost:
            self._ledger.drop(request_id)
            with suppress(ExecutorError):  # one reason is enough
                self.executor.release(request_id)
        return Completion(failed=tuple((request_id, reason) for request_id in lost))

    def settled(self, records: Sequence[StepRecord]) -> list[StepRecord]:
        """The records with what the device took for them, of the steps since the last call; waits for it."""
        times = self.executor.times()
        found = {self._executed[execution]: taken for execution, taken in times.items()}
        self._executed.clear()
        return [
            record._replace(outcome=record.outcome._replace(**found[record.step]._asdict()))
            if record.step in found
            else record
            for record in records
        ]

    def close(self) -> None:
        """Give the executor's memory back: of a run that is over, or has failed. May be called twice."""
        self.executor.close()

    def run(self) -> list[StepRecord]:
        """Step until everything submitted is finished."""
        records = []
        while (record := self.step()) is not None:
            records.append(record)
        return self.settled(records)
