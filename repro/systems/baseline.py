"""What dLLM-Serve is compared with, in three readings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from baselines.dllm.dllm_cache.memory import FeatureCaches, feature_cache_footprint, memory_bytes_per_token
from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from baselines.dllm.dllm_cache.work import FeatureCacheRooflineExecutor, PackedFeatureCacheRooflineExecutor
from baselines.dllm.method import Method
from baselines.dllm.static.memory import StaticFootprint, static_footprint
from engines.dllm.config import EngineConfig
from engines.dllm.executor.roofline import RooflineExecutor
from engines.dllm.memory.budget import REDUCTION_ROWS
from engines.errors import UserError
from engines.hardware.roofline import Roofline
from engines.models.shape import ModelShape
from repro.systems.backend import model_shape
from repro.systems.base import PARTICULAR, Serving, System, rows_of_request
from repro.systems.continuous import ContinuousBatching
from repro.systems.settings import Settings
from repro.systems.static import LargestBatches, PublishedBatches

if TYPE_CHECKING:
    from engines.dllm.executor.torch import TorchExecutor
    from engines.models.protocol import DiffusionModel

READINGS: Mapping[str, Serving] = MappingProxyType(
    {"published": PublishedBatches(), "efficient": LargestBatches(), "policy": ContinuousBatching()}
)
"""What the paper compares with; the same samplers in our implementation; their cache policies alone, in which
nothing differs from dLLM-Serve but refresh rule, retention and decode rule."""


class Baseline(System):
    """``batches_upstream``: whether published code can run several requests at once."""

    def __init__(self, name: str, title: str, summary: str, *, batches_upstream: bool) -> None:
        self.name, self.title, self.summary = name, title, summary
        self.batches_upstream = batches_upstream

    def serving(self, reading: str) -> Serving:
        if reading not in READINGS:
            raise UserError(f"reading={reading!r} is unknown: use one of {', '.join(READINGS)}")
        return READINGS[reading]

    def refuse_ignored(self, given: Mapping[str, Any]) -> None:
        reading = given.get("reading", "efficient")
        heeded = self.serving(reading).knobs | {"reading"}
        for name in sorted((PARTICULAR - heeded) & given.keys()):
            raise UserError(
                f"{name}={given[name]!r} has no effect with system={self.name!r} and reading={reading!r}: leave it out"
            )

    # ---- padded static batches ------------------------------------------------------------

    def footprint(
        self, settings: Settings, chosen: Method, longest: int, *, is_upstream: bool = False
    ) -> StaticFootprint:
        """Upstream copies all logits at once to reduce them; here the copies of some rows are alive together."""
        shape = model_shape(settings)
        copies = chosen.reduction_bytes_per_value(shape.dtype_bytes)
        return static_footprint(
            shape,
            settings.memory_bytes,
            longest,
            kv_rows=rows_of_request(longest, settings.generation, chosen),
            logit_bytes_per_value=shape.dtype_bytes + (copies if is_upstream else 0),
            reduction_bytes=0 if is_upstream else copies * REDUCTION_ROWS * shape.vocab_rows,
        )

    def static_roofline(
        self, roofline: Roofline, config: EngineConfig, chosen: Method, *, is_upstream: bool
    ) -> RooflineExecutor:
        return RooflineExecutor(roofline, config, is_upstream=is_upstream)

    def static_torch(
        self,
        model: DiffusionModel,
        config: EngineConfig,
        chosen: Method,
        kv_rows: int,
        *,
        batch_size: int,
        stop_ids: Collection[int] | None = None,
        profile_every: int = 0,
    ) -> TorchExecutor:
        from baselines.dllm.static.executor import padded_executor

        return padded_executor(
            model, config, kv_rows, batch_size=batch_size, stop_ids=stop_ids, profile_every=profile_every
        )


class DllmCache(Baseline):
    """Its own memory and executors: what it caches are features of every layer."""

    def footprint(
        self, settings: Settings, chosen: Method, longest: int, *, is_upstream: bool = False
    ) -> StaticFootprint:
        return feature_cache_footprint(
            model_shape(settings),
            settings.memory_bytes,
            longest,
            settings.generation,
            copied_bytes=chosen.reduction_bytes_per_value(model_shape(settings).dtype_bytes),
            is_upstream=is_upstream,
        )

    def static_roofline(
        self, roofline: Roofline, config: EngineConfig, chosen: Method, *, is_upstream: bool
    ) -> RooflineExecutor:
        return FeatureCacheRooflineExecutor(roofline, config, _features(chosen), is_upstream=is_upstream)

    def static_torch(
        self,
        model: DiffusionModel,
        config: EngineConfig,
        chosen: Method,
        kv_rows: int,
        *,
        batch_size: int,
        stop_ids: Collection[int] | None = None,
        profile_every: int = 0,
    ) -> TorchExecutor:
        from baselines.dllm.dllm_cache.torch_executor import feature_cache_executor

        return feature_cache_executor(
            model, config, _features(chosen), batch_size=batch_size, stop_ids=stop_ids, profile_every=profile_every
        )

    # ---- policy -------------------------------------------------------------------------

    def packed_method(self, settings: Settings, chosen: Method) -> Method:
        if settings.executor == "torch":
            raise UserError(
                "reading='policy' of system='dllm-cache' can only be simulated, its torch executor runs padded batches "
                "alone: use --executor roofline or another reading"
            )
        return replace(chosen, rule=FeatureCaches())

    def cache_row_bytes(self, shape: ModelShape) -> int:
        return memory_bytes_per_token(shape)

    def packed_roofline(self, roofline: Roofline, config: EngineConfig, chosen: Method) -> RooflineExecutor:
        return PackedFeatureCacheRooflineExecutor(roofline, config, _features(chosen))


def _features(chosen: Method) -> FeatureCacheConfig:
    assert chosen.features is not None
    return chosen.features
