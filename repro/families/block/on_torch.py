"""The engine of a deployment on a real device, for measured runs."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import lru_cache
from typing import Any

from engines.blockdiffusion.canvas_executor import executor_for
from engines.blockdiffusion.engine import BlockEngine
from engines.blockdiffusion.sequence import BlockRequest
from engines.models.block_config import BlockConfig
from engines.models.loader import Quantization, check_device, check_quantization, load_block, parse_dtype
from engines.models.packed import PackedModel
from repro.families.block.settings import MAX_NUM_LOGITS, BlockSettings


def check_machine(settings: BlockSettings) -> None:
    knobs, has_experts = settings.knobs, settings.config.experts is not None
    check_device(knobs.device)
    check_quantization(knobs.quantization, parse_dtype(knobs.dtype), knobs.device, has_experts=has_experts)


@contextmanager
def serving(settings: BlockSettings) -> Iterator[tuple[BlockEngine, Mapping[str, Any]]]:
    knobs = settings.knobs
    model = _load(
        settings.config if settings.directory is None else str(settings.directory),
        knobs.dtype,
        knobs.quantization,
        knobs.device,
    )
    executor = executor_for(
        model,
        num_slots=knobs.max_num_seqs,
        max_len=settings.max_model_len,
        num_tokens=settings.num_tokens,
        block=settings.block,
        block_size=settings.pool_block,
        max_num_logits=MAX_NUM_LOGITS,
        prefix_cache=knobs.prefix_cache,
        shifts=settings.shifts,
    )
    with closing(executor):
        # Warm up first, so that no measured time includes one-time work and filling of caches.
        warm = BlockRequest(request_id=0, prompt_ids=(0,), gen_length=2 * settings.block, rule=settings.rule)
        BlockEngine(executor, settings.engine).run([warm])
        yield BlockEngine(executor, settings.engine), {"attention": executor.attention.name}


@lru_cache(maxsize=1)
def _load(model: str | BlockConfig, dtype: str, quantization: Quantization, device: str) -> PackedModel[BlockConfig]:
    weights = "checkpoint" if isinstance(model, str) else "random"
    return load_block(
        model,
        dtype=parse_dtype(dtype),
        device=device,
        weights=weights,  # type: ignore[arg-type]
        quantization=quantization,
        keeps_weights=False,
    )
