"""dLLM-Serve: the paper's own method (§4.5), for continuous batching alone."""

from __future__ import annotations

from engines.dllm.config import Compat, DecodeConfig, ServeOptions
from engines.dllm.method import BLOCKS, Method, Options, Sampler
from engines.dllm.scheduling.phase import DelayedCache
from engines.errors import require


class DllmServe(Method):
    name = "dllm-serve"
    title = "dLLM-Serve"
    summary = "continuous batching by phase, logit decomposition, head-centric sparse KV cache"
    heeds = dict.fromkeys(("llada", "dream"), BLOCKS | {"threshold", "factor"})
    own = ServeOptions

    def _sampler(self, family: str, own: ServeOptions, options: Options) -> Sampler:
        sparsity = own.sparsity
        require(
            own.compat == "paper" or sparsity.refresh_delay > 0,
            "compat='upstream' has no effect with refresh_delay=0, which has no uncached step: leave it out",
        )
        return Sampler(
            rule=DelayedCache(delay=sparsity.refresh_delay),
            sparsity=sparsity,
            decode=serve_decode(family, own.compat, sparsity.refresh_delay),
            exact_steps=False,
            suppress_mask_token=True,
            tie_policy="stable",
        )


def serve_decode(family: str, compat: Compat, refresh_delay: int) -> DecodeConfig:
    """dLLM-Serve's ranking. Dream shifts its logits inside the rows a step computes, so a block's first
    position is right only in a full forward and is always committed there; upstream does so on LLaDA
    too (its first, uncached step), which ``compat`` upstream reproduces."""
    always = family == "dream" or (compat == "upstream" and refresh_delay > 0)
    return DecodeConfig(first_step="first_and_ranked" if always else "ranked")


DLLM_SERVE = DllmServe()
