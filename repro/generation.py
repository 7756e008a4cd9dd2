"""One prompt through one system: the command behind ``repro generate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from baselines.dllm.method import Method, check_ties, generation_of, method
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.cache.kv_pool import KvPool
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.record import StepRecord
from engines.dllm.request import Request, check_request
from engines.dllm.scheduling.scheduler import PhaseScheduler
from engines.dllm.sequence import cache_rows
from engines.errors import require
from engines.models.checkpoint import checkpoint_dir, config_of


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """``knobs`` holds only what the user gave: an option a system would ignore is refused."""

    system: str
    model: str
    generation: GenerationConfig
    knobs: Mapping[str, Any]
    tie_policy: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    weights: str = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """Checked options: the method behind them, and what it makes of the settings."""

    options: GenerateOptions
    method: Method
    generation: GenerationConfig

    def request(self, prompt_ids: tuple[int, ...]) -> Request:
        """Refused, before anything is loaded, where the checkpoint cannot run it."""
        request = Request(request_id=0, prompt_len=len(prompt_ids), prompt_ids=prompt_ids, generation=self.generation)
        check_request(request, config_of(self.options.model))
        return request


@dataclass(frozen=True, kw_only=True)
class Generated:
    token_ids: tuple[int, ...]
    """The generated region, gen_length ids."""
    forward_passes: int
    """As the method's published code counts them."""


def plan_generation(options: GenerateOptions) -> GenerationPlan:
    """Check the options against the checkpoint's family; nothing is loaded but its config."""
    family = config_of(options.model).family
    chosen = method(options.system, family, options.knobs)
    generation = generation_of(options.system, family, options.knobs, options.generation)
    require(0 <= generation.seed < 2**63, f"seed={generation.seed} must not be negative, and below 2^63")
    check_ties(generation, options.tie_policy)
    return GenerationPlan(options=options, method=chosen, generation=generation)


def generate(options: GenerateOptions, prompt_ids: tuple[int, ...]) -> Generated:
    """Run one request to its end on an engine sized for it alone."""
    return run_plan(plan_generation(options), prompt_ids)


def run_plan(plan: GenerationPlan, prompt_ids: tuple[int, ...]) -> Generated:
    request, chosen = plan.request(prompt_ids), plan.method
    config = EngineConfig(
        max_num_batched_tokens=request.total_len,
        max_model_len=request.total_len,
        max_num_seqs=1,
        sparsity=chosen.sparsity,
        decode=chosen.decode,
        tie_policy=plan.options.tie_policy or chosen.tie_policy,  # type: ignore[arg-type]
        suppress_mask_token=chosen.suppress_mask_token,
    )
    engine = _engine(plan.options, chosen, config, request)
    engine.submit(request)
    records = engine.run()
    token_ids = engine.take_output(0)
    assert token_ids is not None
    extra = _empty_forwards(records) if chosen.counts_empty_forward else 0
    return Generated(token_ids=token_ids, forward_passes=len(records) + extra)


def _engine(options: GenerateOptions, chosen: Method, config: EngineConfig, request: Request) -> Engine:
    from engines.models.loader import load_model, parse_dtype

    dtype = parse_dtype(options.dtype)
    load: Callable[[], Any] = lambda: load_model(  # noqa: E731
        options.model,
        dtype=dtype,
        device=options.device,
        weights=options.weights,  # type: ignore[arg-type]
    )
    stop_ids = None
    if request.generation.stop_at_eos and options.weights != "random":
        from engines.models.chat import stop_token_ids

        stop_ids = stop_token_ids(checkpoint_dir(options.model, weights=False), config_of(options.model))
    if chosen.features is not None:
        from baselines.dllm.dllm_cache.torch_executor import feature_cache_executor

        scheduler = StaticBatchScheduler(config, KvPool(0), chosen.rule, batch_size=1)
        return Engine(
            scheduler, feature_cache_executor(load(), config, chosen.features, batch_size=1, stop_ids=stop_ids)
        )

    from engines.dllm.executor.packed import packed_executor

    rows = cache_rows(request, config.sparsity, chosen.rule.window) if chosen.rule.caches else 0
    phase_scheduler = PhaseScheduler(config, KvPool(rows), chosen.rule, exact_steps=chosen.exact_steps)
    return Engine(phase_scheduler, packed_executor(load(), config, rows, num_slots=1, stop_ids=stop_ids))


def _empty_forwards(records: list[StepRecord]) -> int:
    """Blocks that their first, full forward completed: published code runs one more forward on each."""
    refresh = [record.plan.num_refresh == 1 for record in records] + [True]
    return sum(now and after for now, after in pairwise(refresh))
