"""The price of a step that is composed of measured kernels.

Packed sequences are charged the attention of a causal prompt with as many pairs as they have on average;
bidirectional attention of n rows has those of a causal prompt of 1.41 n. Rows that pass some layers or matrices only (``extra``
fields) run at the rate of as many rows of one layer. What else is moved, caches and copies of logits, takes its bytes at the share
of bandwidth that elementwise kernels reach.
"""

from __future__ import annotations

from functools import lru_cache

from engines.cost.cards import Gpu
from engines.cost.kernels import ELEMENTWISE_SHARE, Kernels
from engines.cost.roofline import Calibration, DecodeLine, Roofline, StepParts, StepPrice, StepWork
from engines.models.shape import ModelShape


class Composed(StepPrice):
    """Only the overheads of a step count of ``calibration``."""

    def __init__(self, kernels: Kernels, calibration: Calibration | None = None) -> None:
        super().__init__(kernels.shape, kernels.card, calibration)
        self.kernels = kernels
        self._moved = ELEMENTWISE_SHARE * kernels.card.bandwidth

    def parts(self, work: StepWork) -> StepParts:
        return self._causal_parts(work) if work.prompts or work.decoding else self._packed_parts(work)

    def _causal_parts(self, work: StepWork) -> StepParts:
        kernels, prompts, decoding = self.kernels, work.prompts, work.decoding
        rows, num, attention_s = work.query_rows + decoding, len(prompts), 0.0
        if prompts:
            count, tokens = work.padding
            num += count
            rows += count * tokens
            prompt_s = kernels.prompts_s(num)
            if count:
                attention_s = count * prompt_s(0.5 * tokens * (tokens + 1))
            for history, tokens in prompts:
                rows += tokens
                attention_s += prompt_s(tokens * (history + 0.5 * (tokens + 1)))
        if decoding:
            base_s, slope_s, floor_s = kernels.decode_line(decoding)
            attention_s += max(base_s + slope_s * work.context, floor_s)
        return kernels.layers_s(rows), attention_s, kernels.head_s(num + decoding)

    def _packed_parts(self, work: StepWork) -> StepParts:
        linear_s = self.kernels.layers_s(work.query_rows)
        if work.extra_linear_flops:
            linear_s += self._extra_linear_s(work)
        logits_s = work.logit_chunks * self.kernels.head_s(work.logit_rows / work.logit_chunks)
        return linear_s, self._mean_attention_s(work), logits_s + work.copied_logit_bytes / self._moved

    def decode_line(self, decoding: int) -> DecodeLine:
        return self.kernels.decode_line(decoding)

    def _extra_linear_s(self, work: StepWork) -> float:
        layers = self.shape.n_layers
        layer_flops = self.shape.linear_flops_per_token / layers
        rows = work.query_rows + work.extra_linear_flops / layer_flops
        rate = rows * layer_flops * layers / self.kernels.layers_s(rows)
        return max(work.extra_linear_flops / rate, work.extra_weight_bytes / self._moved)

    def _mean_attention_s(self, work: StepWork) -> float:
        shape = self.shape
        pairs = work.attention_pairs + work.extra_attention_flops / shape.attention_flops_per_pair
        moved = shape.kv_bytes_per_token * (work.kv_read_rows + work.kv_written_rows) + work.extra_cache_bytes
        moved_s = moved / self._moved
        if not pairs:
            return moved_s
        batch = max(1, work.num_sequences)
        return max(batch * self.kernels.prompt_s(pairs / batch, batch), moved_s)


@lru_cache(maxsize=64)
def kernels_of(shape: ModelShape, card: Gpu, framework: str, degree: int = 1) -> Kernels:
    """One for all runs of a process, with what it has looked up: their steps are much the same."""
    return Kernels(shape, card, framework, degree)


def price_on(shape: ModelShape, card: Gpu, framework: str | None, calibration: Calibration) -> StepPrice:
    """Composed of a framework's kernels; a roofline where none is named."""
    if framework is None:
        return Roofline(shape, card, calibration)
    return Composed(kernels_of(shape, card, framework), calibration)
