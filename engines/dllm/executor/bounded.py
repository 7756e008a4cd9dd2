"""Adds the roofline's lower bound to each executed step."""

from __future__ import annotations

from collections.abc import Mapping

from engines.dllm.executor.roofline import RooflineExecutor
from engines.dllm.plan import Executor, StepOutcome, StepPlan
from engines.dllm.request import Request
from engines.runtime.step_timer import StepTimes


class BoundedExecutor:
    """Adds ``bound_s`` to the outcomes of ``executor``. ``meter`` is the simulated executor of the same method: it
    knows the work of a step, and its roofline the card."""

    def __init__(self, executor: Executor, meter: RooflineExecutor) -> None:
        self.executor = executor
        self.meter = meter

    def validate(self, request: Request) -> None:
        self.executor.validate(request)

    def execute(self, plan: StepPlan) -> StepOutcome:
        # The meter counts failed steps too, and comes second: a device that lags behind is at work meanwhile.
        try:
            outcome = self.executor.execute(plan)
        finally:
            bound_s = self.meter.lower_bound_s(plan)
        return outcome._replace(bound_s=bound_s)

    def wait(self) -> None:
        self.executor.wait()

    def times(self) -> Mapping[int, StepTimes]:
        return self.executor.times()

    def release(self, request_id: int) -> tuple[int, ...] | None:
        self.meter.release(request_id)
        return self.executor.release(request_id)

    def close(self) -> None:
        self.executor.close()
