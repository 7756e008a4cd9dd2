"""vLLM's prefill side under PD disaggregation: chunked prefill, first come, first served, plain data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from baselines.ar.sglang import Routing, make_router
from baselines.ar.vllm import CHUNK_TOKENS
from engines.laps.system import PrefillSystem
from engines.policies.batching import Chunked


@dataclass(frozen=True, kw_only=True)
class VllmPdConfig:
    max_num_batched_tokens: int = CHUNK_TOKENS
    max_num_seqs: int = 256
    routing: Routing = "round-robin"


def vllm_pd(config: VllmPdConfig | None = None, *, name: str = "vllm-pd") -> PrefillSystem:
    config = config or VllmPdConfig()
    batching = Chunked(max_num_batched_tokens=config.max_num_batched_tokens, max_num_seqs=config.max_num_seqs)
    return PrefillSystem(name=name, make_batching=lambda: batching, make_router=make_router(config.routing))
