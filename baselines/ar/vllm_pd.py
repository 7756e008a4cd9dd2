"""vLLM's prefill side under PD disaggregation: chunked prefill, first come, first served, plain data parallelism."""

from __future__ import annotations

from baselines.ar.sglang import PdConfig, make_router
from engines.laps.system import PrefillSystem
from engines.policies.batching import Chunked

CHUNK_TOKENS = 2048


def vllm_pd(config: PdConfig | None = None, *, name: str = "vllm-pd") -> PrefillSystem:
    config = config or PdConfig()
    batching = Chunked(max_num_batched_tokens=config.max_num_batched_tokens or CHUNK_TOKENS)
    router = make_router(config.routing or "round-robin")
    return PrefillSystem(name=name, make_batching=lambda: batching, make_router=router)
