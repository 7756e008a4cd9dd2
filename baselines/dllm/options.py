"""The options that methods have of their own, light, for those of the command line are read off them."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from engines.dllm.config import Cut, Retention, ServeOptions
from engines.knobs import Needs, Only, Range

Ranking = Literal["maskgit_plus", "topk_margin", "entropy"]
RANKINGS: tuple[Ranking, ...] = get_args(Ranking)
Algorithm = Literal["origin", Ranking]
DREAM_ALONE = Only(family="dream")


@dataclass(frozen=True, kw_only=True)
class DreamOptions:
    alg: Annotated[Algorithm, DREAM_ALONE] = "origin"
    """Dream: which masks are committed, by chance (origin) or by a ranking: maskgit_plus, topk_margin or entropy."""


@dataclass(frozen=True, kw_only=True)
class FastDllmOptions:
    cache: Literal["none", "prefix", "dual"] = "dual"
    """Fast-dLLM: none, prefix or dual."""
    alg: Annotated[Literal[Algorithm, "confidence_threshold"], DREAM_ALONE] | None = None
    """Dream: origin, maskgit_plus, topk_margin, entropy, or confidence_threshold, the default beside a threshold."""


@dataclass(frozen=True, kw_only=True)
class SparseOptions(Retention):
    alg: Annotated[Ranking, DREAM_ALONE] = "entropy"
    """Dream: how masks are ranked: maskgit_plus, topk_margin or entropy."""


@dataclass(frozen=True, kw_only=True)
class DllmCacheOptions(DreamOptions):
    features: FeatureCacheConfig = field(default_factory=FeatureCacheConfig)


Rows = Annotated[int, Range(0, 2**17)]


@dataclass(frozen=True, kw_only=True)
class RefreshOptions:
    refresh_interval: Annotated[int, Range(1, 2**17)] | None = None
    """Steps from one that computes every row to the next; by default dKV-Cache's 8 (Dream 4, greedy 2) and Window-Diffusion's 32."""


@dataclass(frozen=True, kw_only=True)
class DkvOptions(RefreshOptions):
    variant: Literal["decode", "greedy", "prefill", "pd"] = "decode"
    """dKV-Cache: decode; on LLaDA also greedy, in an order drawn beforehand; on Dream also prefill, and pd, which is both."""
    greedy_window: Annotated[Rows, Needs(variant="greedy")] = 4
    """dKV-Cache greedy: masks near each token that is due, computed too."""
    commit_order: Annotated[str, Needs(variant="greedy")] | None = None
    """dKV-Cache greedy: places of the answer in the order of their commits, as 2,0,1; drawn by default."""
    shift: Annotated[Literal["un", "un_right"], DREAM_ALONE] = "un"
    """dKV-Cache on Dream: a row is settled when the token it predicts is known (un), or its own too (un_right)."""
    alg: Annotated[Ranking, DREAM_ALONE] = "maskgit_plus"
    """Dream: how masks are ranked: maskgit_plus, topk_margin or entropy."""


@dataclass(frozen=True, kw_only=True)
class D2CacheOptions:
    tokens_per_step: Annotated[int, Range(1, 2**17)] = 1
    """d2Cache: tokens that a step commits, or more that reach the threshold."""
    commit_block: Annotated[int, Range(1, 2**17)] | None = None
    """d2Cache: tokens of the blocks in which it commits; the whole answer by default."""
    decoding_sigma: Annotated[float, Range(0, 1e4)] = 10.0
    """d2Cache: width of the density of known tokens by which commits are ranked; 0 ranks by confidence alone."""
    current_k: Annotated[int, Range(1, 2**17)] = 32
    """d2Cache: masks that each step computes."""
    cache_sigma: Annotated[float, Range(above=0, most=1e4)] = 10.0
    """d2Cache: width of the density by which these are ranked."""
    rollout_p: Annotated[float, Range(0, 1)] = 0.1
    """d2Cache: share of the importance of other rows, by attention rollout, that is computed too."""
    inflate_w: Rows = 0
    """d2Cache: rows so near each other in order that all between them are computed; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class DPadOptions:
    cache: Literal["none", "prefix", "dual"] = "dual"
    """Fast-dLLM: none, prefix or dual."""
    cut: Cut = field(default_factory=lambda: Cut(suffix="gaussian"))


@dataclass(frozen=True, kw_only=True)
class StreamingOptions:
    streaming_window: Annotated[int, Range(1, 2**17)] = 96
    """Streaming-dLLM: masks kept behind a block, beside the last."""
    relax: Annotated[float, Range(0, 1)] = 0.0
    """Streaming-dLLM: how far the threshold falls, times the share of known tokens among a step's rows."""


@dataclass(frozen=True, kw_only=True)
class WindowOptions(RefreshOptions):
    window_width: Annotated[int, Range(1, 2**17)] = 64
    """Window-Diffusion: masks among the keys of a period."""
    active: Annotated[int, Range(1, 2**17)] = 16
    """Window-Diffusion: masks that a step between Refreshes computes."""


OPTIONS = (ServeOptions, FastDllmOptions, DllmCacheOptions, SparseOptions)
"""Those of a command line, the plain samplers' among them; the other methods' are given by ``--knob``."""
