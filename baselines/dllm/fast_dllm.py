"""Fast-dLLM: a prefix or dual KV cache, one Refresh per block, parallel decoding by confidence."""

from dataclasses import replace

from baselines.dllm.dream import dream_decode, timestep_decode
from baselines.dllm.options import RANKINGS, FastDllmOptions
from baselines.dllm.published import PublishedMethod
from engines.dllm.config import DecodeConfig, DelayedCache, GenerationConfig, NoCache, RefreshRule
from engines.dllm.method import BLOCKS, LEAP, PARALLEL, Options, Sampler
from engines.errors import require

THRESHOLD = 0.9
"""Published threshold on Dream, used if its algorithm is named without one."""


class FastDllm(PublishedMethod):
    name = "fast-dllm"
    title = "Fast-dLLM"
    heeds = {"llada": BLOCKS | PARALLEL | LEAP, "dream": BLOCKS | {"threshold", "alg_temp"}}
    own = FastDllmOptions
    batches_upstream = True

    def _sampler(self, family: str, own: FastDllmOptions, options: Options) -> Sampler:
        cache = own.cache
        rule: RefreshRule = NoCache()
        if cache != "none":
            rule = DelayedCache(delay=0, window="suffix" if cache == "prefix" else "block")
        if family == "llada":
            decode = DecodeConfig(confidence_dtype="float64")
            return Sampler(rule=rule, decode=decode, exact_steps=False, counts_empty_forward=cache != "none")
        if cache == "none":
            return Sampler(rule=rule, decode=_uncached_dream(own.alg or "entropy", options))
        alg = own.alg or ("confidence_threshold" if "threshold" in options else "entropy")
        return Sampler(rule=rule, decode=_cached_dream(cache, alg, options), exact_steps=False)

    def has_blocks(self, family: str, options: Options) -> bool:
        """Without a cache, Fast-dLLM runs Dream's own loop, which has no blocks."""
        return family != "dream" or options.get("cache") != "none"

    def _run_as(self, family: str, options: Options, generation: GenerationConfig) -> GenerationConfig:
        if options.get("alg") == "confidence_threshold" and generation.threshold is None:
            generation = replace(generation, threshold=THRESHOLD)
        return super()._run_as(family, options, generation)


def _uncached_dream(alg: str, options: Options) -> DecodeConfig:
    require(
        "threshold" not in options,
        f"threshold={options.get('threshold')!r} has no effect with cache='none' on a dream model: use prefix or dual",
    )
    require(
        "block_length" not in options,
        f"block_length={options.get('block_length')!r} has no effect with cache='none' on a dream model, whose loop "
        f"has no blocks: leave it out",
    )
    require(
        alg != "confidence_threshold",
        f"alg={alg!r} is unknown with cache='none': use one of origin, {', '.join(RANKINGS)}",
    )
    return dream_decode(alg, options)  # type: ignore[arg-type]


def _cached_dream(cache: str, alg: str, options: Options) -> DecodeConfig:
    allowed = (*RANKINGS, "confidence_threshold")
    require(alg in allowed, f"alg={alg!r} is unknown with cache={cache!r}: use one of {', '.join(allowed)}")
    if alg == "confidence_threshold":
        return DecodeConfig(confidence_of="sampler", first_step="first_position")
    require(
        "threshold" not in options,
        f"threshold={options.get('threshold')!r} has no effect with alg={alg!r}: use alg confidence_threshold",
    )
    # The published cached loop ranks by negative entropy, whichever algorithm is named.
    return timestep_decode("entropy", first_step="first_position")


FAST_DLLM = FastDllm()
