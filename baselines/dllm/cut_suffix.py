"""Two published rules that cut most of the masks behind a block: DPad and Streaming-dLLM. Both decode like Fast-dLLM.

Masks that are cut do not exist for the block. The engine cuts them with any cache (``engines.dllm.config.Cut``).
"""

from dataclasses import replace
from typing import Any

from baselines.dllm.options import DPadOptions, StreamingOptions
from engines.dllm.config import Cut, DecodeConfig, DelayedCache, GenerationConfig, NoCache, RefreshRule
from engines.dllm.method import BLOCKS, LEAP, PARALLEL, SERVED, Method, Options, Sampler
from engines.errors import require


class DPad(Method):
    """Suffix dropout (arXiv:2508.14148) with Fast-dLLM's rules. We draw its places from the request's seed, while the published code
    draws them from whatever ran before. ``stop_at_eos`` is its early termination."""

    name = "dpad"
    title = "DPad"
    heeds = {"llada": BLOCKS | PARALLEL | LEAP}
    own = DPadOptions

    def _sampler(self, family: str, own: DPadOptions, options: Options) -> Sampler:
        rule: RefreshRule = NoCache()
        if own.cache != "none":
            rule = DelayedCache(delay=0, window="suffix" if own.cache == "prefix" else "block")
        return _fast_dllm_sampler(rule, own.cut)


class Streaming(Method):
    """Streaming-dLLM (arXiv:2601.17917): a prefix cache, the nearest masks and the last one, and a threshold that falls as more of a
    step's rows are known. Published code always stops at an end of text: ``stop_at_eos``."""

    name = "streaming-dllm"
    title = "Streaming-dLLM"
    heeds = {"llada": BLOCKS | PARALLEL | LEAP}
    own = StreamingOptions

    def _sampler(self, family: str, own: StreamingOptions, options: Options) -> Sampler:
        sampler = _fast_dllm_sampler(
            DelayedCache(delay=0, window="suffix"), Cut(suffix="ends", suffix_window=own.streaming_window)
        )
        return replace(sampler, decode=replace(sampler.decode, relax=own.relax))

    def _run_as(self, family: str, options: Options, generation: GenerationConfig) -> GenerationConfig:
        relax: Any = options.get("relax")
        require(
            not relax or generation.threshold is not None,
            f"relax={relax} has no effect without a threshold, which it lowers: add threshold or leave it out",
        )
        return generation


def _fast_dllm_sampler(rule: RefreshRule, cut: Cut) -> Sampler:
    decode = DecodeConfig(confidence_dtype="float64")
    return Sampler(rule=rule, cut=cut, decode=decode, exact_steps=False, **SERVED)


DPAD = DPad()
STREAMING = Streaming()
