"""The step loop: schedule, execute, book. The same for every executor, clock and system."""

from __future__ import annotations

from time import perf_counter

from engines.dllm.plan import Executor
from engines.dllm.request import Request, StepRecord
from engines.dllm.scheduler import Scheduler


class Engine:
    """``submit`` requests, call ``step`` until it returns None; outputs are kept until taken."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.num_steps = 0
        self._outputs: dict[int, tuple[int, ...] | None] = {}

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
        kv_rows_used, num_running = self.scheduler.pool.used_rows, len(self.scheduler.running)
        outcome = self.executor.execute(plan)
        done = self.scheduler.complete(plan, outcome.committed, outcome.stops)
        for request_id in done.finished:
            self._outputs[request_id] = self.executor.release(request_id)
        num_refresh = sum(item.phase.is_refresh for item in plan.items)
        duration = outcome.duration_s
        record = StepRecord(
            step=self.num_steps,
            duration_s=perf_counter() - started if duration is None else duration,
            forward_s=outcome.forward_s,
            num_refresh=num_refresh,
            num_reuse=len(plan.items) - num_refresh,
            query_tokens=outcome.query_rows,
            scheduled_tokens=plan.scheduled_tokens,
            logit_rows=outcome.logit_rows,
            committed_tokens=sum(outcome.committed),
            kv_rows_used=kv_rows_used,
            kv_rows_total=self.scheduler.pool.num_rows,
            num_running=num_running,
            num_waiting=len(self.scheduler.waiting),
            admitted=tuple(request.request_id for request in plan.admitted),
            first_block=done.first_block,
            finished=done.finished,
            stopped=done.stopped,
        )
        self.num_steps += 1
        return record

    def run(self) -> list[StepRecord]:
        """Step until everything submitted is finished."""
        records = []
        while (record := self.step()) is not None:
            records.append(record)
        return records
