"""What a prefill step costs by measured kernels: the questions of ``engines.laps.cost.PrefillCost``, other answers.

How much slower a step is that mixes long and short prompts follows from the products' times at the number of rows that the step
has; ``kappa`` is what comes on top of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from engines.ar.cost import DecodeLine
from engines.cost.cards import Gpu
from engines.cost.kernels import Kernels
from engines.laps.cost import PrefillConstants, PrefillCost, captured
from engines.models.shape import ModelShape
from engines.policies.step import Bucket, Chunk, Fallback

KNEE_ROWS = 4096
"""A row more costs the same from here on, on every card."""


class ComposedPrefillCost(PrefillCost):
    """Only overheads of the constants count: launches, the step's own, a request's, a graph's."""

    def __init__(self, kernels: Kernels, constants: PrefillConstants) -> None:
        super().__init__(kernels.shape, kernels.card, constants)
        self.kernels = kernels

    @property
    def token_s(self) -> float:
        return self.kernels.layers_s(KNEE_ROWS) / KNEE_ROWS

    @property
    def weights_s(self) -> float:
        return self.kernels.layers_s(1)

    def gpu_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        kernels = self.kernels
        rows, heads = sum([chunk.tokens for chunk in chunks]), len(chunks)
        if mode is not None and not isinstance(mode, Fallback):
            rows, heads = captured(chunks, rows, mode)
        attention_s = 0.0
        if isinstance(mode, Bucket):
            length, prompt_s = mode.length, kernels.prompts_s(heads)
            own = length * (length + 1) / 2
            # Padding in place of prompts has no history.
            attention_s = (heads - len(chunks)) * prompt_s(own)
            for history, _ in chunks:
                attention_s += prompt_s(length * history + own)
        elif chunks:
            prompt_s = kernels.prompts_s(heads)
            for history, tokens in chunks:
                attention_s += prompt_s(tokens * history + tokens * (tokens + 1) / 2)
        if decoding:
            attention_s += kernels.decode_line(decoding).at(context)
        gpu_s = kernels.layers_s(rows + decoding) + attention_s + kernels.head_s(heads + decoding)
        return gpu_s * (1 + self.constants.kappa) if self.constants.kappa and self._mixes(chunks) else gpu_s

    def _mixes(self, chunks: Sequence[Chunk]) -> bool:
        return len({chunk.tokens < self.constants.boundary for chunk in chunks}) == 2

    def decode_line(self, decoding: int) -> DecodeLine:
        line = self.kernels.decode_line(decoding)
        constants = self.constants
        # Decode steps replay graphs in every system, so no floor of launches.
        else_s = self.kernels.layers_s(decoding) + self.kernels.head_s(decoding)
        else_s += constants.step_overhead_s + constants.graph_launch_s
        return DecodeLine(else_s + line.base_s, line.slope_s, else_s + line.floor_s)


@lru_cache(maxsize=64)
def cost_of(shape: ModelShape, gpu: Gpu, constants: PrefillConstants, kernels: str | None) -> PrefillCost:
    """A roofline's where no framework's kernels are named."""
    if kernels is None:
        return PrefillCost(shape, gpu, constants)
    return ComposedPrefillCost(Kernels(shape, gpu, kernels), constants)
