"""``ServedEngine`` for the two diffusion engines, which tells a block's ids once the block is final."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from engines.blockdiffusion.engine import BlockEngine
from engines.blockdiffusion.rules import DecodeRule
from engines.blockdiffusion.sequence import BlockRequest, BlockSampling, BlockStepRecord
from engines.dllm.engine import Engine
from engines.dllm.plan import PlanItem, Request, StepRecord
from engines.dllm.scheduling import plan_item
from engines.server.protocol import Admitted, EngineStatus, Event, Failed, Finished, Submission, Tokens

if TYPE_CHECKING:
    from engines.dllm.executor.state import RequestState

FORGET_EVERY = 256
"""Every so many steps we drop the device's step times, which a server does not use; this waits for the device."""


class _Served:
    """The common part of both; the given engine must have no requests yet."""

    def __init__(self, engine: Engine | BlockEngine) -> None:
        self._engine = engine
        self._num_told: dict[int, int] = {}
        """Request id -> number of ids told so far, for requests that want ids as they become final."""
        self._forward_passes = self._committed_tokens = 0
        self._busy_s = 0.0

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def cancel(self, request_id: int) -> None:
        raise NotImplementedError

    def give_up(self, sentence: str) -> Sequence[Event]:
        lost = [sequence.request.request_id for sequence in self._engine.scheduler.running]
        for request_id in lost:
            self.cancel(request_id)
        return [Failed(request_id, sentence) for request_id in lost]


class ServedDllm(_Served):
    _engine: Engine
    _last: StepRecord | None = None

    def submit(self, submission: Submission) -> None:
        request_id, prompt_ids, generation, wants_tokens = submission
        request = Request(
            request_id=request_id,
            prompt_len=len(prompt_ids),
            prompt_ids=prompt_ids,
            generation=generation,
            arrival_s=perf_counter(),
        )
        self._engine.submit(request)
        if wants_tokens:
            self._num_told[request_id] = 0

    def cancel(self, request_id: int) -> None:
        self._num_told.pop(request_id, None)
        self._engine.cancel(request_id)

    def step(self) -> list[Event]:
        engine = self._engine
        record = self._last = engine.step(perf_counter())
        assert record is not None, "a request that was taken can be run"
        self._forward_passes += record.plan.num_refresh + record.plan.num_reuse > 0
        self._committed_tokens += record.outcome.committed_tokens
        self._busy_s += record.duration_s
        if engine.num_steps % FORGET_EVERY == 0:
            engine.times()
        events: list[Event] = [Admitted(request_id) for request_id in record.plan.admitted]
        events += self._complete_blocks()
        for request_id in record.done.finished:
            token_ids = engine.take_output(request_id)
            assert token_ids is not None, "only a simulation has no ids"
            events.append(Finished(request_id, token_ids[self._num_told.pop(request_id, 0) :]))
        for request_id, reason in record.done.failed:
            self._num_told.pop(request_id, None)
            events.append(Failed(request_id, reason))
        return events

    def _complete_blocks(self) -> list[Event]:
        """Return the ids of complete blocks that are not told yet, for requests that go on. One read of the device gets all."""
        spans: list[tuple[PlanItem, int, int]] = []
        for request_id, num_told in self._num_told.items():
            sequence = self._engine.scheduler.find(request_id)
            if sequence is None or sequence.kv_start < 0:
                continue
            prompt_len = sequence.request.prompt_len
            if sequence.block_start > prompt_len + num_told:
                spans.append((plan_item(sequence), prompt_len + num_told, sequence.block_start))
        if not spans:
            return []
        ids = _read_ids(_state_of(self._engine.executor), spans)
        events: list[Event] = []
        for item, start, end in spans:
            events.append(Tokens(item.request_id, tuple(ids[: end - start])))
            del ids[: end - start]
            self._num_told[item.request_id] += end - start
        return events

    def status(self) -> EngineStatus:
        engine, pool = self._engine, self._engine.scheduler.pool
        plan = None if self._last is None or engine.num_running == 0 else self._last.plan
        return EngineStatus(
            waiting=engine.num_waiting,
            running=engine.num_running,
            phases={"refresh": plan.num_refresh if plan else 0, "reuse": plan.num_reuse if plan else 0},
            budget_used=plan.scheduled_tokens if plan else 0,
            budget=engine.scheduler.config.max_num_batched_tokens,
            pool_used=pool.used_rows,
            pool=pool.num_rows,
            forward_passes=self._forward_passes,
            committed_tokens=self._committed_tokens,
            busy_s=self._busy_s,
        )


