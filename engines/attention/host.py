"""``host``, a CPU's: one call for all sequences of a step, by a kernel that is compiled for the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engines.attention.spans import Spans
from engines.kernels.host import Runs, attend_runs


@dataclass(frozen=True, kw_only=True)
class HostVarlen:
    """A sequence's result does not depend on which others share the step."""

    name: ClassVar[str] = "host"
    needs_host_runs: ClassVar[bool] = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype)
            out[spans.cu_q[-1] :] = 0  # whatever lies there may be slow to compute with
        return attend_runs(q, k, v, Runs(spans.cu_q[:-1], spans.cu_q[1:], spans.k_start[:-1], spans.k_len), out)
