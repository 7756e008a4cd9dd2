"""Attention rollout of a step, for rules that choose rows: how much its rows attended to each position.

Rollout (Abnar and Zuidema, arXiv:2005.00928): A is the mean of the heads' attention, with rows of the identity for positions that were not
computed. Each layer passes (A + I) / 2 on. A position's importance is the sum of its column in the product over the layers. We need only
sums of columns, so a vector goes back through the layers instead of a product of matrices: q x T per layer.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engines.attention.backends import Run
from engines.dllm.executor.step import AttendFactory, StepRows
from engines.dllm.plan import PlanItem
from engines.dllm.rows import array_of
from engines.models.protocol import Attend
from engines.runtime.device import PoolTensors


class Rollout:
    """Attends as ``attend`` does, but also keeps every layer's attention of the step."""

    def __init__(self, attend: AttendFactory, pool: PoolTensors) -> None:
        self._attend, self._pool = attend, pool
        self._layers: list[list[Tensor]] = []

    def __call__(self, items: Sequence[PlanItem], rows: StepRows, pad_to: int | None) -> Attend:
        attend, runs = self._attend(items, rows, pad_to), rows.reuse_q_runs
        self._layers = []

        def keeping(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            queries = q.clone()  # attention may overwrite q
            out = attend(layer, q, k, v)
            self._layers.append([self._mean_attention(queries, layer, *pair) for pair in zip(items, runs, strict=True)])
            return out

        return keeping

    def _mean_attention(self, q: Tensor, layer: int, item: PlanItem, run: Run) -> Tensor:
        """The heads' mean attention [rows, T] of an item."""
        queries, keys = q[slice(*run)], self._pool.k[layer][item.kv_start : item.kv_start + item.total_len]
        keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
        scores = queries.transpose(0, 1) @ keys.permute(1, 2, 0) / queries.shape[-1] ** 0.5
        return torch.softmax(scores.float(), dim=-1).mean(dim=0)

    def importance(self, items: Sequence[PlanItem]) -> list[tuple[float, ...]]:
        """The importance of each position of each item, in the last step."""
        importances = []
        for index, item in enumerate(items):
            rows = torch.from_numpy(np.array(array_of(item.chosen.rows))).to(self._pool.k.device)
            sums = torch.ones(item.total_len, dtype=torch.float64, device=rows.device)
            for layer in reversed(self._layers):
                attention, passed = layer[index].double(), sums[rows]
                attention[torch.arange(len(rows), device=rows.device), rows] += 1
                sums[rows] = 0
                sums += passed @ (attention / attention.sum(dim=1, keepdim=True))
            importances.append(tuple(sums.tolist()))
        return importances
