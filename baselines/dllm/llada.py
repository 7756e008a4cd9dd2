"""The plain LLaDA sampler."""

from typing import Any

from baselines.dllm.published import PublishedMethod
from engines.dllm.config import NoCache
from engines.dllm.method import BLOCKS, LEAP, Options, Sampler


class Llada(PublishedMethod):
    name = "llada"
    title = "LLaDA"
    heeds = {"llada": BLOCKS | LEAP | {"remasking", "cfg_scale"}}
    batches_upstream = False  # published code is called with one prompt

    def _sampler(self, family: str, own: Any, options: Options) -> Sampler:
        return Sampler(rule=NoCache())


LLADA = Llada()
