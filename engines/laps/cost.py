"""What a prefill step costs on one instance: the ground truth of the simulated experiments.

The price of its work with a floor of launches: eagerly, a layer takes at least ``layer_launch_s`` to launch, which hides
under its work once a step holds some hundreds of tokens; a captured graph has no such floor but computes its
padding. ``kappa`` makes a step that mixes short and long chunks slower than its parts (none by default: a
roofline gives none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

from engines.cluster.cost import besides_attention_s
from engines.cost.cards import Gpu
from engines.cost.composed import Composed, kernels_of
from engines.cost.roofline import DecodeLine, Roofline, StepPrice, StepWork
from engines.errors import UserError, require
from engines.knobs import Checked, Fixed, Proportion, Range, Seconds, Tokens
from engines.models.shape import ModelShape
from engines.policies.step import Bucket, Chunk, Fallback, Rung

Overlap = Literal["max", "add"]


@dataclass(frozen=True, kw_only=True)
class PrefillConstants(Checked):
    """Constants no datasheet gives. Role of all: assumed, until a card has been timed."""

    matmul_efficiency: Annotated[Proportion, Fixed] = 0.65
    attention_efficiency: Annotated[Proportion, Fixed] = 0.35
    bandwidth_efficiency: Annotated[Proportion, Fixed] = 0.8
    layer_launch_s: Annotated[float, Range(0, 1)] = 0.35e-3
    """Least seconds of a layer without a graph; public figures for SGLang give about 0.4 ms."""
    step_overhead_s: Annotated[Seconds, Fixed] = 3e-3
    """Scheduling and sampling of every step."""
    request_overhead_s: Annotated[Seconds, Fixed] = 0.1e-3
    """Per request in a step."""
    graph_launch_s: Annotated[Seconds, Fixed] = 0.6e-3
    graph_check_s: Annotated[Seconds, Fixed] = 0.15e-3
    """Looking up whether a graph fits, found or not (LAPS §4.1)."""
    kappa: Annotated[float, Range(above=-1, most=1e3)] = 0.0
    """Mixing penalty: GPU time of a step with short and long chunks, times 1 + kappa."""
    boundary: Tokens = 256
    """Prompts of fewer tokens are short: for kappa, for LAPS, and in tables."""
    overlap: Overlap = "max"
    """Whether launches run ahead of the GPU, where the longer of the two counts (max), or in turn with it (add)."""


def captured(chunks: Sequence[Chunk], rows: int, mode: object) -> tuple[int, int]:
    """Rows and prompts that a captured shape computes in place of ``rows`` rows of ``chunks``; refuses what it does not hold."""
    if isinstance(mode, Bucket):
        fits = len(chunks) <= mode.batch and all(chunk.tokens <= mode.length for chunk in chunks)
        heads = mode.batch
    elif isinstance(mode, Rung):
        fits, heads = rows <= mode.tokens, len(chunks)
    else:
        raise UserError(f"mode={mode!r} is unknown: use None, Fallback, Bucket or Rung")
    if not fits:
        raise UserError(
            f"mode={mode!r} does not hold {[chunk.tokens for chunk in chunks]} tokens: ask for a larger shape"
        )
    return mode.tokens, heads


class PrefillCost:
    """A ``StepCost`` of one GPU that knows the modes of ``step_mode``; decodes ride along where a system mixes.

    Composed of a framework's ``kernels``, of the constants the overheads and ``kappa`` count: a step that mixes long and short
    prompts is slower by what the products' times at its number of rows give, and by ``kappa`` besides.
    """

    def __init__(
        self, shape: ModelShape, gpu: Gpu, constants: PrefillConstants | None = None, kernels: str | None = None
    ) -> None:
        self.shape, self.gpu = shape, gpu
        self.constants = constants = constants or PrefillConstants()
        require(
            shape.weight_bytes < gpu.memory_bytes,
            f"model={shape.name!r} has {shape.weight_bytes / 1e9:.0f} GB of weights and {gpu.name} "
            f"{gpu.memory_bytes / 1e9:.0f} GB: use a smaller model",
        )
        self.price: StepPrice
        if kernels is None:
            self.price = Roofline(shape, gpu, shares=constants, is_coarse=True)
        else:
            self.price = Composed(kernels_of(shape, gpu, kernels))
        self._launch_s = shape.n_layers * constants.layer_launch_s

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        constants = self.constants
        fixed_s = constants.step_overhead_s + constants.request_overhead_s * len(chunks)
        if mode is None or isinstance(mode, Fallback):
            gpu_s = self.gpu_s(chunks, decoding, context)
            if mode is not None:
                fixed_s += constants.graph_check_s
            busy_s = gpu_s + self._launch_s if constants.overlap == "add" else max(gpu_s, self._launch_s)
            return fixed_s + busy_s
        require(not decoding, f"mode={mode!r}: graphs are captured for prefills alone, {decoding} sequences decode")
        return fixed_s + constants.graph_check_s + constants.graph_launch_s + self.gpu_s(chunks, 0, 0, mode)

    def gpu_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        """The GPU's part: matrices, attention and LM head."""
        linear_s, attention_s, logits_s = self.price.parts(work_of(chunks, decoding, context, mode))
        gpu_s = linear_s + attention_s + logits_s
        kappa = self.constants.kappa
        return gpu_s * (1 + kappa) if kappa and self._mixes(chunks) else gpu_s

    def _mixes(self, chunks: Sequence[Chunk]) -> bool:
        return len({chunk.tokens < self.constants.boundary for chunk in chunks}) == 2

    def decode_line(self, decoding: int) -> DecodeLine:
        # Decode steps replay graphs in every system, so no floor of launches.
        else_s = besides_attention_s(self.price, decoding)
        else_s += self.constants.step_overhead_s + self.constants.graph_launch_s
        attention = self.price.decode_line(decoding)
        return DecodeLine(else_s + attention.base_s, attention.slope_s, else_s + attention.floor_s)


def work_of(chunks: Sequence[Chunk], decoding: int, context: int, mode: object) -> StepWork:
    """A step of these ``chunks``, of the padding that a captured shape computes with them, and of sequences that decode."""
    if mode is None or isinstance(mode, Fallback):
        return StepWork(prompts=chunks, decoding=decoding, context=context)
    rows = sum([tokens for _, tokens in chunks])
    padded_rows, heads = captured(chunks, rows, mode)
    if not isinstance(mode, Bucket):
        return StepWork(query_rows=padded_rows - rows, prompts=chunks)
    prompts = [(history, mode.length) for history, _ in chunks]
    return StepWork(prompts=prompts, padding=(heads - len(chunks), mode.length))


@lru_cache(maxsize=64)
def cost_of(shape: ModelShape, gpu: Gpu, constants: PrefillConstants, kernels: str | None) -> PrefillCost:
    """A roofline's where no framework's kernels are named."""
    return PrefillCost(shape, gpu, constants, kernels)
