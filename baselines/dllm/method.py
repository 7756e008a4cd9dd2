"""Every published sampler as a point in one space: a refresh rule, a selection and a decode rule.

The phase machine, the schedulers and the executors are shared; methods differ in these alone
(dLLM-Cache also in its executor, because what it caches are features of every layer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from engines.dllm.config import Confidence, DecodeConfig, FirstStep, GenerationConfig, SparsityConfig, TiePolicy
from engines.dllm.scheduling.phase import DelayedCache, NoCache, RefreshRule
from engines.errors import UserError, require

DREAM_ALGORITHMS = ("origin", "maskgit_plus", "topk_margin", "entropy")
FAST_CACHES = ("none", "prefix", "dual")
FAST_THRESHOLD = 0.9
"""Fast-dLLM's published threshold on Dream, where its algorithm is named without one."""
DENSE = SparsityConfig(selection="dense")


@dataclass(frozen=True, kw_only=True)
class Method:
    rule: RefreshRule
    sparsity: SparsityConfig = DENSE
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    exact_steps: bool = True
    """Whether every step of a block runs even when nothing is left to commit, as published."""
    suppress_mask_token: bool = False
    tie_policy: TiePolicy = "parity"
    """Default of comparisons: the library's own order of ties, as the published samplers get."""
    counts_empty_forward: bool = False
    """Published code spends one more forward on a block that its first forward completed; ours does
    not, and reports the published count."""
    features: FeatureCacheConfig | None = None
    """dLLM-Cache's intervals and share; None of every other system."""

    def reduction_bytes_per_value(self, dtype_bytes: int) -> int:
        """Bytes alive per logit while logits are reduced to (token, confidence), beside the logits themselves:
        a softmax in their own dtype, or a float64 copy and its softmax; Dream's other confidences also
        hold its logarithm and their product."""
        if self.decode.confidence_dtype == "float64":
            return 16
        return dtype_bytes if self.decode.confidence == "max_prob" else 3 * dtype_bytes


_BLOCKS = frozenset({"block_length"})
_SPARSE = _BLOCKS | {"retention_ratio", "pool_kernel"}
_SERVE = _SPARSE | {"selection", "refresh_delay", "threshold", "factor"}
_CACHE = frozenset({"prompt_interval", "gen_interval", "transfer_ratio"})
_GUIDED_CACHE = _CACHE | _BLOCKS | {"cfg_scale", "cfg_interval"}
_RANKING = frozenset({"alg", "alg_temp"})

OPTIONS: Mapping[str, Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "llada": {"llada": _BLOCKS | {"remasking", "cfg_scale"}},
        "dream": {"dream": _RANKING},
        "fast-dllm": {
            "llada": _BLOCKS | {"cache", "threshold", "factor"},
            "dream": _BLOCKS | _RANKING | {"cache", "threshold"},
        },
        "dllm-cache": {"llada": _GUIDED_CACHE, "dream": _CACHE | _RANKING},
        "sparse-dllm": {"llada": _SPARSE, "dream": _SPARSE | _RANKING},
        "dllm-serve": {"llada": _SERVE | {"compat"}, "dream": _SERVE},
    }
)
"""System -> model family -> the options with an effect there; any other is refused.

Length, steps, temperature, top_p, top_k and seed are every system's."""


def check_options(system: str, family: str, options: Mapping[str, Any]) -> None:
    families = OPTIONS.get(system)
    if families is None:
        raise UserError(f"system={system!r} is unknown: use one of {', '.join(OPTIONS)}")
    if family not in families:
        raise UserError(
            f"system={system!r} has no method for a {family} model: use a {' or '.join(families)} checkpoint"
        )
    for name, value in options.items():
        require(
            name in families[family],
            f"{name}={value!r} has no effect with system={system!r} on a {family} model: leave it out",
        )


def method(system: str, family: str, options: Mapping[str, Any]) -> Method:
    """The method behind ``system`` on a model family; ``options`` holds only what was asked for."""
    check_options(system, family, options)
    if system == "llada":
        return Method(rule=NoCache())
    if system == "dream":
        return Method(rule=NoCache(), decode=_dream_decode("origin", options))
    if system == "fast-dllm":
        return _fast_dllm(family, options)
    if system == "sparse-dllm":
        return _sparse_dllm(family, options)
    if system == "dllm-cache":
        return _dllm_cache(family, options)
    return _dllm_serve(family, options)


def _dllm_cache(family: str, options: Mapping[str, Any]) -> Method:
    names = ("prompt_interval", "gen_interval", "transfer_ratio", "cfg_interval")
    require(
        "cfg_interval" not in options or options.get("cfg_scale", 0) > 0,
        f"cfg_interval={options.get('cfg_interval')!r} has no effect without guidance: add cfg_scale or leave it out",
    )
    return Method(
        rule=NoCache(),
        decode=DecodeConfig() if family == "llada" else _dream_decode("origin", options),
        features=FeatureCacheConfig(**{name: options[name] for name in names if name in options}),
    )


