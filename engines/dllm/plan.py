"""The data that workload, scheduler, executor and engine hand to each other.

A workload makes a ``Request``, and a scheduler turns live requests into a ``StepPlan``. An executor, real or simulated, answers it with a
``StepOutcome``. The engine reports the step as a ``StepRecord``, from which a driver stamps the times of requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from engines.dllm.config import GenerationConfig, Learned, Phase
from engines.errors import RunError, require
from engines.runtime.step_timer import DeviceTimes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engines.models.config import ModelConfig

POSITION_BYTES = 8


class Chosen(NamedTuple):
    """The rows that a rule chose for a step (``engines.dllm.rows``). Arrays are kept as their bytes, because the engine compares every plan
    with what is due."""

    rows: bytes = b""
    """Positions of the rows that are computed, as int64s like ``keys`` and ``places``."""
    keys: bytes = b""
    """Positions that rows attend to; empty for all."""
    places: bytes = b""
    """Masks of the block that get logits."""
    weights: bytes = b""
    """A float64 per place that multiplies its confidence before ranking; a place below 0 is not committed. Empty for all 1."""
    commit: int = 0

    @classmethod
    def of(
        cls,
        rows: "NDArray[Any]",
        places: "NDArray[Any]",
        commit: int,
        keys: "NDArray[Any] | None" = None,
        weights: "NDArray[Any] | None" = None,
    ) -> Self:
        computed, attended, wanted = (
            b"" if array is None else array.astype("int64").tobytes() for array in (rows, keys, places)
        )
        return cls(computed, attended, wanted, b"" if weights is None else weights.astype("float64").tobytes(), commit)

    @property
    def num_rows(self) -> int:
        return len(self.rows) // POSITION_BYTES


NOTHING_CHOSEN = Chosen()


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and its settings. ``prompt_ids`` may be None on a simulated executor, which needs only the length."""

    request_id: int
    prompt_len: int
    generation: GenerationConfig
    prompt_ids: tuple[int, ...] | None = None
    arrival_s: float = 0.0

    @property
    def total_len(self) -> int:
        return self.prompt_len + self.generation.gen_length


def check_request(request: Request, model: "ModelConfig") -> None:
    """Raise UserError for a request that a model cannot run, from its config alone."""
    ids = request.prompt_ids
    require(request.prompt_len >= 1, f"prompt of request {request.request_id} is empty: give at least one token")
    require(
        ids is not None and len(ids) == request.prompt_len,
        f"request {request.request_id} has no prompt_ids of length prompt_len={request.prompt_len}: give the token ids",
    )
    assert ids is not None
    require(
        request.total_len <= model.max_sequence_length,
        f"prompt of {request.prompt_len} tokens + gen_length={request.generation.gen_length} exceeds the model's "
        f"max_sequence_length={model.max_sequence_length}: shorten the prompt or the generation",
    )
    require(
        min(ids) >= 0 and max(ids) < model.vocab_size,
        f"prompt_ids of request {request.request_id} hold ids outside [0, {model.vocab_size}): use this model's tokenizer",
    )
    require(
        model.mask_token_id not in ids,
        f"prompt_ids of request {request.request_id} hold the mask id {model.mask_token_id}: remove it from the prompt",
    )


class PlanItem(NamedTuple):
    """One request's part of a step. Positions are absolute; ``kv_start`` is a row of the KV pool."""

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
    """Probability that a mask is committed, if chance decides how many are (Dream's ``origin``)."""
    first_row: int = 0
    """First position that a PARTIAL step computes; 0 in other phases."""
    settled_rows: int = 0
    """Rows of the block that a Reuse step leaves out: its tokens committed before step ``settled_before`` of the block."""
    settled_before: int = 0
    suffix: bytes = b""
    """If masks are cut (``Cut``), the true positions of the rows kept behind the block, as int64s. ``total_len`` counts only these."""
    chosen: Chosen = NOTHING_CHOSEN
    """The rows of a step whose rule chooses them; ``block_start`` and the like then only say which block is denoised."""

    @property
    def block_len(self) -> int:
        return self.block_end - self.block_start

    @property
    def window_len(self) -> int:
        """Rows that a Reuse step computes if none has settled."""
        return self.window_end - self.block_start

    @property
    def candidates(self) -> int:
        """Masks of the block that get logits."""
        return len(self.chosen.places) // POSITION_BYTES if self.chosen.rows else self.masks_left

    @property
    def query_tokens(self) -> int:
        if self.chosen.rows:
            return self.chosen.num_rows
        if self.phase is Phase.REUSE:
            return self.window_end - self.block_start - self.settled_rows
        return self.total_len - self.first_row

    @property
    def key_tokens(self) -> int:
        if self.chosen.keys:
            return len(self.chosen.keys) // POSITION_BYTES
        return self.total_len if self.phase.is_refresh else self.kept_rows + self.window_len


class StepPlan(NamedTuple):
    items: tuple[PlanItem, ...]
    admitted: tuple[Request, ...]
    scheduled_tokens: int
    """Query tokens charged against max_num_batched_tokens (the scheduler's currency, §4.4)."""
    pad_to: int | None = None
    """A static batch pads every Refresh to this length; None for packed (varlen) batches."""


