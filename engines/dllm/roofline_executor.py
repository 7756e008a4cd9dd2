"""Charges step plans to a hardware model instead of running them; same plans, no tokens."""

from __future__ import annotations

from engines.dllm.config import EngineConfig, require
from engines.dllm.phase import Phase
from engines.dllm.plan import StepOutcome, StepPlan
from engines.dllm.request import Request
from engines.roofline import Roofline, StepWork


class RooflineExecutor:
    """Rows are counted as the torch executors compute them, padding and monolithic logits included."""

    def __init__(self, roofline: Roofline, config: EngineConfig) -> None:
        self.roofline = roofline
        self.config = config

    def validate(self, request: Request) -> None:
        threshold = request.generation.threshold
        require(threshold is None,
                f"threshold={threshold} cannot be simulated, how many tokens pass it depends on the model: use --executor torch")  # fmt: skip

    def release(self, request_id: int) -> None:
        return None

    def execute(self, plan: StepPlan) -> StepOutcome:
        work = step_work(plan, self.config)
        duration = self.roofline.step_time(work).total_s
        return StepOutcome(
            committed=tuple([item.commit for item in plan.items]),
            query_rows=work.query_rows,
            logit_rows=work.logit_rows,
            forward_s=duration,
            duration_s=duration,
        )


def step_work(plan: StepPlan, config: EngineConfig) -> StepWork:
    """What a plan asks of the hardware (dLLM-Serve §2.3): rows, attention pairs, logits, KV traffic."""
    query_rows = pairs = read = written = wanted = 0
    for item in plan.items:
        block = item.block_end - item.block_start
        window = item.window_end - item.block_start
        if item.phase is Phase.REUSE:
            rows, keys = window, item.kept_rows + window
            read += keys
            written += window
        else:
            rows = keys = plan.pad_to or item.total_len
            read += keys
            if item.phase is Phase.BUILD:
                written += item.kept_rows
        query_rows += rows
        pairs += rows * keys
        wanted += item.masks_left if config.suppress_mask_token else block
    if plan.pad_to is None:
        logit_rows, chunks = wanted, max(1, -(-wanted // config.max_num_logits))
    else:
        logit_rows, chunks = query_rows, 1
    return StepWork(
        query_rows=query_rows,
        attention_pairs=pairs,
        logit_rows=logit_rows,
        kv_read_rows=read,
        kv_written_rows=written,
        num_sequences=len(plan.items),
        logit_chunks=chunks,
    )
