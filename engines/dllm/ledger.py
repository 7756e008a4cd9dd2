"""What was submitted, and how far the executed steps have brought it: kept apart from the scheduler, which may be anyone's.

A plan is held to it before it is executed, and what the scheduler reports afterwards too: so a step that is recorded is
the step that the requests needed, whatever the scheduler says of itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from engines.dllm.plan import Completion, PlanItem, Request, StepOutcome, StepPlan
from engines.dllm.scheduling.phase import Phase
from engines.dllm.scheduling.scheduler import Scheduler, booked, due_fields, plan_item
from engines.dllm.sequence import Sequence, hold_together
from engines.errors import RunError

_KINDS = tuple(
    Phase if name == "phase" else float if name == "commit_probability" else int for name in PlanItem._fields
)


class Ledger:
    def __init__(self, scheduler: Scheduler) -> None:
        self._who = f"scheduler {type(scheduler).__name__}"
        # As they are now: a scheduler could change them later.
        self._config, self._rule, self._exact_steps = scheduler.config, scheduler.rule, scheduler.exact_steps
        self.kv_rows_total = scheduler.pool.num_rows
        self.kv_rows_used = 0
        """Rows that the running requests need."""
        self._open: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._open) - len(self._running)

    def submit(self, request: Request) -> None:
        self._open[request.request_id] = Sequence(
            request, self._rule, self._config.sparsity, decode=self._config.decode, exact_steps=self._exact_steps
        )

    def drop(self, request_id: int) -> bool:
        """Forget a request; whether it was running."""
        self._open.pop(request_id, None)
        sequence = self._running.pop(request_id, None)
        if sequence is None:
            return False
        self.kv_rows_used -= sequence.kv_rows
        return True

    def begin(self, plan: StepPlan) -> None:
        """Raise RunError for a plan that is not what its requests need."""
        if type(plan) is not StepPlan or type(plan.scheduled_tokens) is not int or type(plan.items) is not tuple:
            raise self._fault("plans no StepPlan with a whole number of scheduled_tokens and a tuple of items")
        if not plan.items:
            raise self._fault("plans a step without requests")
        items, running = plan.items, self._running
        for item in items:
            if type(item) is not PlanItem:
                raise self._fault("plans a step whose items are no PlanItem")
            if tuple(map(type, item)) != _KINDS:
                raise self._fault("plans a step with an item whose fields are of another kind than PlanItem's")
        if len(items) > 1 and len({item.request_id for item in items}) < len(items):
            raise self._fault("runs a request twice in one step")
        new = tuple([self._admitted(item) for item in items if item.request_id not in running])
        if new or plan.admitted:
            self._check_admission(new, plan.admitted)
            if plan.pad_to is not None:
                hold_together([running[request.request_id] for request in new])
        for item in items:
            sequence = running[item.request_id]
            if item != due_fields(sequence):
                due = plan_item(sequence)
                name = next(name for name in PlanItem._fields if getattr(item, name) != getattr(due, name))
                raise self._fault(
                    f"runs request {item.request_id} with {name}={getattr(item, name)!r}, where {getattr(due, name)!r} is due"
                )
        if plan.pad_to is not None and plan.pad_to < max([item.total_len for item in items]):
            raise self._fault(f"pads a batch to {plan.pad_to} tokens, fewer than a member has")

    def end(self, plan: StepPlan, outcome: StepOutcome, reported: Completion) -> None:
        """Book an executed plan; raise RunError where the scheduler reports something else of it."""
        due = booked(self._running, plan, outcome.committed, outcome.stops)
        for request_id in due.finished:
            self.drop(request_id)
        if not isinstance(reported, Completion):
            raise self._fault(f"reports {reported!r} of a step, which is no Completion")
        if reported != due:
            for what, said, is_so in zip(Completion._fields, reported, due, strict=True):
                if said != is_so:
                    raise self._fault(f"reports {what}={_listed(said)} of a step with {what}={_listed(is_so)}")

    def _admitted(self, item: PlanItem) -> Request:
        sequence = self._open.get(item.request_id)
        if sequence is None:
            raise self._fault(f"runs request {item.request_id}, which has ended or was never submitted")
        sequence.kv_start = item.kv_start
        self._running[item.request_id] = sequence
        self.kv_rows_used += sequence.kv_rows
        return sequence.request

    def _check_admission(self, new: tuple[Request, ...], reported: tuple[Request, ...]) -> None:
        if {id(request) for request in new} != {id(request) for request in reported}:
            said = _listed(request.request_id for request in reported)
            raise self._fault(f"reports requests {said} as admitted, {_listed(r.request_id for r in new)} began")
        if len(self._running) > self._config.max_num_seqs:
            raise self._fault(f"runs {len(self._running)} requests at once, max_num_seqs={self._config.max_num_seqs}")
        end = 0
        for start, rows, request_id in sorted((s.kv_start, s.kv_rows, i) for i, s in self._running.items()):
            if rows and start < end:
                raise self._fault(f"gives request {request_id} K/V rows that another request holds")
            end = max(end, start + rows)
        if end > self.kv_rows_total:
            raise self._fault(f"gives out {end} K/V rows, the pool has {self.kv_rows_total}")

    def _fault(self, what: str) -> RunError:
        return RunError(f"{self._who} {what}")


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"
