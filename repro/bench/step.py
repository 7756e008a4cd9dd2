"""Times whole dLLM-Serve steps on plans made by hand: python -m repro.bench.step --help

A batch of requests of one length, each in its last block, runs through the executor that also serves:

    refresh    every request forwards all of its tokens, alternately without and with building its cache
    reuse      every request forwards its block, in the block's steps after its Refreshes
    mixed      half of the batch refreshes and the other half reuses, in turn

    ms         time per step over consecutive steps; we wait for the device only after the last
    tokens_s   committed tokens per second, one per request and step
    bound_ms   the roofline's lower bound, at the card's datasheet peaks or at measured ones
    of_bound   bound / ms: the share of the roofline that is reached
    outside    share of the time outside the forward (docs/metrics.md)
    host       share of time in which the device had nothing to do, from separate profiled runs without graphs
    graph      share of the steps that ran as a CUDA graph
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from engines.cost.peaks import datasheet_gpu, measured_gpu
from engines.cost.roofline import Gpu, Roofline
from engines.dllm.config import EngineConfig, GenerationConfig, Phase
from engines.dllm.executor.compose import packed_executor
from engines.dllm.executor.torch import TorchExecutor
from engines.dllm.plan import PlanItem, Request, StepOutcome, StepPlan
from engines.dllm.simulated import step_work
from engines.models.checkpoint import PUBLISHED_CONFIGS
from engines.models.loader import load_model
from engines.models.protocol import DiffusionModel
from engines.models.shape import ModelShape
from engines.runtime.step_timer import DeviceTimes
from repro.bench.common import Rows, add_counts, add_device, device_of, facts_of, parser_of, run, table

KINDS = ("refresh", "reuse", "mixed")
REFRESHES = 2
"""The first steps of a block: one without and one with building the cache."""
NUM_REFRESH_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """``size`` requests of ``total_len`` tokens in their last block, and the pool rows that they own."""

    size: int
    total_len: int
    block_length: int
    config: EngineConfig

    @property
    def kept_rows(self) -> int:
        return self.config.sparsity.kept_rows(self.total_len - self.block_length)

    @property
    def kv_rows(self) -> int:
        return self.size * (self.kept_rows + self.block_length)

    def requests(self, vocab_size: int, mask_id: int) -> tuple[Request, ...]:
        random = np.random.default_rng(0)
        ids = np.setdiff1d(np.arange(vocab_size), [mask_id])
        generation = GenerationConfig(
            gen_length=self.block_length, block_length=self.block_length, steps=self.block_length
        )
        prompt_len = self.total_len - self.block_length
        return tuple(
            Request(
                request_id=i,
                prompt_len=prompt_len,
                prompt_ids=tuple(random.choice(ids, prompt_len).tolist()),
                generation=generation,
            )
            for i in range(self.size)
        )

    def plan(self, phases: Sequence[Phase], step: int, admitted: tuple[Request, ...] = ()) -> StepPlan:
        items = tuple(
            PlanItem(
                request_id=i,
                phase=phase,
                total_len=self.total_len,
                block_start=self.total_len - self.block_length,
                block_end=self.total_len,
                window_end=self.total_len,
                commit=1,
                masks_left=self.block_length - step,
                kept_rows=self.kept_rows,
                kv_start=i * (self.kept_rows + self.block_length),
                step_in_block=step,
            )
            for i, phase in enumerate(phases)
        )
        return StepPlan(items=items, admitted=admitted, scheduled_tokens=sum(item.query_tokens for item in items))

    def prologue(self, requests: tuple[Request, ...]) -> list[StepPlan]:
        """The plans before the timed steps: admission and the block's Refreshes."""
        return [self.plan([Phase.FULL] * self.size, 0, requests), self.plan([Phase.BUILD] * self.size, 1)]

    def timed_plans(self, kind: str) -> list[StepPlan]:
        def phase(i: int, step: int) -> Phase:
            if kind == "refresh":
                return Phase.BUILD if step % 2 else Phase.FULL
            return Phase.BUILD if kind == "mixed" and (i + step) % 2 else Phase.REUSE

        first = REFRESHES
        last = self.block_length if kind == "reuse" else min(self.block_length, first + NUM_REFRESH_STEPS)
        return [self.plan([phase(i, step) for i in range(self.size)], step) for step in range(first, last)]


@dataclass(frozen=True, kw_only=True)
class TimedRound:
    seconds: float
    outcomes: list[StepOutcome]
    forward_s: float
    parts: list[Mapping[str, float]]
    """Seconds by part, one mapping per profiled step."""


def run_round(executor: TorchExecutor, batch: StepBatch, kind: str, requests: tuple[Request, ...]) -> TimedRound:
    """Run one block of all requests, and time its ``timed_plans``. The executor is empty before and after."""
    plans = batch.timed_plans(kind)
    for plan in batch.prologue(requests):
        executor.execute(plan)
    executor.times()
    started = perf_counter()
    outcomes = [executor.execute(plan) for plan in plans]
    executor.wait()
    seconds = perf_counter() - started
    device_times = [DeviceTimes(o.forward_s, o.parts) for o in outcomes if o.forward_s is not None]
    device_times += executor.times().values()
    assert len(device_times) == len(plans)
    for request in requests:
        executor.release(request.request_id)
    return TimedRound(
        seconds=seconds,
        outcomes=outcomes,
        forward_s=sum(times.forward_s for times in device_times),
        parts=[times.parts for times in device_times if times.parts is not None],
    )


