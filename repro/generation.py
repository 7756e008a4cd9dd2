"""One prompt through one system: the command behind ``repro generate``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.dllm.config import EngineConfig, GenerationConfig, SparsityConfig, require
from engines.dllm.engine import Engine
from engines.dllm.kv_pool import KvPool
from engines.dllm.phase import DelayedCache, NoCache
from engines.dllm.request import Request
from engines.dllm.scheduler import PhaseScheduler, Scheduler
from engines.dllm.sequence import cache_rows
from engines.errors import UserError
from repro.systems import require_even

# What each system can be told besides the generation itself; anything else would have no effect.
ALLOWED = {
    "llada": frozenset({"tie_policy"}),
    "sparse-dllm": frozenset({"tie_policy", "retention_ratio", "pool_kernel"}),
    "dllm-serve": frozenset(
        {"tie_policy", "retention_ratio", "pool_kernel", "selection", "refresh_delay", "compat", "threshold"}
    ),
}


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """``knobs`` holds only what the user gave: an option a system would ignore is refused."""

    system: str
    model: str
    generation: GenerationConfig
    knobs: dict[str, Any]
    dtype: str = "float32"
    device: str = "cpu"
    weights: str = "checkpoint"

    def __post_init__(self) -> None:
        if self.system not in ALLOWED:
            raise UserError(f"system={self.system!r} is unknown: use one of {', '.join(ALLOWED)}")
        for name, value in self.knobs.items():
            require(name in ALLOWED[self.system],
                    f"{name}={value!r} has no effect with system={self.system!r}: leave it out")  # fmt: skip
        if self.system != "dllm-serve":
            require_even(self.generation.gen_length, self.generation.block_length, self.generation.steps)


@dataclass(frozen=True, kw_only=True)
class Generated:
    token_ids: tuple[int, ...]
    """The generated region, gen_length ids."""
    forward_passes: int


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


def generate(options: GenerateOptions, prompt_ids: tuple[int, ...]) -> Generated:
    """Run one request to its end on an engine sized for it alone."""
    config, scheduler_of = _engine_parts(options, len(prompt_ids))
    request = Request(request_id=0, prompt_len=len(prompt_ids), prompt_ids=prompt_ids, generation=options.generation)

    from engines.dllm.torch_executor import TorchExecutor
    from engines.models.loader import load_model, parse_dtype

    dtype = parse_dtype(options.dtype)
    model = load_model(options.model, dtype=dtype, device=options.device, weights=options.weights)  # type: ignore[arg-type]
    kv_rows = cache_rows(request, config.sparsity)
    engine = Engine(scheduler_of(KvPool(kv_rows)), TorchExecutor(model, config, kv_rows, num_slots=1))
    engine.submit(request)
    records = engine.run()
    token_ids = engine.take_output(0)
    assert token_ids is not None
    return Generated(token_ids=token_ids, forward_passes=len(records))


def _engine_parts(options: GenerateOptions, prompt_len: int) -> tuple[EngineConfig, Any]:
    knobs = options.knobs
    total = prompt_len + options.generation.gen_length
    published = options.system != "dllm-serve"
    sparsity: dict[str, Any] = {
        name: knobs[name] for name in ("retention_ratio", "pool_kernel", "selection", "refresh_delay") if name in knobs
    }
    if options.system == "sparse-dllm":
        sparsity.update(selection="uniform", min_kept=0)
    config = EngineConfig(
        max_num_batched_tokens=total,
        max_model_len=total,
        max_num_seqs=1,
        sparsity=SparsityConfig(**sparsity),
        # The published samplers are compared token by token, so their library's order of ties is kept.
        tie_policy=knobs.get("tie_policy", "parity" if published else "stable"),
        compat=knobs.get("compat", "paper"),
        suppress_mask_token=not published,
    )
    rule = NoCache() if options.system == "llada" else DelayedCache(delay=config.sparsity.refresh_delay)

    def scheduler(pool: KvPool) -> Scheduler:
        return PhaseScheduler(config, pool, rule, exact_steps=published)

    return config, scheduler
