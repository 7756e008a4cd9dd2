"""What a step of a worker costs by measured kernels: the questions of ``engines.ar.cost.WorkerCost``, other answers.

Of the constants, overheads count: launches, the step's own, a prefill's, a remote one's. What share of a peak is reached, how a group
exchanges activations, and what that takes is in the tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.ar.cost import CostConstants, DecodeLine
from engines.cost.kernels import Kernels
from engines.errors import require
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

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        require(mode is None, f"mode={mode!r}: this cost model knows one way to run a step")
        kernels, batch = self.kernels, len(chunks)
        rows, attention_s = decoding, 0.0
        if chunks:
            prompt_s = kernels.prompts_s(batch)
            for history, tokens in chunks:
                rows += tokens
                attention_s += prompt_s(tokens * history + tokens * (tokens + 1) / 2)
        if decoding:
            attention_s += kernels.decode_line(decoding).at(context)
        gpu_s = kernels.layers_s(rows) + attention_s + kernels.head_s(batch + decoding)
        return max(gpu_s, self._launch_s) + self._fixed_s + batch * self._prefill_overhead_s

    def decode_line(self, decoding: int) -> DecodeLine:
        line = self.kernels.decode_line(decoding)
        else_s = self.kernels.layers_s(decoding) + self.kernels.head_s(decoding)
        floor_s = max(else_s + line.floor_s, self._launch_s)
        return DecodeLine(else_s + line.base_s + self._fixed_s, line.slope_s, floor_s + self._fixed_s)
