"""Schedulers driven without a model: every plan until nothing is left."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from engines.dllm.plan import PlanItem, Request, StepPlan
from engines.dllm.scheduling import Scheduler

Arrivals = Sequence[tuple[int, Request]]
"""Each with the step before which it is submitted."""
Stops = Mapping[int, int]
"""Request id -> the block that holds its stop token; others run to their end."""


@dataclass(frozen=True, kw_only=True)
class Step:
    index: int
    plan: StepPlan
    num_running_before: int
    charges: dict[int, int]
    """Tokens that every running request is charged, held or not."""
    finished: tuple[int, ...]


def in_order(arrivals: Arrivals) -> list[tuple[int, Request]]:
    return sorted(arrivals, key=lambda arrival: arrival[0])


def drive(
    scheduler: Scheduler,
    arrivals: Arrivals,
    *,
    committed: Callable[[PlanItem], int] = lambda item: item.commit,
    stops: Stops = MappingProxyType({}),
    watch: Callable[[], None] = lambda: None,
) -> list[Step]:
    """``committed`` says how many tokens an item commits, ``watch`` is called between a plan and its end."""
    pending, steps, index = in_order(arrivals), [], 0
    requests = {request.request_id: request for _, request in arrivals}
    while pending or scheduler.has_work:
        while pending and pending[0][0] <= index:
            scheduler.submit(pending.pop(0)[1])
        num_running = len(scheduler.running)
        plan = scheduler.schedule()
        if plan is not None:
            watch()
            charges = {sequence.request.request_id: scheduler.charge(sequence) for sequence in scheduler.running}
            seen = {}
            for item in plan.items:
                request = requests[item.request_id]
                block = (item.block_start - request.prompt_len) // request.generation.block_length
                if item.commit == item.masks_left and stops.get(item.request_id) == block:
                    seen[item.request_id] = item.block_start
            done = scheduler.complete(plan, [committed(item) for item in plan.items], seen)
            steps.append(
                Step(index=index, plan=plan, num_running_before=num_running, charges=charges, finished=done.finished)
            )
        else:
            assert not scheduler.has_work, "requests are waiting and nothing runs"
        index += 1
    return steps
