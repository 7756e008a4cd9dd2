"""K/V rows of a slot as bytes: what goes over the wire, [2, layers, tokens, Hkv, D] in the model's dtype."""

from __future__ import annotations

import numpy as np
import torch

from engines.ampd.live.wire import Buffer
from engines.ar.torch.executor import TorchExecutor


def bytes_per_token(executor: TorchExecutor) -> int:
    config = executor.model.config
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * executor.model.dtype.itemsize


def gather(executor: TorchExecutor, slot: int, start: int, end: int) -> memoryview:
    """The K/V of tokens [start, end) of a slot."""
    rows = _rows(executor, slot, start, end)
    pool = executor.pool
    found = torch.stack([part.flatten(1, 2).index_select(1, rows) for part in (pool.k, pool.v)])
    return found.cpu().view(torch.uint8).numpy().reshape(-1).data


def scatter(executor: TorchExecutor, slot: int, start: int, payload: Buffer) -> int:
    """Put it into the pool at ``start``, whose blocks are there; how many tokens it was."""
    tokens = len(payload) // bytes_per_token(executor)
    if tokens == 0:
        return 0
    config, pool = executor.model.config, executor.pool
    shape = (2, config.n_layers, tokens, config.n_kv_heads, config.head_dim)
    found = torch.frombuffer(payload, dtype=executor.model.dtype).view(shape).to(pool.k.device)
    rows = _rows(executor, slot, start, start + tokens)
    for part, received in zip((pool.k, pool.v), found, strict=True):
        part.flatten(1, 2).index_copy_(1, rows, received)
    return tokens


def _rows(executor: TorchExecutor, slot: int, start: int, end: int) -> torch.Tensor:
    position = np.arange(start, end)
    rows = executor.tables.rows(np.full(end - start, slot), position)
    return torch.from_numpy(rows).to(executor.pool.k.device)
