"""What a step of a worker costs by measured kernels: the questions of ``engines.ar.cost.WorkerCost``, other answers.

Of the constants, overheads count: launches, the step's own, a prefill's, a remote one's. What share of a peak is reached, how a group
exchanges activations, and what that takes is in the tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.ar.cost import CostConstants, DecodeLine
from engines.errors import require
from engines.hardware.silicon.kernels import Kernels
from engines.policies.step import Chunk


class ComposedCost:
    """``kernels`` are those of one rank of a worker."""

    def __init__(self, kernels: Kernels, constants: CostConstants, *, is_remote: bool = False) -> None:
        """``is_remote`` charges prefills as on a worker that does not decode them."""
        self.kernels = kernels
        self._launch_s = kernels.shape.n_layers * constants.layer_launch_s
        self._fixed_s = constants.step_overhead_s
        self._prefill_overhead_s = constants.prefill_overhead_s
        if is_remote:
            self._prefill_overhead_s += constants.remote_prefill_overhead_s
        self._rows_s: dict[int, float] = {}
        self._heads_s: dict[int, float] = {}

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        require(mode is None, f"mode={mode!r}: this cost model knows one way to run a step")
        kernels, batch = self.kernels, len(chunks)
        rows, attention_s = decoding, 0.0
        for history, tokens in chunks:
            rows += tokens
            attention_s += kernels.prompt_s(tokens * history + tokens * (tokens + 1) / 2, batch)
        if decoding:
            attention_s += kernels.decode_line(decoding).at(context)
        gpu_s = self._layers_s(rows) + attention_s + self._logits_s(batch + decoding)
        return max(gpu_s, self._launch_s) + self._fixed_s + batch * self._prefill_overhead_s

    def decode_line(self, decoding: int) -> DecodeLine:
        line = self.kernels.decode_line(decoding)
        else_s = self._layers_s(decoding) + self._logits_s(decoding)
        floor_s = max(else_s + line.floor_s, self._launch_s)
        return DecodeLine(else_s + line.base_s + self._fixed_s, line.slope_s, floor_s + self._fixed_s)

    def _layers_s(self, rows: int) -> float:
        found = self._rows_s.get(rows)
        if found is None:
            found = self._rows_s[rows] = self.kernels.layers_s(rows)
        return found

    def _logits_s(self, rows: int) -> float:
        found = self._heads_s.get(rows)
        if found is None:
            found = self._heads_s[rows] = self.kernels.head_s(rows)
        return found
