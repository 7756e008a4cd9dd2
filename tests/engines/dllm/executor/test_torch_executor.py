"""The step itself, with parts that only note their turn."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.step_cases import Resident, Step, step_of

from engines.dllm.config import EngineConfig
from engines.dllm.executor.output import Committed
from engines.dllm.executor.step import Block, BlockTokens, Candidates, Forwarded, StepLayout
from engines.dllm.executor.torch import TorchExecutor
from engines.dllm.phase import Phase
from engines.dllm.plan import ExecutorError, StepPlan
from engines.errors import UserError
from engines.runtime.step_timer import StepTimer

LAYOUT = StepLayout(num_rows=21, rows=None, block=Block(*(torch.zeros(1, 1),) * 3, None, torch.zeros(1)), every=None)


class Parts:
    """Every part of an executor; ``calls`` are its turns with the requests they were given."""

    def __init__(self, step: Step, *, fails: Exception | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails = fails
        self.device = torch.device("cpu")
        self.tokens = step.state.tokens
        self.is_empty = False
        self.executor = TorchExecutor(
            config=EngineConfig(),
            kernels=self,
            state=self,
            pool=self,
            layouts=Layouts(self),
            forward=Forward(self),
            candidates=Candidacy(self),
            head=Head(self),
            commit=self.commit,
            timer=StepTimer(),
            scope=nullcontext,
            checks=(self.check,),
        )

    def note(self, name: str, items: Any = None) -> None:
        self.calls.append((name, None if items is None else [item.request_id for item in items]))

    def admit(self, requests: Any) -> None:
        self.note("admit", requests)

    def block_tokens(self, block: Block) -> BlockTokens:
        return BlockTokens(torch.zeros(1), torch.zeros(1))

    def release(self, request_id: int) -> tuple[int, ...]:
        return (request_id,)

    def commit(self, items: Any, *inputs: Any) -> Committed:
        self.note("commit", items)
        return Committed([10 + item.request_id for item in items], {2: 7})

    def check(self, request: Any) -> None:
        if request.request_id == 1:
            raise UserError("refused")

    def report(self) -> dict[str, Any]:
        return {"fused_kernels": False}


class Layouts:
    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def of(self, items: Any, pad_to: int | None) -> StepLayout:
        self.parts.note("layout", items)
        return LAYOUT

    def forget(self) -> None:
        self.parts.note("forget")


class Forward:
    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def __call__(self, plan: Any, items: Any, layout: Any) -> Forwarded:
        self.parts.note("forward", items)
        if self.parts.fails is not None:
            raise self.parts.fails
        return Forwarded(torch.zeros(1), None, 33)

    def rest(self) -> None:
        self.parts.note("rest")


class Candidacy:
    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def of(self, items: Any, layout: Any, found: Any) -> Candidates:
        self.parts.note("candidates", items)
        return Candidates(5, torch.zeros(8), torch.zeros(8), torch.zeros(8).numpy())

    def sampling(self, *inputs: Any) -> None:
        self.parts.note("sampling")


class Head:
    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def __call__(self, *inputs: Any) -> Any:
        self.parts.note("reduce")
        return torch.zeros(1), torch.zeros(1)

    def logit_rows(self, num_rows: int, wanted: int) -> int:
        return 100 * num_rows + wanted


def plan_of(step: Step) -> StepPlan:
    return StepPlan(items=tuple(step.items), admitted=tuple(step.requests[:1]), scheduled_tokens=0)


def test_a_step_is_its_parts_in_turn():
    """Requests in a Refresh come first, and the outcome is in the plan's own order."""
    step = step_of([Resident(phase=Phase.REUSE), Resident(), Resident(phase=Phase.REUSE), Resident(phase=Phase.BUILD)])
    parts = Parts(step)
    outcome = parts.executor.execute(plan_of(step))
    order = [1, 3, 0, 2]
    assert parts.calls == [
        ("admit", [0]),
        ("layout", order),
        ("forward", order),
        ("candidates", order),
        ("sampling", None),
        ("reduce", None),
        ("commit", order),
    ]
    assert outcome.committed == (10, 11, 12, 13)
    assert (outcome.query_rows, outcome.logit_rows, outcome.stops, outcome.graph) == (33, 2105, {2: 7}, False)
    assert outcome.forward_s is not None


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("can't allocate memory")]
)
def test_running_out_of_memory_drops_the_layout(error):
    step = step_of([Resident()])
    parts = Parts(step, fails=error)
    with pytest.raises(
        ExecutorError, match=r"out of memory in a step of 1 requests and 13 query tokens: lower max_num"
    ):
        parts.executor.execute(plan_of(step))
    assert parts.calls[-1] == ("forget", None)
    parts.fails = None
    assert parts.executor.execute(plan_of(step)).committed == (10,)


def test_other_errors_are_a_bug_s():
    step = step_of([Resident()])
    with pytest.raises(RuntimeError, match="shape mismatch"):
        Parts(step, fails=RuntimeError("shape mismatch")).executor.execute(plan_of(step))


def test_the_forward_rests_once_nobody_is_left():
    parts = Parts(step_of([Resident()]))
    assert parts.executor.release(3) == (3,)
    assert parts.calls == []
    parts.is_empty = True
    parts.executor.release(4)
    assert parts.calls == [("rest", None)]


def test_requests_are_checked_and_paths_are_told():
    step = step_of([Resident(), Resident()])
    executor = Parts(step).executor
    executor.validate(step.requests[0])
    with pytest.raises(UserError, match="refused"):
        executor.validate(step.requests[1])
    assert executor.paths() == {"fused_kernels": False}
    executor.prepare(8)  # nothing to capture
