"""The plain Dream sampler, and Dream's way to rank tokens, which every method follows on a Dream model."""

from __future__ import annotations

from baselines.dllm.published import PublishedMethod
from engines.dllm.config import Confidence, DecodeConfig, FirstStep
from engines.dllm.method import Options, Sampler
from engines.dllm.scheduling.phase import NoCache
from engines.errors import require

ALGORITHMS = ("origin", "maskgit_plus", "topk_margin", "entropy")
RANKING = frozenset({"alg", "alg_temp"})


class Dream(PublishedMethod):
    name = "dream"
    title = "Dream"
    summary = "the plain Dream sampler: no cache, no blocks"
    options = {"dream": RANKING}
    batches_upstream = False  # called with one prompt

    def _sampler(self, family: str, options: Options) -> Sampler:
        return Sampler(rule=NoCache(), decode=dream_decode("origin", options))

    def has_blocks(self, family: str, options: Options) -> bool:
        return False


def dream_decode(default: str, options: Options) -> DecodeConfig:
    alg = options.get("alg", default)
    require(alg in ALGORITHMS, f"alg={alg!r} is unknown: use one of {', '.join(ALGORITHMS)}")
    if alg == "origin":
        require(
            "alg_temp" not in options,
            f"alg_temp={options.get('alg_temp')!r} has no effect with alg='origin', which ranks nothing: use one of "
            f"{', '.join(ALGORITHMS[1:])}",
        )
        return DecodeConfig(quota="origin", confidence_of="sampler")
    return timestep_decode(alg)


def timestep_decode(alg: str, first_step: FirstStep = "ranked") -> DecodeConfig:
    """Dream's schedule and ranking. Its confidences are read after temperature, top_p and top_k."""
    ranks: dict[str, Confidence] = {"entropy": "neg_entropy", "topk_margin": "margin"}
    return DecodeConfig(
        quota="timestep", confidence=ranks.get(alg, "max_prob"), confidence_of="sampler", first_step=first_step
    )


DREAM = Dream()
