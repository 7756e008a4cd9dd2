"""The options that methods have of their own, light, for those of the command line are read off them."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from engines.dllm.config import Retention, ServeOptions
from engines.knobs import Only

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


OPTIONS = (ServeOptions, FastDllmOptions, DllmCacheOptions, SparseOptions)
"""Options of all methods that have any, the plain samplers' among them."""
