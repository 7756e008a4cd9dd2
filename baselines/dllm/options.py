"""The methods' own options. The module is light, as the command line reads its options from here."""

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
    """Dream: how to choose the masks to commit: at random (origin), or by a ranking: maskgit_plus, topk_margin or entropy."""


@dataclass(frozen=True, kw_only=True)
class FastDllmOptions:
    cache: Literal["none", "prefix", "dual"] = "dual"
    """Fast-dLLM: KV cache, none, prefix or dual."""
    alg: Annotated[Literal[Algorithm, "confidence_threshold"], DREAM_ALONE] | None = None
    """Dream: origin, maskgit_plus, topk_margin, entropy, or confidence_threshold, the default with a threshold."""


@dataclass(frozen=True, kw_only=True)
class SparseOptions(Retention):
    alg: Annotated[Ranking, DREAM_ALONE] = "entropy"
    """Dream: how to rank masks: maskgit_plus, topk_margin or entropy."""


@dataclass(frozen=True, kw_only=True)
class DllmCacheOptions(DreamOptions):
    features: FeatureCacheConfig = field(default_factory=FeatureCacheConfig)


Rows = Annotated[int, Range(0, 2**17)]


@dataclass(frozen=True, kw_only=True)
class RefreshOptions:
    refresh_interval: Annotated[int, Range(1, 2**17)] | None = None
    """Steps between two that compute every row; by default 8 for dKV-Cache (Dream 4, greedy 2) and 32 for Window-Diffusion."""


@dataclass(frozen=True, kw_only=True)
class DkvOptions(RefreshOptions):
    variant: Literal["decode", "greedy", "prefill", "pd"] = "decode"
    """dKV-Cache: decode; on LLaDA also greedy, in an order drawn beforehand; on Dream also prefill, and pd, which does both."""
    greedy_window: Annotated[Rows, Needs(variant="greedy")] = 4
    """dKV-Cache greedy: how many masks near each token that is due are computed too."""
    commit_order: Annotated[str, Needs(variant="greedy")] | None = None
    """dKV-Cache greedy: places of the answer in the order to commit them, like 2,0,1; drawn by default."""
    shift: Annotated[Literal["un", "un_right"], DREAM_ALONE] = "un"
    """dKV-Cache on Dream: a row settles when the token it predicts is known (un), or also its own (un_right)."""
    alg: Annotated[Ranking, DREAM_ALONE] = "maskgit_plus"
    """Dream: how to rank masks: maskgit_plus, topk_margin or entropy."""


@dataclass(frozen=True, kw_only=True)
class D2CacheOptions:
    tokens_per_step: Annotated[int, Range(1, 2**17)] = 1
    """d2Cache: tokens that a step commits; more if more reach the threshold."""
    commit_block: Annotated[int, Range(1, 2**17)] | None = None
    """d2Cache: length in tokens of the blocks it commits in; by default the whole answer."""
    decoding_sigma: Annotated[float, Range(0, 1e4)] = 10.0
    """d2Cache: width of the density of known tokens that ranks commits; 0 ranks by confidence alone."""
    current_k: Annotated[int, Range(1, 2**17)] = 32
    """d2Cache: how many masks each step computes."""
    cache_sigma: Annotated[float, Range(above=0, most=1e4)] = 10.0
    """d2Cache: width of the density that ranks the masks to compute."""
    rollout_p: Annotated[float, Range(0, 1)] = 0.1
    """d2Cache: share of the other rows' importance, by attention rollout, that each step computes too."""
    inflate_w: Rows = 0
    """d2Cache: if two computed rows are at most this far apart, all rows between them are computed; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class DPadOptions:
    cache: Literal["none", "prefix", "dual"] = "dual"
    """Fast-dLLM: KV cache, none, prefix or dual."""
    cut: Cut = field(default_factory=lambda: Cut(suffix="gaussian"))


@dataclass(frozen=True, kw_only=True)
class StreamingOptions:
    streaming_window: Annotated[int, Range(1, 2**17)] = 96
    """Streaming-dLLM: masks kept behind a block, besides the last one."""
    relax: Annotated[float, Range(0, 1)] = 0.0
    """Streaming-dLLM: how far the threshold falls, times the share of known tokens among a step's rows."""


@dataclass(frozen=True, kw_only=True)
class WindowOptions(RefreshOptions):
    window_width: Annotated[int, Range(1, 2**17)] = 64
    """Window-Diffusion: how many masks a period's keys include."""
    active: Annotated[int, Range(1, 2**17)] = 16
    """Window-Diffusion: how many masks a step between two Refreshes computes."""


OPTIONS = (ServeOptions, FastDllmOptions, DllmCacheOptions, SparseOptions)
"""Options of the command line, including the plain samplers'. Users set those of other methods by ``--knob``."""
