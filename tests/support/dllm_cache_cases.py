"""dLLM-Cache on a tiny model: samples, and whether a case is decided by more than rounding."""

from dataclasses import replace
from functools import lru_cache

from support.reference_samplers import Dims, Margins
from support.tiny_models import TinyModel
from torch import Tensor

from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from baselines.dllm.dllm_cache.torch_executor import feature_cache_executor
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.config import EngineConfig, GenerationConfig, NoCache
from engines.dllm.engine import Engine
from engines.dllm.plan import Executor, Request, StepRecord
from engines.dllm.scheduling import KvPool
from engines.models.protocol import DiffusionModel


def is_decided(margins: Margins) -> bool:
    """Whether no decision was closer than float32 resolves."""
    return margins.confidence >= 1e-5 and margins.similarity >= 2e-6 and margins.token >= 1e-3


def dims_of(model: TinyModel) -> Dims:
    return Dims(heads=model.heads, kv_heads=model.kv_heads, layers=model.layers, mask_id=model.mask_id)


@lru_cache
def weights_of(model: TinyModel) -> dict[str, Tensor]:
    return model.weights()


def engine_config(batch_size: int, **changes: object) -> EngineConfig:
    base = EngineConfig(
        max_num_batched_tokens=batch_size * 4096,
        max_num_seqs=batch_size,
        max_model_len=4096,
        tie_policy="parity",
        suppress_mask_token=False,
    )
    return replace(base, **changes)


def run(
    executor: Executor,
    config: EngineConfig,
    prompts: list[tuple[int, ...]],
    generation: GenerationConfig,
    *,
    batch_size: int,
) -> tuple[list[tuple[int, ...] | None], list[StepRecord]]:
    engine = Engine(StaticBatchScheduler(config, KvPool(0), NoCache(), batch_size=batch_size), executor)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(request_id=i, prompt_len=len(prompt), prompt_ids=prompt, generation=generation))
    records = engine.run()
    return [engine.take_output(i) for i in range(len(prompts))], records


def sample(
    model: DiffusionModel,
    prompts: list[tuple[int, ...]],
    generation: GenerationConfig,
    cache: FeatureCacheConfig,
    *,
    batch_size: int | None = None,
    masked_attention: bool | None = None,
    **changes: object,
) -> list[tuple[int, ...] | None]:
    size = len(prompts) if batch_size is None else batch_size
    config = engine_config(size, **changes)
    executor = feature_cache_executor(model, config, cache, batch_size=size, masked_attention=masked_attention)
    return run(executor, config, prompts, generation, batch_size=size)[0]