def time_steps(
    name: str, model: DiffusionModel, batch: StepBatch, kind: str, card: Gpu, *, repeats: int, warmup: int
) -> dict[str, Any]:
    requests = batch.requests(model.config.vocab_size, model.config.mask_token_id)
    executor = packed_executor(model, batch.config, batch.kv_rows, num_slots=batch.size)
    executor.prepare(batch.block_length)
    for _ in range(warmup):
        run_round(executor, batch, kind, requests)
    rounds = [run_round(executor, batch, kind, requests) for _ in range(repeats)]
    del executor  # its pool, before another is made

    plans = batch.timed_plans(kind)
    ms = 1e3 * median(timed.seconds for timed in rounds) / len(plans)
    dtype_bytes = next(model.parameters()).dtype.itemsize
    roofline = Roofline(ModelShape.from_config(model.config, name=name, dtype_bytes=dtype_bytes), card)
    works = Counter(step_work(plan, batch.config) for plan in plans)
    bound_ms = 1e3 * sum(n * roofline.lower_bound_s(work) for work, n in works.items()) / len(plans)
    graphs = [outcome.graph for timed in rounds for outcome in timed.outcomes]
    return {
        "model": name,
        "kind": kind,
        "batch_size": batch.size,
        "total_len": batch.total_len,
        "steps": len(plans) * repeats,
        "ms": ms,
        "tokens_s": 1e3 * batch.size / ms,
        "bound_ms": bound_ms,
        "of_bound": bound_ms / ms,
        "outside": 1 - sum(timed.forward_s for timed in rounds) / sum(timed.seconds for timed in rounds),
        "host": host_share(model, batch, kind, requests),
        "graph": sum(graphs) / len(graphs),
        # The distinct work of a round's timed steps, with the number of steps that have it.
        "works": tuple((n, work.non_defaults()) for work, n in works.items()),
    }


def host_share(model: DiffusionModel, batch: StepBatch, kind: str, requests: tuple[Request, ...]) -> float:
    """Idle share of the timed steps in the second of two rounds, with every step profiled."""
    executor = packed_executor(model, batch.config, batch.kv_rows, num_slots=batch.size, profile_every=1)
    run_round(executor, batch, kind, requests)
    timed = run_round(executor, batch, kind, requests)
    busy = sum(sum(parts.values()) - parts["idle"] for parts in timed.parts)
    return 1 - busy / timed.seconds


def main() -> None:
    parser = parser_of(__doc__)
    models = ("tiny", *PUBLISHED_CONFIGS)
    parser.add_argument("--model", default="tiny", choices=models, help="the embedded one, or random weights")
    add_device(parser)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--warmup", type=int, default=2, help="blocks before those that are timed")
    add_counts(
        parser,
        batch=((1, 8), "requests in a step; mixed needs two"),
        length=((128, 256), "tokens of a request, its block included"),
        block=(32, "tokens of a block, and steps"),
        max_num_logits=(2048, "rows of logits at once"),
        repeats=(5, "blocks timed; the middle one counts"),
    )
    options = parser.parse_args()
    if options.block <= REFRESHES or min(options.length) <= options.block:
        parser.error(f"--block must exceed {REFRESHES} steps, and --length the block")
    device, dtype = device_of(options)
    weights = "checkpoint" if options.model == "tiny" else "random"
    model = load_model(options.model, dtype=dtype, device=options.device, weights=weights)  # type: ignore[arg-type]
    card = datasheet_gpu(device) or measured_gpu(device, dtype)
    if max(options.length) > model.config.max_sequence_length:
        parser.error(f"--length must be at most {model.config.max_sequence_length} on this model")

    shape = ModelShape.from_config(model.config, name=options.model, dtype_bytes=dtype.itemsize)
    peaks = {"flops_per_s": card.peak_flops, "bytes_per_s": card.bandwidth}
    facts = {**facts_of(device, dtype), "card": card.name, "source": card.source, **peaks}
    rows = Rows(options.json, {**facts, "block": options.block, "shape": shape.dimensions})
    grid = [(size, length, kind) for size in options.batch for length in options.length for kind in options.kind]
    for size, length, kind in grid:
        if kind == "mixed" and size < 2:
            continue
        config = EngineConfig(
            max_num_batched_tokens=size * length,
            max_num_logits=options.max_num_logits,
            max_model_len=length,
            max_num_seqs=size,
        )
        batch = StepBatch(size=size, total_len=length, block_length=options.block, config=config)
        rows.add(time_steps(options.model, model, batch, kind, card, repeats=options.repeats, warmup=options.warmup))
        print(f"{kind}, {size} of {length} tokens", file=sys.stderr)
    print(table(rows.rows))
    print(f"bounds: {card.name}; {card.source}")


if __name__ == "__main__":
    run(main)
