"""dLLM-Serve: the paper's own method (§4.5), for continuous batching alone."""

from __future__ import annotations

from engines.dllm.config import DecodeConfig, SparsityConfig
from engines.dllm.method import SPARSE, Method, Options, Sampler
from engines.dllm.scheduling.phase import DelayedCache
from engines.errors import require

_SPARSITY = ("retention_ratio", "pool_kernel", "selection", "refresh_delay")
_OPTIONS = SPARSE | {"selection", "refresh_delay", "threshold", "factor"}


class DllmServe(Method):
    name = "dllm-serve"
    title = "dLLM-Serve"
    summary = "continuous batching by phase, logit decomposition, head-centric sparse KV cache"
    options = {"llada": _OPTIONS | {"compat"}, "dream": _OPTIONS}

    def _sampler(self, family: str, options: Options) -> Sampler:
        if options.get("selection") == "dense":
            for name in ("retention_ratio", "pool_kernel"):
                require(
                    name not in options,
                    f"{name}={options.get(name)!r} has no effect with selection='dense', which keeps every row: leave it out",
                )
        require(
            not (options.get("compat") == "upstream" and options.get("refresh_delay") == 0),
            "compat='upstream' has no effect with refresh_delay=0, which has no uncached step: leave it out",
        )
        sparsity = SparsityConfig(**{name: options[name] for name in _SPARSITY if name in options})
        return Sampler(
            rule=DelayedCache(delay=sparsity.refresh_delay),
            sparsity=sparsity,
            decode=serve_decode(family, options.get("compat", "paper"), sparsity.refresh_delay),
            exact_steps=False,
            suppress_mask_token=True,
            tie_policy="stable",
        )


def serve_decode(family: str, compat: str, refresh_delay: int) -> DecodeConfig:
    """dLLM-Serve's ranking. Dream shifts its logits inside the rows a step computes, so a block's first
    position is right only in a full forward and is always committed there; upstream does so on LLaDA
    too (its first, uncached step), which ``compat`` upstream reproduces."""
    require(compat in ("paper", "upstream"), f"compat={compat!r} is unknown: use one of paper, upstream")
    always = family == "dream" or (compat == "upstream" and refresh_delay > 0)
    return DecodeConfig(first_step="first_and_ranked" if always else "ranked")


DLLM_SERVE = DllmServe()
