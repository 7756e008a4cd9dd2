"""dLLM-Serve: the paper's own method (§4.5), for continuous batching alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engines.dllm.config import DecodeConfig, GenerationConfig, ServeOptions
from engines.dllm.method import BLOCKS, Method, Options, Sampler
from engines.dllm.scheduling.phase import DelayedCache
from engines.errors import require

_EXACT: Options = {"selection": "dense", "refresh_delay": 0}
_BALANCED: Options = {**_EXACT, "settle_after": 1, "renew_at": 2, "full_every": 4}
PRESETS: Mapping[str, Options] = {"exact": _EXACT, "balanced": _BALANCED, "fast": {**_BALANCED, "full_every": 8}}
FAST_THRESHOLD = 0.9


class DllmServe(Method):
    name = "dllm-serve"
    title = "dLLM-Serve"
    heeds = dict.fromkeys(("llada", "dream"), BLOCKS | {"threshold", "factor"})
    own = ServeOptions

    def sampler(self, family: str, options: Options) -> Sampler:
        preset = dict(PRESETS.get(str(options.get("preset")), {}))
        if "refresh_rule" in options:
            preset.pop("refresh_delay", None)
        return super().sampler(family, {**preset, **options})

    def _run_as(self, family: str, options: Options, generation: GenerationConfig) -> GenerationConfig:
        if options.get("preset") == "fast" and not generation.is_parallel:
            return replace(generation, threshold=FAST_THRESHOLD)
        return generation

    def _sampler(self, family: str, own: ServeOptions, options: Options) -> Sampler:
        sparsity = own.sparsity
        settling = own.settling
        require(
            settling.full_every == 1 or sparsity.refresh_delay == 0 or own.refresh_rule is not None,
            f"full_every={settling.full_every} needs blocks that begin with the cache's Refresh, and refresh_delay=1 computes them in full "
            f"before it: add refresh_delay=0",
        )
        # Dream shifts its logits inside the rows a step computes, so a block's first position is right only in a full forward and
        # is always committed there; upstream does so on LLaDA too, in its first, uncached step.
        always = family == "dream" or own.compat == "upstream"
        return Sampler(
            rule=DelayedCache(delay=sparsity.refresh_delay),
            sparsity=sparsity,
            settling=settling,
            decode=DecodeConfig(first_step="first_and_ranked" if always else "ranked"),
            exact_steps=False,
            suppress_mask_token=True,
            tie_policy="stable",
        )


DLLM_SERVE = DllmServe()
