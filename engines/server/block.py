"""``ServedEngine`` over the block-diffusion engine: tells a block's ids once the block is final."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from engines.blockdiffusion.engine import BlockEngine
from engines.blockdiffusion.plan import BlockStepRecord
from engines.blockdiffusion.rules import DecodeRule
from engines.blockdiffusion.sequence import BlockRequest, BlockSampling
from engines.server.protocol import Admitted, EngineStatus, Event, Failed, Finished, Submission, Tokens


@dataclass(frozen=True, kw_only=True)
class BlockGeneration:
    gen_length: int
    rule: DecodeRule
    sampling: BlockSampling
    stop_ids: frozenset[int]


class ServedBlocks:
    """``engine`` has no requests yet."""

    def __init__(self, engine: BlockEngine) -> None:
        self._engine = engine
        self._told: dict[int, int] = {}
        """Ids told so far of the requests that want them as they become final."""
        self._begun: set[int] = set()
        self._last: BlockStepRecord | None = None
        self._forward_passes = self._committed_tokens = 0
        self._counts = {"prefilled_blocks": 0, "committed_blocks": 0, "preemptions": 0}
        self._busy_s = 0.0

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def submit(self, submission: Submission) -> None:
        request_id, prompt_ids, generation, wants_tokens = submission
        assert isinstance(generation, BlockGeneration)
        self._engine.submit(BlockRequest(request_id=request_id, prompt_ids=prompt_ids, **vars(generation)))
        if wants_tokens:
            self._told[request_id] = 0

    def cancel(self, request_id: int) -> None:
        if request_id in self._engine.sequences:
            self._engine.abort(request_id)
            self._forget(request_id)

    def step(self) -> Sequence[Event]:
        engine, began = self._engine, perf_counter()
        record = self._last = engine.step(began)
        assert record is not None, "a request that was taken can be run"
        self._forward_passes += 1
        self._committed_tokens += record.taken
        self._counts["prefilled_blocks"] += record.prefilled
        self._counts["committed_blocks"] += record.committed
        self._counts["preemptions"] += len(record.preempted)
        self._busy_s += perf_counter() - began
        events: list[Event] = [Admitted(each) for each in record.admitted if each not in self._begun]
        self._begun |= set(record.admitted)
        events += self._final_blocks()
        for request_id in record.finished:
            told = self._told.get(request_id, 0)
            events.append(Finished(request_id, engine.take(request_id).ids[told:]))
            self._forget(request_id)
        return events

    def give_up(self, sentence: str) -> Sequence[Event]:
        lost = [sequence.request.request_id for sequence in self._engine.scheduler.running]
        for request_id in lost:
            self.cancel(request_id)
        return [Failed(request_id, sentence) for request_id in lost]

    def status(self) -> EngineStatus:
        engine, last, tables = self._engine, self._last, self._engine.executor.tables
        is_idle = last is None or engine.num_running == 0
        phases = (0, 0, 0) if is_idle or last is None else (last.prefilled, last.denoised, last.committed)
        return EngineStatus(
            waiting=engine.num_waiting,
            running=engine.num_running,
            phases=dict(zip(("prefill", "denoise", "commit"), phases, strict=True)),
            budget_used=0 if is_idle or last is None else last.num_rows,
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
        """Ids of final blocks that are not yet told, of requests that go on; what is final does not change, whatever rule edits."""
        events: list[Event] = []
        for request_id, told in self._told.items():
            sequence = self._engine.sequences.get(request_id)
            if sequence is None:
                continue
            ids = sequence.final[sequence.request.prompt_len + told :].tolist()
            if ids:
                events.append(Tokens(request_id, tuple(ids)))
                self._told[request_id] += len(ids)
        return events

    def _forget(self, request_id: int) -> None:
        self._told.pop(request_id, None)
        self._begun.discard(request_id)
