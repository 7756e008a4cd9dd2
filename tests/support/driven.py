"""Runs of a scripted engine through the driver."""

from collections import deque
from collections.abc import Sequence

from engines.dllm.config import GenerationConfig
from engines.dllm.plan import Occupancy, PlanFacts, Request, StepChanges, StepOutcome, StepRecord
from engines.runtime.step_timer import DeviceTimes
from repro.families.dllm.record import drive_engine
from repro.runs.record import RunRecord
from repro.runs.step_driver import Clock, VirtualClock


class FakeEngine:
    """FCFS server of ``capacity`` requests at once; a request takes its ``generation.steps`` steps of ``service_s``.

    It notes the clock when a request is submitted, which a real engine could not.
    """

    def __init__(
        self, clock: Clock, *, service_s: float, capacity: int = 1, fail: frozenset[int] = frozenset()
    ) -> None:
        self.submissions: list[tuple[int, float]] = []
        self._clock, self._service_s, self._capacity, self._fail = clock, service_s, capacity, fail
        self._waiting: deque[Request] = deque()
        self._left: dict[int, int] = {}
        self._request: dict[int, Request] = {}
        self._step = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._left)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._left)

    def submit(self, request: Request) -> None:
        self.submissions.append((request.request_id, self._clock.now()))
        self._waiting.append(request)

    def step(self, now_s: float = 0.0) -> StepRecord | None:
        admitted = []
        while self._waiting and len(self._left) < self._capacity:
            request = self._waiting.popleft()
            self._left[request.request_id], self._request[request.request_id] = request.generation.steps, request
            admitted.append(request.request_id)
        num_running = len(self._left)
        for request_id in self._left:
            self._left[request_id] -= 1
        ended = [request_id for request_id, left in self._left.items() if left == 0]
        for request_id in ended:
            del self._left[request_id]
        finished = tuple(i for i in ended if i not in self._fail)
        self._step += 1
        return StepRecord(
            step=self._step - 1,
            duration_s=self._service_s,
            plan=PlanFacts(
                num_refresh=len(admitted),
                num_reuse=num_running - len(admitted),
                scheduled_tokens=num_running,
                admitted=tuple(admitted),
            ),
            outcome=StepOutcome(
                committed=tuple(self._request[i].generation.gen_length for i in finished),
                query_rows=num_running,
                logit_rows=num_running,
                forward_s=self._service_s / 2,
                duration_s=self._service_s,
            ),
            done=StepChanges(
                first_block=finished,
                finished=finished,
                failed=tuple((i, "the server gave up") for i in ended if i in self._fail),
            ),
            occupancy=Occupancy(
                kv_rows_used=num_running,
                kv_rows_total=self._capacity,
                num_running=num_running,
                num_waiting=len(self._waiting),
            ),
        )

    def times(self) -> dict[int, DeviceTimes]:
        return {}


def make_requests(arrivals: Sequence[float], steps: Sequence[int] | None = None) -> list[Request]:
    return [
        Request(
            request_id=i,
            prompt_len=8,
            arrival_s=arrival,
            generation=GenerationConfig(gen_length=4, block_length=4, steps=steps[i] if steps else 1),
        )
        for i, arrival in enumerate(arrivals)
    ]


def drive(arrivals: Sequence[float], service_s: float, **engine: int) -> RunRecord:
    clock = VirtualClock()
    return drive_engine(FakeEngine(clock, service_s=service_s, **engine), make_requests(arrivals), clock)
