"""Request-level FCFS with a fixed batch size; plain policy, no torch."""

from __future__ import annotations

from engines.dllm.cache.kv_pool import KvPool
from engines.dllm.config import EngineConfig
from engines.dllm.plan import StepPlan
from engines.dllm.request import Request
from engines.dllm.scheduling.phase import RefreshRule
from engines.dllm.scheduling.scheduler import Scheduler, plan_item
from engines.dllm.sequence import Sequence
from engines.errors import require


class StaticBatchScheduler(Scheduler):
    """Forms a batch only when nothing runs: the oldest waiting requests of one generation setting, at
    most ``batch_size``. All members are in the same phase at every step and end together."""

    def __init__(
        self, config: EngineConfig, pool: KvPool, rule: RefreshRule, *, batch_size: int, exact_steps: bool = True
    ) -> None:
        super().__init__(config, pool, rule, exact_steps=exact_steps)
        require(batch_size >= 1, f"batch_size={batch_size} must be at least 1")
        self.batch_size = batch_size
        self._pad_to = 0

    def submit(self, request: Request) -> None:
        generation = request.generation
        require(
            self.batch_size == 1 or not (generation.is_parallel or self.config.decode.quota == "origin"),
            f"request {request.request_id} commits as many tokens as chance or confidence say, and members of a static "
            f"batch must stay in step: use batch_size=1",
        )
        require(
            self.batch_size == 1 or not generation.stop_at_eos,
            f"stop_at_eos=True of request {request.request_id} ends members of a static batch at different steps, and they "
            f"must stay in step: use batch_size=1",
        )
        super().submit(request)

    def cancel(self, request_id: int) -> bool:
        """Only of a request that waits: the slabs of a batch stay evenly spaced to its end."""
        require(
            all(sequence.request.request_id != request_id for sequence in self.running),
            f"request {request_id} runs in a static batch, whose members end together: wait for its end",
        )
        return super().cancel(request_id)

    def charge(self, sequence: Sequence) -> int:
        return sequence.query_tokens

    def schedule(self) -> StepPlan | None:
        admitted: list[Request] = []
        if not self.running:
            self._form_batch()
            admitted = [sequence.request for sequence in self.running]
        if not self.running:
            return None
        rows = (
            self._pad_to
            if self.running[0].phase.is_refresh
            else self.running[0].window_end - self.running[0].block_start
        )
        return StepPlan(
            items=tuple(plan_item(sequence) for sequence in self.running),
            admitted=tuple(admitted),
            scheduled_tokens=rows * len(self.running),
            pad_to=self._pad_to,
        )

    def _form_batch(self) -> None:
        """Equal slabs, so that the padded cache is one strided view of the pool."""
        while self.waiting and len(self.running) < self.batch_size:
            head = self.waiting[0]
            members = [*self.running, head]
            slab = max(sequence.kv_rows for sequence in members)
            if _shape(head) != _shape(members[0]) or slab * len(members) > self.pool.num_rows:
                break
            self.running.append(self.waiting.popleft())
        slab = max((sequence.kv_rows for sequence in self.running), default=0)
        for sequence in self.running:
            sequence.kv_rows = slab
            reserved = self._reserve(sequence)
            assert reserved, "an empty pool holds the slabs just counted"
        self._pad_to = max((sequence.request.total_len for sequence in self.running), default=0)


def _shape(sequence: Sequence) -> tuple[int, int, int]:
    generation = sequence.request.generation
    return generation.gen_length, generation.block_length, generation.steps