def _fast_dllm(family: str, options: Mapping[str, Any]) -> Method:
    cache = options.get("cache", "dual")
    require(cache in FAST_CACHES, f"cache={cache!r} is unknown: use one of {', '.join(FAST_CACHES)}")
    rule: RefreshRule = NoCache()
    if cache != "none":
        rule = DelayedCache(delay=0, window="suffix" if cache == "prefix" else "block")
    if family == "llada":
        decode = DecodeConfig(confidence_dtype="float64")
        return Method(rule=rule, decode=decode, exact_steps=False, counts_empty_forward=cache != "none")
    alg = options.get("alg", "confidence_threshold" if "threshold" in options else "entropy")
    if cache == "none":
        require(
            "threshold" not in options,
            f"threshold={options.get('threshold')!r} has no effect with cache='none' on a dream model: use prefix or dual",
        )
        require(
            "block_length" not in options,
            f"block_length={options.get('block_length')!r} has no effect with cache='none' on a dream model, whose loop "
            f"has no blocks: leave it out",
        )
        return Method(rule=rule, decode=_dream_decode(alg, options))
    allowed = (*DREAM_ALGORITHMS[1:], "confidence_threshold")
    require(alg in allowed, f"alg={alg!r} is unknown with cache={cache!r}: use one of {', '.join(allowed)}")
    if alg == "confidence_threshold":
        decode = DecodeConfig(confidence_of="sampler", first_step="first_position")
    else:
        require(
            "threshold" not in options,
            f"threshold={options.get('threshold')!r} has no effect with alg={alg!r}: use alg confidence_threshold",
        )
        # Upstream's cached loop ranks by negative entropy whatever the algorithm is called.
        decode = _timestep("entropy", first_step="first_position")
    return Method(rule=rule, decode=decode, exact_steps=False)


def _sparse_dllm(family: str, options: Mapping[str, Any]) -> Method:
    chosen = {name: options[name] for name in ("retention_ratio", "pool_kernel") if name in options}
    sparsity = SparsityConfig(selection="uniform", min_kept=0, **chosen)
    decode = DecodeConfig()
    if family == "dream":
        alg = options.get("alg", "entropy")
        require(
            alg in DREAM_ALGORITHMS[1:],
            f"alg={alg!r} is unknown with sparse-dllm: use one of {', '.join(DREAM_ALGORITHMS[1:])}",
        )
        decode = _timestep(alg, first_step="first_position")
    return Method(rule=DelayedCache(delay=1), sparsity=sparsity, decode=decode)


def _dllm_serve(family: str, options: Mapping[str, Any]) -> Method:
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
    names = ("retention_ratio", "pool_kernel", "selection", "refresh_delay")
    sparsity = SparsityConfig(**{name: options[name] for name in names if name in options})
    return Method(
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


def _dream_decode(default: str, options: Mapping[str, Any]) -> DecodeConfig:
    alg = options.get("alg", default)
    require(alg in DREAM_ALGORITHMS, f"alg={alg!r} is unknown: use one of {', '.join(DREAM_ALGORITHMS)}")
    if alg == "origin":
        require(
            "alg_temp" not in options,
            f"alg_temp={options.get('alg_temp')!r} has no effect with alg='origin', which ranks nothing: use one of "
            f"{', '.join(DREAM_ALGORITHMS[1:])}",
        )
        return DecodeConfig(quota="origin", confidence_of="sampler")
    return _timestep(alg)


def _timestep(alg: str, first_step: FirstStep = "ranked") -> DecodeConfig:
    """Dream's schedule and ranking. Its confidences are read after temperature, top_p and top_k."""
    ranks: dict[str, Confidence] = {"entropy": "neg_entropy", "topk_margin": "margin"}
    return DecodeConfig(
        quota="timestep", confidence=ranks.get(alg, "max_prob"), confidence_of="sampler", first_step=first_step
    )


def has_blocks(system: str, family: str, options: Mapping[str, Any]) -> bool:
    """Dream's own loop denoises the whole answer at once; dLLM-Cache and Fast-dLLM without a cache run it."""
    is_dreams = system in ("dream", "dllm-cache") or (system == "fast-dllm" and options.get("cache") == "none")
    return family != "dream" or not is_dreams


def generation_of(
    system: str, family: str, options: Mapping[str, Any], generation: GenerationConfig
) -> GenerationConfig:
    """What a system makes of the settings of a generation, checked; ``options`` are those ``method`` took."""
    if not has_blocks(system, family, options):
        require(
            not generation.stop_at_eos,
            f"stop_at_eos=True has no effect with system={system!r} here, whose loop has no blocks to stop after: leave it out",
        )
        generation = replace(generation, block_length=generation.gen_length)
    if options.get("alg") == "confidence_threshold" and generation.threshold is None:
        generation = replace(generation, threshold=FAST_THRESHOLD)
    check_generation(system, family, generation)
    return generation


def check_ties(generation: GenerationConfig, tie_policy: str | None) -> None:
    require(
        not (generation.is_parallel and tie_policy == "parity"),
        "tie_policy='parity' has no effect with parallel decoding, which commits by level: leave it out",
    )


def check_generation(system: str, family: str, generation: GenerationConfig) -> None:
    """What the published samplers assert, in words: whole blocks and whole steps per block."""
    require(
        not generation.stop_at_eos or generation.num_blocks > 1,
        f"stop_at_eos=True has no effect on a single block of gen_length={generation.gen_length}, where nothing follows: "
        f"leave it out or use a smaller block_length",
    )
    if system == "dllm-serve":
        return
    length, block = generation.gen_length, generation.block_length
    if system == "sparse-dllm" and family == "dream":
        require(
            block == 32,
            f"block_length={block} must be 32 for sparse-dllm on a dream model: its published code fixes it",
        )
    if length % block:
        raise UserError(
            f"gen_length={length} is not a multiple of block_length={block}, which system={system!r} needs: change one of them"
        )
    num_blocks = length // block
    require(
        not (system == "sparse-dllm" and family == "dream" and generation.steps == num_blocks),
        f"steps={generation.steps} leaves a block one step, in which sparse-dllm on a dream model commits its first token "
        f"alone: use at least {2 * num_blocks}",
    )
    if generation.steps % num_blocks:
        raise UserError(
            f"steps={generation.steps} is not a multiple of the {num_blocks} blocks, which system={system!r} needs: change steps or block_length"
        )
