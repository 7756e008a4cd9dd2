"""Adds the roofline's lower bound to each executed step."""

from __future__ import annotations

from engines.dllm.executor.roofline import RooflineExecutor
from engines.dllm.plan import DelegatingExecutor, Executor, StepOutcome, StepPlan


class BoundedExecutor(DelegatingExecutor):
    """Adds ``bound_s`` to the outcomes of ``executor``. ``meter`` is the simulated executor of the same method: it
    knows the work of a step, and its roofline the card."""

    def __init__(self, executor: Executor, meter: RooflineExecutor) -> None:
        super().__init__(executor)
        self.meter = meter

    def execute(self, plan: StepPlan) -> StepOutcome:
        # The meter counts failed steps too, and comes second: a device that lags behind is at work meanwhile.
        try:
            outcome = self.executor.execute(plan)
        finally:
            bound_s = self.meter.lower_bound_s(plan)
        return outcome._replace(bound_s=bound_s)

    def release(self, request_id: int) -> tuple[int, ...] | None:
        self.meter.release(request_id)
        return super().release(request_id)
