"""The cost of one packed forward, composed of measured kernels: the questions of ``engines.cost.roofline``, other answers.

Every sequence of a step is charged the attention of a causal prompt with as many pairs as the step's sequences have on average;
bidirectional attention of n rows has those of a causal prompt of 1.41 n. Rows that pass some layers or matrices only (``extra``
fields) run at the rate of as many rows of one layer. What else is moved, caches and copies of logits, takes its bytes at the share
of bandwidth that elementwise kernels reach.
"""

from __future__ import annotations

from engines.cost.kernels import ELEMENTWISE_SHARE, Kernels
from engines.cost.roofline import LOGIT_PASSES, Calibration, Roofline, StepCost, StepWork


class Composed(Roofline):
    """Only the overhead of a step counts of ``calibration``."""

    def __init__(self, kernels: Kernels, calibration: Calibration) -> None:
        super().__init__(kernels.shape, kernels.card, calibration)
        self.kernels = kernels

    def step_time(self, work: StepWork, *, copied_bytes_per_logit: int = 0) -> StepCost:
        parts = linear, attention, logits = self._parts(
            work, logit_passes=LOGIT_PASSES, copied_bytes_per_logit=copied_bytes_per_logit
        )
        compute_s = (linear.flops + attention.flops + logits.flops) / self.gpu.peak_flops
        memory_s = (linear.bytes + attention.bytes + logits.bytes) / self.gpu.bandwidth
        seconds = self._linear_s(work), self._attention_s(work), self._logits_s(work, copied_bytes_per_logit)
        return self._cost(work, parts, seconds, "compute" if compute_s >= memory_s else "memory")

    def _linear_s(self, work: StepWork) -> float:
        kernels, layers = self.kernels, self.shape.n_layers
        linear_s = kernels.layers_s(work.query_rows)
        if work.extra_linear_flops:
            layer_flops = self.shape.linear_flops_per_token / layers
            rows = work.query_rows + work.extra_linear_flops / layer_flops
            rate = rows * layer_flops * layers / kernels.layers_s(rows)
            streamed_s = work.extra_weight_bytes / (ELEMENTWISE_SHARE * self.gpu.bandwidth)
            linear_s += max(work.extra_linear_flops / rate, streamed_s)
        return linear_s

    def _attention_s(self, work: StepWork) -> float:
        shape, kernels = self.shape, self.kernels
        pairs = work.attention_pairs + work.extra_attention_flops / shape.attention_flops_per_pair
        moved = shape.kv_bytes_per_token * (work.kv_read_rows + work.kv_written_rows) + work.extra_cache_bytes
        moved_s = moved / (ELEMENTWISE_SHARE * self.gpu.bandwidth)
        if not pairs:
            return moved_s
        batch = max(1, work.num_sequences)
        return max(batch * kernels.prompt_s(pairs / batch, batch), moved_s)

    def _logits_s(self, work: StepWork, copied_bytes_per_logit: int) -> float:
        if not work.logit_rows:
            return 0.0
        head_s = work.logit_chunks * self.kernels.head_s(work.logit_rows / work.logit_chunks)
        copied = self.shape.vocab_rows * copied_bytes_per_logit * work.logit_rows
        return head_s + copied / (ELEMENTWISE_SHARE * self.gpu.bandwidth)
