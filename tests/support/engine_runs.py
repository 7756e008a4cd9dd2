"""Engines over tiny models and what records or doubts their steps, and requests run alone or together."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from support.tiny_models import GQA, TinyModel, network

from engines.cost.roofline import L40S, Calibration, Roofline
from engines.dllm.config import DelayedCache, EngineConfig, Phase, RefreshRule, Seen, SparsityConfig, Window
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.method import Sampler
from engines.dllm.plan import Executor, Request, StepOutcome, StepPlan, StepRecord
from engines.dllm.scheduling import SCHEDULERS, KvPool
from engines.dllm.sequence import cache_rows
from engines.models.shape import ModelShape

CALIBRATION = Calibration(
    gpu=L40S.name,
    matmul_efficiency=0.5,
    attention_efficiency=0.4,
    bandwidth_efficiency=0.6,
    step_overhead_s=1e-3,
    fitted_on=("test",),
    note="made up",
)


def roofline(model: TinyModel = GQA, calibration: Calibration | None = None) -> Roofline:
    return Roofline(ModelShape.from_config(model.config, name=model.name, dtype_bytes=4), L40S, calibration)


class Recorder:
    """Passes everything on to an executor and keeps the plans."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.plans: list[StepPlan] = []
        self.validate, self.release = executor.validate, executor.release
        self.wait, self.times, self.close = executor.wait, executor.times, executor.close

    def execute(self, plan: StepPlan) -> StepOutcome:
        self.plans.append(plan)
        return self.executor.execute(plan)


@dataclass
class OnDoubt:
    below: float = 0.9
    caches = True
    window = "block"
    needs = frozenset({"confidences"})
    doubts = False

    def see(self, seen: Seen) -> None:
        self.doubts = min(seen.confidences, default=1.0) < self.below

    def phase(self, step_in_block: int) -> Phase:
        return Phase.BUILD if step_in_block == 0 or self.doubts else Phase.REUSE


Ids = tuple[int, ...]

MOST_STEPS = 1000


def engine_for(model: TinyModel, config: EngineConfig, kv_rows: int, rule: RefreshRule | None = None) -> Engine:
    rule = rule or DelayedCache(delay=config.sparsity.refresh_delay)
    scheduler = SCHEDULERS[config.scheduler](config, KvPool(kv_rows), rule)
    return Engine(scheduler, packed_executor(network(model), config, kv_rows))


def steps_of(engine: Engine, arrivals: Sequence[tuple[int, Request]]) -> Iterator[StepRecord]:
    """``arrivals`` are (engine step, request); every request is submitted before that step. Empty steps count as well."""
    pending, step = sorted(arrivals, key=lambda arrival: arrival[0]), 0
    while pending or engine.has_work:
        assert step < MOST_STEPS, "no requests here take that many steps"
        while pending and pending[0][0] <= step:
            engine.submit(pending.pop(0)[1])
        record = engine.step()
        step += 1
        if record is not None:
            yield record


def run_together(engine: Engine, arrivals: Sequence[tuple[int, Request]]) -> dict[int, Ids]:
    """Ids of every request."""
    outputs = {}
    for record in steps_of(engine, arrivals):
        for request_id in record.done.finished:
            found = engine.take_output(request_id)
            assert found is not None
            outputs[request_id] = found
    return outputs


def rows_of(request: Request, sparsity: SparsityConfig, window: Window = "block") -> int:
    """KV rows that the request holds for life."""
    return cache_rows(request.total_len, request.generation, sparsity, window)


def free_runs(pool: KvPool) -> tuple[tuple[int, int], ...]:
    """(start, length) of every free run, by start."""
    return tuple(zip(pool._starts, pool._lengths, strict=True))


def run_alone(model: TinyModel, chosen: Sampler, request: Request) -> Ids:
    config = EngineConfig(max_num_seqs=1, max_model_len=model.max_len, sparsity=chosen.sparsity, decode=chosen.decode)
    rows = rows_of(request, chosen.sparsity, chosen.rule.window)
    engine = engine_for(model, config, rows, chosen.rule)
    return run_together(engine, [(0, replace(request, request_id=0))])[0]


def chi_square(counts: np.ndarray, probability: np.ndarray) -> float:
    """Standardised: about N(0, 1) for the right distribution (Wilson-Hilferty)."""
    expected = counts.sum() * probability
    freedom = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
