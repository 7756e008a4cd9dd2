"""Every system by its name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engines.errors import UserError
from repro.systems.base import System
from repro.systems.baseline import Baseline, DllmCache
from repro.systems.serve import DllmServe

SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        s.name: s
        for s in (
            DllmServe(),
            Baseline(
                "fast-dllm",
                "Fast-dLLM",
                "prefix or dual cache, one Refresh per block, parallel decoding",
                batches_upstream=True,
            ),
            # Its process-wide cache takes a batch of one prompt length and one generation length.
            DllmCache(
                "dllm-cache",
                "dLLM-Cache",
                "feature caches of prompt and response, partial updates",
                batches_upstream=True,
            ),
            # Published code indexes its cache as a batch of one.
            Baseline(
                "sparse-dllm",
                "Sparse-dLLM",
                "delayed sparse cache, one selection for all heads",
                batches_upstream=False,
            ),
            # The published samplers are called with one prompt.
            Baseline(
                "llada", "LLaDA", "the plain LLaDA sampler: no cache, every step a full forward", batches_upstream=False
            ),
            Baseline("dream", "Dream", "the plain Dream sampler: no cache, no blocks", batches_upstream=False),
        )
    }
)


def system(name: str) -> System:
    if name not in SYSTEMS:
        raise UserError(f"system={name!r} is unknown: use one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