class StepOutcome(NamedTuple):
    """The result of a step; ``committed[i]`` belongs to ``plan.items[i]``. ``duration_s`` is None if the step ran for real: then the
    engine's own clock says how long it took."""

    committed: tuple[int, ...]
    query_rows: int
    """Rows that the forward computes, with padding if the system pads."""
    logit_rows: int
    forward_s: float | None
    """Seconds inside the model's forward, logits included; equals duration_s on the roofline. None if the device has not got there yet
    (``Executor.times``)."""
    duration_s: float | None
    graph: bool = False
    """Whether a captured CUDA graph ran the forward."""
    parts: Mapping[str, float] | None = None
    """Seconds of a profiled step by part (STEP_PARTS); None if not profiled, or not known yet."""
    bound_s: float | None = None
    """A lower bound: no implementation of this step is faster on this card (``Roofline.lower_bound_s``). None if the card is unknown."""
    stops: Mapping[int, int] = MappingProxyType({})
    """Request id -> position of the first stop token in its active block. Holds only requests with ``stop_at_eos`` whose block has nothing
    left to commit."""
    confidences: tuple[tuple[float, ...], ...] | None = None
    """Confidences of the tokens that each item committed, best first; None unless ``DecodeConfig.tells_confidences``."""
    learned: tuple[Learned, ...] | None = None
    """The ``Learned`` of each item; None unless ``DecodeConfig.learns``."""

    @property
    def committed_tokens(self) -> int:
        return sum(self.committed)


class PlanFacts(NamedTuple):
    """The facts of a plan that a record keeps: its items would outgrow a long run's memory."""

    num_refresh: int
    num_reuse: int
    scheduled_tokens: int
    """Query tokens charged against max_num_batched_tokens."""
    admitted: tuple[int, ...] = ()


class StepChanges(NamedTuple):
    """The requests whose state changed in a step."""

    first_block: tuple[int, ...] = ()
    """Requests whose first block completed (what a client can see first)."""
    finished: tuple[int, ...] = ()
    stopped: tuple[tuple[int, int], ...] = ()
    """The finished requests that a stop token ended, each with its number of tokens up to and including it."""
    failed: tuple[tuple[int, str], ...] = ()
    """Requests that failed, each with the reason in one sentence."""

    def without(self, lost: Mapping[int, str]) -> "StepChanges":
        """Move finished requests whose output may not be used to ``failed``; ``lost`` maps each to the reason."""
        return self._replace(
            finished=tuple(i for i in self.finished if i not in lost),
            stopped=tuple((i, length) for i, length in self.stopped if i not in lost),
            failed=(*self.failed, *lost.items()),
        )


class Occupancy(NamedTuple):
    """Load while the step ran: requests that it finished still count. ``num_waiting`` is counted at its end."""

    kv_rows_used: int
    kv_rows_total: int
    num_running: int
    num_waiting: int


class StepRecord(NamedTuple):
    """One engine iteration. Times of requests are stamped at the END of the step they happen in,
    except admission, which is stamped at its start."""

    step: int
    duration_s: float
    """Wall seconds (torch) or charged seconds (roofline) of the whole step."""
    plan: PlanFacts
    outcome: StepOutcome
    """If nobody waited for the device, its times come later, from ``Engine.times``."""
    done: StepChanges
    occupancy: Occupancy


class ExecutorError(RunError):
    """A step that could not run, with the reason in one sentence. Its requests are lost; the executor goes on."""


class Executor(Protocol):
    """Runs plans, for real or on a cost model, and decides nothing.

    A device may lag behind: ``execute`` need not wait for a step whose outcome is known beforehand. ``release``, from which the host reads,
    and ``wait`` do.
    """

    def validate(self, request: Request) -> None:
        """Raise UserError for a request that this executor cannot run; called before it is queued."""

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Run a step. Raises ExecutorError if it fails, such as for lack of memory; the caller must release its requests."""

    def wait(self) -> None:
        """Return when every executed step is over."""

    def times(self) -> Mapping[int, DeviceTimes]:
        """Return execution number, from 0 -> times, for steps since the last call whose outcome left ``forward_s`` open. Waits."""

    def release(self, request_id: int) -> tuple[int, ...] | None:
        """Free the request's state and return its generated ids, or None if there are no tokens (simulation). Raises ExecutorError, with
        the state freed, for ids that may not be used."""

    def close(self) -> None:
        """Free what the executor holds on a device. Nothing runs afterwards; may be called twice."""


class DelegatingExecutor:
    """Passes each call on to another executor; subclasses add their own work."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def validate(self, request: Request) -> None:
        self.executor.validate(request)

    def wait(self) -> None:
        self.executor.wait()

    def times(self) -> Mapping[int, DeviceTimes]:
        return self.executor.times()

    def release(self, request_id: int) -> tuple[int, ...] | None:
        return self.executor.release(request_id)

    def close(self) -> None:
        self.executor.close()