def _state_of(executor: Any) -> "RequestState":
    """Return the state of the torch executor, even if other executors wrap it."""
    while not hasattr(executor, "state"):
        executor = executor.executor
    state: RequestState = executor.state
    return state


def _read_ids(state: "RequestState", spans: Sequence[tuple[PlanItem, int, int]]) -> list[int]:
    """Return the ids at these positions, one span after the other."""
    import torch

    slots = state.slots([item for item, _, _ in spans])
    parts = [state.tokens[slot, start:end] for slot, (_, start, end) in zip(slots, spans, strict=True)]
    ids: list[int] = torch.cat(parts).tolist()
    return ids


@dataclass(frozen=True, kw_only=True)
class BlockGeneration:
    gen_length: int
    rule: DecodeRule
    sampling: BlockSampling
    stop_ids: frozenset[int]


class ServedBlocks(_Served):
    _engine: BlockEngine
    _last: BlockStepRecord | None = None

    def __init__(self, engine: BlockEngine) -> None:
        super().__init__(engine)
        self._begun: set[int] = set()
        self._final: dict[int, int] = {}
        self._counts = {"prefilled_blocks": 0, "committed_blocks": 0, "preemptions": 0}

    def submit(self, submission: Submission) -> None:
        request_id, prompt_ids, generation, wants_tokens = submission
        assert isinstance(generation, BlockGeneration)
        self._engine.submit(BlockRequest(request_id=request_id, prompt_ids=prompt_ids, **vars(generation)))
        if wants_tokens:
            self._num_told[request_id] = 0

    def cancel(self, request_id: int) -> None:
        if request_id in self._engine.sequences:
            self._engine.abort(request_id)
            self._forget(request_id)

    def step(self) -> Sequence[Event]:
        engine, began_s = self._engine, perf_counter()
        record = self._last = engine.step(began_s)
        assert record is not None, "a request that was taken can be run"
        self._forward_passes += 1
        self._counts["prefilled_blocks"] += record.prefilled
        self._counts["committed_blocks"] += record.committed
        self._counts["preemptions"] += len(record.preempted)
        self._busy_s += perf_counter() - began_s
        events: list[Event] = [Admitted(request_id) for request_id in record.admitted if request_id not in self._begun]
        self._begun |= set(record.admitted)
        events += self._final_blocks()
        for request_id in record.finished:
            ids = engine.take(request_id).ids
            self._count(request_id, len(ids))
            events.append(Finished(request_id, ids[self._num_told.get(request_id, 0) :]))
            self._forget(request_id)
        return events

    def status(self) -> EngineStatus:
        engine, tables = self._engine, self._engine.executor.tables
        last = self._last if engine.num_running else None
        phases = (0, 0, 0) if last is None else (last.prefilled, last.denoised, last.committed)
        return EngineStatus(
            waiting=engine.num_waiting,
            running=engine.num_running,
            phases=dict(zip(("prefill", "denoise", "commit"), phases, strict=True)),
            budget_used=0 if last is None else last.num_rows,
            budget=engine.scheduler.config.max_num_batched_tokens,
            pool_used=(tables.num_blocks - tables.room) * tables.block_size,
            pool_idle=(tables.room - tables.num_free) * tables.block_size,
            pool=tables.num_blocks * tables.block_size,
            forward_passes=self._forward_passes,
            committed_tokens=self._committed_tokens,
            busy_s=self._busy_s,
            counts=dict(self._counts),
        )

    def _final_blocks(self) -> list[Event]:
        """Return the ids of final blocks that are not told yet, for requests that go on. No rule edits final ids."""
        events: list[Event] = []
        for request_id, sequence in self._engine.sequences.items():
            final = sequence.final[sequence.request.prompt_len :]
            self._count(request_id, len(final))
            num_told = self._num_told.get(request_id)
            if num_told is not None and len(final) > num_told:
                events.append(Tokens(request_id, tuple(final[num_told:].tolist())))
                self._num_told[request_id] = len(final)
        return events

    def _count(self, request_id: int, final: int) -> None:
        """Count a request's final tokens. An accepted place of a canvas is not final: the next forward may draw it anew."""
        before = self._final.get(request_id, 0)
        self._final[request_id] = max(before, final)
        self._committed_tokens += self._final[request_id] - before

    def _forget(self, request_id: int) -> None:
        self._num_told.pop(request_id, None)
        self._final.pop(request_id, None)
        self._begun.discard(request_id)
