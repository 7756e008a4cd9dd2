"""The shape of what one device holds and computes."""

from __future__ import annotations

from functools import lru_cache

from engines.models.checkpoint import PUBLISHED_CONFIGS, config_of
from engines.models.config import ModelConfig
from engines.models.shape import ModelShape
from engines.parallel.division import rank_shape
from repro.systems.dllm.settings import Settings


def model_shape(settings: Settings) -> ModelShape:
    # A simulated card serves 16-bit weights whatever the measuring default.
    is_simulated_card = settings.is_simulated and settings.model in PUBLISHED_CONFIGS
    dtype_bytes = 2 if is_simulated_card or settings.on.dtype != "float32" else 4
    return _shape(settings.model, config_of(settings.model), dtype_bytes, settings.on.tensor_parallel)


@lru_cache(maxsize=32)
def _shape(name: str, config: ModelConfig, dtype_bytes: int, size: int) -> ModelShape:
    return rank_shape(ModelShape.from_config(config, name=name, dtype_bytes=dtype_bytes), size)
