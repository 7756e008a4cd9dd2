"""Plans an executor was given."""

from engines.dllm.plan import Executor, StepOutcome, StepPlan


class Recorder:
    """Passes everything on to an executor and keeps the plans."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.plans: list[StepPlan] = []
        self.validate, self.release = executor.validate, executor.release
        self.wait, self.times, self.close = executor.wait, executor.times, executor.close

    def execute(self, plan: StepPlan) -> StepOutcome:
        self.plans.append(plan)
        return self.executor.execute(plan)
