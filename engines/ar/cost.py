"""What a step of a worker costs: the ground truth of the simulated cluster.

Matrices, attention and the LM head each take the longer of their arithmetic and their traffic, as in
``engines.hardware.roofline`` (equal to it for one GPU without overheads), spread over the GPUs of a
tensor-parallel group. Added to it are two all-reduces per layer and the overheads of ``CostConstants``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engines.ar.constants import CostConstants
from engines.errors import require
from engines.hardware.catalogue import Gpu
from engines.hardware.roofline import LOGIT_PASSES
from engines.models.shape import ModelShape
from engines.policies.step import Chunk

_TABLE_ROWS = 512
"""Rows of one step whose matrix time is kept; larger steps are computed each time."""


class DecodeLine(NamedTuple):
    """A decode step of a given number of sequences takes max(base + slope * context, floor) seconds."""

    base_s: float
    slope_s: float
    """Per token of context, summed over the sequences."""
    floor_s: float


class StepCost(Protocol):
    """What the cluster asks about a worker's speed. A measured table or a stub will do as well."""

    def prefill_s(self, history: int, tokens: int) -> float:
        """One prompt alone."""
        ...

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        """One step that prefills ``chunks`` and advances ``decoding`` sequences of ``context`` tokens in all.

        ``mode`` is what the batching policy asked for (``StepPlan.mode``), where a worker has several ways.
        """
        ...

    def decode_line(self, decoding: int) -> DecodeLine: ...


class WorkerCost:
    """A tensor-parallel group of ``degree`` GPUs."""

    def __init__(
        self, shape: ModelShape, gpu: Gpu, degree: int, constants: CostConstants, *, is_remote: bool = False
    ) -> None:
        """``is_remote`` charges prefills as on a worker that does not decode them."""
        require(degree >= 1, f"degree={degree}: a worker has at least one GPU")
        require(
            shape.n_heads % degree == 0,
            f"degree={degree} does not divide the {shape.n_heads} heads of {shape.name}: use a power of two",
        )
        self.shape, self.gpu, self.degree, self.constants = shape, gpu, degree, constants
        gpus = degree / (1 + constants.tensor_parallel_loss * math.log2(degree))
        flops = gpu.peak_flops * constants.matmul_efficiency * gpus
        bandwidth = gpu.bandwidth * constants.bandwidth_efficiency * gpus
        self._row_s = shape.linear_flops_per_token / flops
        self._bandwidth = bandwidth
        self._pair_s = shape.attention_flops_per_pair / (gpu.peak_flops * constants.attention_efficiency * gpus)
        self._kv_s = shape.kv_bytes_per_token / bandwidth
        self._logit_s = shape.logits_flops_per_row / flops
        self._head_s = shape.streamed_weight_bytes_head / bandwidth
        self._logit_traffic_s = LOGIT_PASSES * shape.logits_bytes_per_row / bandwidth
        self._launch_s = shape.n_layers * constants.layer_launch_s
        self._prefill_overhead_s = constants.prefill_overhead_s + (
            constants.remote_prefill_overhead_s if is_remote else 0.0
        )
        self._fixed_s = constants.step_overhead_s
        self._comm_row_s = 0.0
        if degree > 1:
            self._fixed_s += 2 * shape.n_layers * constants.all_reduce_latency_s
            # A ring moves 2 (n - 1) / n of the activations over each GPU's link, in one direction.
            share = 2 * (degree - 1) / degree * 2 * shape.n_layers * shape.d_model * shape.dtype_bytes
            self._comm_row_s = share / (link_bytes_per_s(gpu) * constants.nvlink_efficiency)
        self._weights_s = shape.streamed_weight_bytes_layers() / bandwidth
        self._matrices = [0.0, *(self._matrix_s(rows) for rows in range(1, _TABLE_ROWS + 1))]
        self._lines: dict[int, DecodeLine] = {}

    def prefill_s(self, history: int, tokens: int) -> float:
        return self._charge(
            tokens, tokens * history + tokens * (tokens + 1) // 2, history + 2 * tokens, 0, 0, num_prefills=1
        )

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        require(mode is None, f"mode={mode!r}: this cost model knows one way to run a step")
        rows = pairs = kv_rows = 0
        for history, tokens in chunks:
            rows += tokens
            pairs += tokens * history + tokens * (tokens + 1) // 2
            kv_rows += history + 2 * tokens
        return self._charge(rows, pairs, kv_rows, decoding, context, num_prefills=len(chunks))

    def decode_line(self, decoding: int) -> DecodeLine:
        line = self._lines.get(decoding)
        if line is None:
            fixed = self._fixed_s + decoding * self._comm_row_s
            gpu_s = self._rows_s(decoding) + self._logits_s(decoding) + decoding * self._kv_s
            line = DecodeLine(gpu_s + fixed, max(self._pair_s, self._kv_s), self._launch_s + fixed)
            self._lines[decoding] = line
        return line

    def decode_s(self, decoding: int, context: int) -> float:
        """A decode step, seconds."""
        base, slope, floor = self.decode_line(decoding)
        return max(base + slope * context, floor)

    def _charge(self, rows: int, pairs: int, kv_rows: int, decoding: int, context: int, *, num_prefills: int) -> float:
        """``pairs`` and ``kv_rows`` (read and written) are of the prefills; decodes read ``context`` and write one each."""
        attention = max(pairs * self._pair_s, kv_rows * self._kv_s)
        if decoding:
            attention += context * max(self._pair_s, self._kv_s) + decoding * self._kv_s
            rows += decoding
        gpu_s = self._rows_s(rows) + attention + self._logits_s(num_prefills + decoding)
        return (
            max(gpu_s, self._launch_s)
            + self._fixed_s
            + rows * self._comm_row_s
            + num_prefills * self._prefill_overhead_s
        )

    def _rows_s(self, rows: int) -> float:
        return self._matrices[rows] if rows <= _TABLE_ROWS else self._matrix_s(rows)

    def _matrix_s(self, rows: int) -> float:
        weights_s = self._weights_s
        if self.shape.num_experts > 1:
            weights_s = self.shape.streamed_weight_bytes_layers(rows) / self._bandwidth
        return max(rows * self._row_s, weights_s)

    def _logits_s(self, rows: int) -> float:
        return max(rows * self._logit_s, self._head_s + rows * self._logit_traffic_s)


def link_bytes_per_s(gpu: Gpu) -> float:
    """One direction between GPUs of a server: NVLink, or PCIe where there is none."""
    both_gb_s = gpu.pcie_gb_s if gpu.nvlink_gb_s is None else gpu.nvlink_gb_s
    return both_gb_s * 1e9 / 2


def kv_capacity_tokens(shape: ModelShape, gpu: Gpu, degree: int, constants: CostConstants) -> int:
    """Tokens of K/V that fit beside the weights; below 1 where the weights alone do not fit."""
    room = gpu.memory_bytes * degree * constants.memory_share - shape.weight_bytes
    return math.floor(room / shape.kv_bytes_per_token)


def fits(shape: ModelShape, gpu: Gpu, degree: int, constants: CostConstants, *, min_kv_tokens: int = 1) -> bool:
    return shape.n_heads % degree == 0 and kv_capacity_tokens(shape, gpu, degree, constants) >= min_kv_tokens
