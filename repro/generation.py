"""One prompt through one system: the command behind ``repro generate``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from baselines.dllm_cache.schedule import FeatureCacheConfig
from baselines.method import Method, check_generation, method
from baselines.static_scheduler import StaticBatchScheduler
from engines.dllm.config import EngineConfig, GenerationConfig, require
from engines.dllm.engine import Engine
from engines.dllm.kv_pool import KvPool
from engines.dllm.request import Request, StepRecord
from engines.dllm.scheduler import PhaseScheduler
from engines.dllm.sequence import cache_rows
from engines.errors import UserError
from engines.models.checkpoint import config_of

CACHE_OPTIONS = ("prompt_interval", "gen_interval", "transfer_ratio")


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
class Generated:
    token_ids: tuple[int, ...]
    """The generated region, gen_length ids."""
    forward_passes: int
    """As the method's published code counts them."""


def read_prompt_ids(path: Path) -> tuple[int, ...]:
    """A JSON list of ids, an object with ``prompt_ids``, or ids separated by blanks or commas."""
    if not path.is_file():
        raise UserError(f"prompt_ids={str(path)!r} is not a file: give a file of token ids")
    text = path.read_text()
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        parsed = text.replace(",", " ").split()
    if isinstance(parsed, dict):
        parsed = parsed.get("prompt_ids")
    if isinstance(parsed, int):
        parsed = [parsed]
    try:
        ids = tuple(_token_id(value) for value in parsed)
    except (TypeError, ValueError) as error:
        raise UserError(f"prompt_ids={str(path)!r} is not a list of integers: write them as JSON, [1, 2, 3]") from error
    if not ids:
        raise UserError(f"prompt_ids={str(path)!r} is empty: give at least one token id")
    return ids


def _token_id(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(value)
    return int(value)


def plan_generation(options: GenerateOptions) -> tuple[Method, GenerationConfig]:
    """Check the options against the checkpoint's family; nothing is loaded but its config."""
    family = config_of(options.model).family
    chosen = method(options.system, family, options.knobs)
    generation = options.generation
    require(generation.seed >= 0, f"seed={generation.seed} must not be negative")
    require(
        not (generation.is_parallel and options.tie_policy == "parity"),
        "tie_policy='parity' has no effect with parallel decoding, which commits by level: leave it out",
    )
    if options.system == "dream" or (options.system == "fast-dllm" and family == "dream" and not chosen.rule.caches):
        # Dream's own loop has no blocks.
        generation = replace(generation, block_length=generation.gen_length)
    if options.system == "fast-dllm" and family == "dream" and options.knobs.get("alg") == "confidence_threshold":
        generation = replace(generation, threshold=generation.threshold or 0.9)
    check_generation(options.system, family, generation)
    return chosen, generation


def generate(options: GenerateOptions, prompt_ids: tuple[int, ...]) -> Generated:
    """Run one request to its end on an engine sized for it alone."""
    chosen, generation = plan_generation(options)
    request = Request(request_id=0, prompt_len=len(prompt_ids), prompt_ids=prompt_ids, generation=generation)
    config = EngineConfig(
        max_num_batched_tokens=request.total_len,
        max_model_len=request.total_len,
        max_num_seqs=1,
        sparsity=chosen.sparsity,
        decode=chosen.decode,
        tie_policy=options.tie_policy or chosen.tie_policy,  # type: ignore[arg-type]
        suppress_mask_token=chosen.suppress_mask_token,
    )
    engine = _engine(options, chosen, config, request)
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
        options.model, dtype=dtype, device=options.device, weights=options.weights  # type: ignore[arg-type]
    )  # fmt: skip
    if options.system == "dllm-cache":
        from baselines.dllm_cache.torch_executor import FeatureCacheTorchExecutor

        cache = FeatureCacheConfig(**{name: options.knobs[name] for name in CACHE_OPTIONS if name in options.knobs})
        scheduler = StaticBatchScheduler(config, KvPool(0), chosen.rule, batch_size=1)
        return Engine(scheduler, FeatureCacheTorchExecutor(load(), config, cache, batch_size=1))

    from engines.dllm.torch_executor import TorchExecutor

    rows = cache_rows(request, config.sparsity, chosen.rule.window) if chosen.rule.caches else 0
    phase_scheduler = PhaseScheduler(config, KvPool(rows), chosen.rule, exact_steps=chosen.exact_steps)
    return Engine(phase_scheduler, TorchExecutor(load(), config, rows, num_slots=1))


def _empty_forwards(records: list[StepRecord]) -> int:
    """Blocks that their first, full forward completed: published code runs one more forward on each."""
    refresh = [record.num_refresh == 1 for record in records] + [True]
    return sum(now and after for now, after in pairwise(refresh))
