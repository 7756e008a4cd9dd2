"""Engines over small block-diffusion models, and what they computed for each request."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from support.block_models import MASK, block_model

from engines.blockdiffusion.engine import BlockEngine
from engines.blockdiffusion.executor import TorchBlockExecutor
from engines.blockdiffusion.rules import DecodeRule
from engines.blockdiffusion.scheduler import Batching, BlockEngineConfig
from engines.blockdiffusion.sequence import BlockAnswer, BlockRequest, BlockStepPlan, BlockStepRecord, Denoised, Outcome


class Recorder(TorchBlockExecutor):
    """Remembers its steps, and by request the predictions of every denoise."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps: list[tuple[BlockStepPlan, Outcome]] = []
        self.traces: dict[int, list[tuple[list[int], list[float]]]] = defaultdict(list)

    def run(self, plan: BlockStepPlan, denoised: Denoised) -> Outcome:
        outcome = super().run(plan, denoised)
        self.steps.append((plan, outcome))
        denoising = [work.request_id for work in plan.works if work.rows is not None]
        for i, request_id in enumerate(denoising):
            which = denoised.wanted[i]
            self.traces[request_id].append((outcome.tokens[i, which].tolist(), outcome.confidence[i, which].tolist()))
        return outcome


SIZES = {"num_slots": 8, "max_len": 160, "num_tokens": 1280}


def engine_for(
    family: str, *, block: int = 8, rows: int = 4096, seed: int = 0, batching: Batching = "mixed", **options: Any
) -> BlockEngine:
    executor = Recorder(block_model(family, seed), block=block, **{**SIZES, **options})
    return BlockEngine(executor, BlockEngineConfig(max_num_batched_tokens=rows, batching=batching))


def recorder(engine: BlockEngine) -> Recorder:
    assert isinstance(engine.executor, Recorder)
    return engine.executor


def prompt(tokens: int, seed: int = 0) -> tuple[int, ...]:
    random = torch.Generator().manual_seed(1000 * seed + tokens)
    return tuple(torch.randint(0, MASK, (tokens,), generator=random).tolist())


def request(number: int, tokens: int, gen_length: int, rule: DecodeRule, **options: Any) -> BlockRequest:
    given = {"prompt_ids": prompt(tokens, number), **options}
    return BlockRequest(request_id=number, gen_length=gen_length, rule=rule, **given)


@cache
def alone(family: str, asked: BlockRequest, **options: Any) -> tuple[BlockAnswer, list[tuple[list[int], list[float]]]]:
    """Answer and predictions of a request with an engine to itself, computed once."""
    engine = engine_for(family, **options)
    answer = engine.run([asked])[asked.request_id]
    return answer, recorder(engine).traces[asked.request_id]


def submitted(engine: BlockEngine, asked: Sequence[BlockRequest], steps: int = 0) -> BlockEngine:
    """The engine after so many steps with these."""
    for each in asked:
        engine.submit(each)
    for _ in range(steps):
        if engine.has_work:
            engine.step()
    return engine


def finished(engine: BlockEngine) -> list[BlockStepRecord]:
    """Its steps until nothing is left, without their times."""
    records = []
    while engine.has_work:
        record = engine.step()
        assert record is not None
        records.append(record._replace(duration_s=0.0))
    return records


def is_whole(engine: BlockEngine) -> bool:
    """Whether the pool is as it was when nothing had run, but for what the prefix cache keeps."""
    tables = engine.executor.tables
    return (
        tables.room == tables.num_blocks
        and tables.num_free_slots == tables.num_slots
        and not np.any(tables.block_counts)
        and not np.any(tables.table)
    )
