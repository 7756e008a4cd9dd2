"""What a scheduler decides for one iteration, and what an executor answers. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from engines.dllm.request import Request
from engines.dllm.scheduling.phase import Phase
from engines.errors import RunError
from engines.runtime.step_timer import StepTimes


class PlanItem(NamedTuple):
    """One request's part of a step. Positions are absolute, ``kv_start`` is a row of the KV pool."""

    request_id: int
    phase: Phase
    total_len: int
    block_start: int
    block_end: int
    window_end: int
    commit: int
    masks_left: int
    kept_rows: int
    kv_start: int
    step_in_block: int
    commit_probability: float = 0.0
    """Probability that a mask is committed, where chance decides how many are (Dream's ``origin``)."""

    @property
    def block_len(self) -> int:
        return self.block_end - self.block_start

    @property
    def window_len(self) -> int:
        """Rows a Reuse step computes."""
        return self.window_end - self.block_start

    @property
    def query_tokens(self) -> int:
        return self.total_len if self.phase.is_refresh else self.window_len

    @property
    def key_tokens(self) -> int:
        return self.total_len if self.phase.is_refresh else self.kept_rows + self.window_len


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    items: tuple[PlanItem, ...]
    admitted: tuple[Request, ...]
    scheduled_tokens: int
    """Query tokens charged against max_num_batched_tokens (the scheduler's currency, §4.4)."""
    pad_to: int | None = None
    """A static batch pads every Refresh to this length; None for packed (varlen) batches."""


class StepOutcome(NamedTuple):
    """``committed[i]`` belongs to ``plan.items[i]``. ``duration_s`` is None when the step ran for real:
    then the engine's own clock says how long it took."""

    committed: tuple[int, ...]
    query_rows: int
    """Rows the forward computes, padding included where the system pads."""
    logit_rows: int
    forward_s: float | None
    """Seconds inside the model's forward, logits included; equals duration_s on the roofline. None where the device
    has not got there yet (``Executor.times``)."""
    duration_s: float | None
    graph: bool = False
    """Whether a captured CUDA graph ran the forward."""
    parts: Mapping[str, float] | None = None
    """Seconds of a profiled step by part (STEP_PARTS); None where not profiled, or not known yet."""
    bound_s: float | None = None
    """No implementation of this step on this card is faster (``Roofline.lower_bound_s``); None where the card is unknown."""
    stops: Mapping[int, int] = MappingProxyType({})
    """Request id -> position of the first stop token in its active block. Only of requests with
    ``stop_at_eos``, and only once their block has nothing left to commit."""

    @property
    def committed_tokens(self) -> int:
        return sum(self.committed)


class ExecutorError(RunError):
    """A step that could not be run, in one sentence. Its requests are lost, the executor is not."""


class Executor(Protocol):
    """Runs a plan, for real or on a cost model; decides nothing.

    A device may lag behind: ``execute`` need not wait for a step whose outcome is known beforehand. What the
    host reads of it (``release``) and ``wait`` do.
    """

    def validate(self, request: Request) -> None:
        """Raise UserError for a request this executor cannot run; called before it is queued."""
        ...

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Raise ExecutorError for a step that fails, for lack of memory say; its requests are to be released."""
        ...

    def wait(self) -> None:
        """Return when every executed step is over."""
        ...

    def times(self) -> Mapping[int, StepTimes]:
        """By number of execution, from 0: the steps since the last call whose outcome left ``forward_s`` open. Waits."""
        ...

    def release(self, request_id: int) -> tuple[int, ...] | None:
        """Free the request's state; its generated ids, or None where no tokens exist (simulation). Raise ExecutorError,
        the state freed, for ids that may not be used."""
        ...

    def close(self) -> None:
        """Give back what it holds of a device. Nothing is executed afterwards; may be called twice."""
        ...


class DelegatingExecutor:
    """Asks another executor; what it does beside that is in subclasses."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def validate(self, request: Request) -> None:
        self.executor.validate(request)

    def wait(self) -> None:
        self.executor.wait()

    def times(self) -> Mapping[int, StepTimes]:
        return self.executor.times()

    def release(self, request_id: int) -> tuple[int, ...] | None:
        return self.executor.release(request_id)

    def close(self) -> None:
        self.executor.close()
