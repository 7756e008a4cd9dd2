"""What the driver of a diffusion-LLM engine writes down of its steps."""

from support.driven import FakeEngine, make_requests

from engines.dllm.plan import StepRecord
from engines.runtime.step_timer import STEP_PARTS, DeviceTimes
from repro.families.dllm.record import drive_engine
from repro.runs.step_driver import VirtualClock


class LaggingEngine(FakeEngine):
    """Its device says what a step took once all are over; every other step is profiled."""

    def step(self, now_s: float = 0.0) -> StepRecord | None:
        record = super().step()
        if record is None:
            return None
        return record._replace(outcome=record.outcome._replace(forward_s=None, graph=record.step > 0, bound_s=0.25))

    def times(self) -> dict[int, DeviceTimes]:
        parts = {part: 1.0 + i for i, part in enumerate(STEP_PARTS)}
        return {step: DeviceTimes(0.5 + step, None if step % 2 else parts) for step in range(self._step)}


def test_what_is_known_late_is_in_the_record():
    clock = VirtualClock()
    steps = drive_engine(LaggingEngine(clock, service_s=10.0), make_requests([0.0, 1.0, 2.0]), clock).tables["steps"]
    assert steps["forward_s"] == [0.5, 1.5, 2.5]
    assert steps["graph"] == [False, True, True]
    assert steps["bound_s"] == [0.25] * 3
    for i, part in enumerate(STEP_PARTS):
        assert steps[f"{part}_s"] == [1.0 + i, None, 1.0 + i]
