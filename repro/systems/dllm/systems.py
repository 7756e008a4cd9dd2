"""dLLM-Serve and the systems it is compared with."""

from __future__ import annotations

from baselines.dllm.dllm_cache import method as dllm_cache
from baselines.dllm.dream import DREAM as _DREAM
from baselines.dllm.fast_dllm import FAST_DLLM as _FAST_DLLM
from baselines.dllm.llada import LLADA as _LLADA
from baselines.dllm.sparse_dllm import SPARSE_DLLM as _SPARSE_DLLM
from engines.dllm.serve import DLLM_SERVE as _DLLM_SERVE
from repro.systems.dllm.system import DllmSystem

DLLM_SERVE = DllmSystem(_DLLM_SERVE)
FAST_DLLM = DllmSystem(_FAST_DLLM)
DLLM_CACHE = DllmSystem(dllm_cache.DLLM_CACHE)
SPARSE_DLLM = DllmSystem(_SPARSE_DLLM)
LLADA = DllmSystem(_LLADA)
DREAM = DllmSystem(_DREAM)
