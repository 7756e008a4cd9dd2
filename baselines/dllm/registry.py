"""dLLM-Serve and the methods it is compared with, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from baselines.dllm.dllm_cache.method import DLLM_CACHE
from baselines.dllm.dream import DREAM
from baselines.dllm.fast_dllm import FAST_DLLM
from baselines.dllm.llada import LLADA
from baselines.dllm.sparse_dllm import SPARSE_DLLM
from engines.dllm.method import Method
from engines.dllm.serve import DLLM_SERVE
from engines.errors import UserError

METHODS: Mapping[str, Method] = MappingProxyType(
    {method.name: method for method in (DLLM_SERVE, FAST_DLLM, DLLM_CACHE, SPARSE_DLLM, LLADA, DREAM)}
)


def method(name: str) -> Method:
    if name not in METHODS:
        raise UserError(f"system={name!r} is unknown: use one of {', '.join(METHODS)}")
    return METHODS[name]
