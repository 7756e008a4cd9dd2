"""What a prefill step costs on one instance: the ground truth of the simulated experiments.

A roofline with a floor of launches: eagerly, a layer takes at least ``layer_launch_s`` to launch, which hides
under its work once a step holds some hundreds of tokens; a captured graph has no such floor but computes its
padding. ``kappa`` makes a step that mixes short and long chunks slower than its parts (none by default: a
roofline gives none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from engines.ar.cost import DecodeLine
from engines.cost.cards import Gpu
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
    """A ``StepCost`` of one GPU that knows the modes of ``step_mode``; decodes ride along where a system mixes."""

    def __init__(self, shape: ModelShape, gpu: Gpu, constants: PrefillConstants | None = None) -> None:
        self.shape, self.gpu = shape, gpu
        self.constants = constants = constants or PrefillConstants()
        require(
            shape.weight_bytes < gpu.memory_bytes,
            f"model={shape.name!r} has {shape.weight_bytes / 1e9:.0f} GB of weights and {gpu.name} "
            f"{gpu.memory_bytes / 1e9:.0f} GB: use a smaller model",
        )
        self._matmul = gpu.peak_flops * constants.matmul_efficiency
        self._scores = gpu.peak_flops * constants.attention_efficiency
        self._bandwidth = gpu.bandwidth * constants.bandwidth_efficiency
        self._slope_s = max(shape.attention_flops_per_pair / self._scores, shape.kv_bytes_per_token / self._bandwidth)
        self._launch_s = shape.n_layers * constants.layer_launch_s

    @property
    def token_s(self) -> float:
        """Matrix time of a token where compute bounds the step."""
        return self.shape.linear_flops_per_token / self._matmul

    @property
    def weights_s(self) -> float:
        """Reading all layer weights once."""
        return self.shape.streamed_weight_bytes_layers() / self._bandwidth

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
        """The GPU's part: matrices, LM head and attention, each the longer of arithmetic and traffic."""
        rows = kv_rows = 0
        pairs = 0.0
        is_short = is_long = False
        boundary = self.constants.boundary
        for history, tokens in chunks:
            rows += tokens
            pairs += tokens * (history + 0.5 * tokens)
            kv_rows += history + tokens
            if tokens < boundary:
                is_short = True
            else:
                is_long = True
        heads = len(chunks)
        if mode is not None and not isinstance(mode, Fallback):
            asked, (rows, heads) = rows, captured(chunks, rows, mode)
            if isinstance(mode, Bucket):
                history = kv_rows - asked
                pairs = mode.length * (history + 0.5 * mode.length * heads)
                kv_rows = history + rows
        shape = self.shape
        attention_s = max(
            shape.attention_flops_per_pair * pairs / self._scores, shape.kv_bytes_per_token * kv_rows / self._bandwidth
        )
        if decoding:
            attention_s += self._written_s(decoding) + self._slope_s * context
            rows += decoding
            heads += decoding
        penalty = 1 + self.constants.kappa if is_short and is_long else 1.0
        return (self._matrix_s(rows) + attention_s + self._head_s(heads)) * penalty

    def _matrix_s(self, rows: int) -> float:
        shape = self.shape
        weights_s = shape.streamed_weight_bytes_layers() / self._bandwidth
        return max(shape.linear_flops_per_token * rows / self._matmul, weights_s)

    def _head_s(self, rows: int) -> float:
        shape = self.shape
        head_s = shape.streamed_weight_bytes_head / self._bandwidth
        return max(shape.logits_flops_per_row * rows / self._matmul, head_s)

    def _written_s(self, rows: int) -> float:
        return self.shape.kv_bytes_per_token * rows / self._bandwidth

    def decode_line(self, decoding: int) -> DecodeLine:
        # Decode steps replay graphs in every system, so no floor of launches.
        else_s = self._matrix_s(decoding) + self._head_s(decoding)
        else_s += self.constants.step_overhead_s + self.constants.graph_launch_s
        return DecodeLine(else_s + self._written_s(decoding), self._slope_s, else_s)
