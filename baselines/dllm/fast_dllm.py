"""Fast-dLLM: prefix or dual KV cache, one Refresh a block, parallel decoding by confidence."""

from __future__ import annotations

from dataclasses import replace

from baselines.dllm.dream import ALGORITHMS, RANKING, dream_decode, timestep_decode
from baselines.dllm.published import PublishedMethod
from engines.dllm.config import DecodeConfig, GenerationConfig
from engines.dllm.method import BLOCKS, Options, Sampler
from engines.dllm.scheduling.phase import DelayedCache, NoCache, RefreshRule
from engines.errors import require

CACHES = ("none", "prefix", "dual")
THRESHOLD = 0.9
"""Its published threshold on Dream, where its algorithm is named without one."""


class FastDllm(PublishedMethod):
    name = "fast-dllm"
    title = "Fast-dLLM"
    summary = "prefix or dual cache, one Refresh per block, parallel decoding"
    options = {"llada": BLOCKS | {"cache", "threshold", "factor"}, "dream": BLOCKS | RANKING | {"cache", "threshold"}}
    batches_upstream = True

    def _sampler(self, family: str, options: Options) -> Sampler:
        cache = options.get("cache", "dual")
        require(cache in CACHES, f"cache={cache!r} is unknown: use one of {', '.join(CACHES)}")
        rule: RefreshRule = NoCache()
        if cache != "none":
            rule = DelayedCache(delay=0, window="suffix" if cache == "prefix" else "block")
        if family == "llada":
            decode = DecodeConfig(confidence_dtype="float64")
            return Sampler(rule=rule, decode=decode, exact_steps=False, counts_empty_forward=cache != "none")
        if cache == "none":
            return Sampler(rule=rule, decode=_uncached_dream(options))
        return Sampler(rule=rule, decode=_cached_dream(cache, options), exact_steps=False)

    def has_blocks(self, family: str, options: Options) -> bool:
        """Without a cache it runs Dream's own loop."""
        return family != "dream" or options.get("cache") != "none"

    def _with_defaults(self, options: Options, generation: GenerationConfig) -> GenerationConfig:
        if options.get("alg") == "confidence_threshold" and generation.threshold is None:
            return replace(generation, threshold=THRESHOLD)
        return generation


def _algorithm(options: Options) -> str:
    return str(options.get("alg", "confidence_threshold" if "threshold" in options else "entropy"))


def _uncached_dream(options: Options) -> DecodeConfig:
    require(
        "threshold" not in options,
        f"threshold={options.get('threshold')!r} has no effect with cache='none' on a dream model: use prefix or dual",
    )
    require(
        "block_length" not in options,
        f"block_length={options.get('block_length')!r} has no effect with cache='none' on a dream model, whose loop "
        f"has no blocks: leave it out",
    )
    return dream_decode(_algorithm(options), options)


def _cached_dream(cache: str, options: Options) -> DecodeConfig:
    alg, allowed = _algorithm(options), (*ALGORITHMS[1:], "confidence_threshold")
    require(alg in allowed, f"alg={alg!r} is unknown with cache={cache!r}: use one of {', '.join(allowed)}")
    if alg == "confidence_threshold":
        return DecodeConfig(confidence_of="sampler", first_step="first_position")
    require(
        "threshold" not in options,
        f"threshold={options.get('threshold')!r} has no effect with alg={alg!r}: use alg confidence_threshold",
    )
    # Upstream's cached loop ranks by negative entropy whatever the algorithm is called.
    return timestep_decode("entropy", first_step="first_position")


FAST_DLLM = FastDllm()
