"""The plain Dream sampler, and Dream's ranking of tokens, which every method follows on a Dream model."""

from baselines.dllm.options import RANKINGS, Algorithm, DreamOptions, Ranking
from baselines.dllm.published import PublishedMethod
from engines.dllm.config import Confidence, DecodeConfig, FirstStep, NoCache
from engines.dllm.method import Options, Sampler
from engines.errors import require


class Dream(PublishedMethod):
    name = "dream"
    title = "Dream"
    heeds = {"dream": frozenset({"alg_temp"})}
    own = DreamOptions
    batches_upstream = False  # published code is called with one prompt

    def _sampler(self, family: str, own: DreamOptions, options: Options) -> Sampler:
        return Sampler(rule=NoCache(), decode=dream_decode(own.alg, options))

    def has_blocks(self, family: str, options: Options) -> bool:
        return False


def dream_decode(alg: Algorithm, options: Options) -> DecodeConfig:
    if alg == "origin":
        require(
            "alg_temp" not in options,
            f"alg_temp={options.get('alg_temp')!r} has no effect with alg='origin', which ranks nothing: use one of "
            f"{', '.join(RANKINGS)}",
        )
        return DecodeConfig(quota="origin", confidence_of="sampler")
    return timestep_decode(alg)


def timestep_decode(alg: Ranking, first_step: FirstStep = "ranked") -> DecodeConfig:
    """Return Dream's schedule and ranking. Confidences are taken after temperature, top_p and top_k."""
    ranks: dict[str, Confidence] = {"entropy": "neg_entropy", "topk_margin": "margin"}
    return DecodeConfig(
        quota="timestep", confidence=ranks.get(alg, "max_prob"), confidence_of="sampler", first_step=first_step
    )


DREAM = Dream()
