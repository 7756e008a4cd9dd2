"""How a model is divided among ranks, by its dimensions alone; no torch.

Attention is divided by KV head, each with its query heads; the MLP by hidden unit; embedding and output
head by vocabulary id. Norms are whole on every rank.
"""

from __future__ import annotations

from engines.errors import UserError
from engines.models.config import ModelConfig


def span(length: int, rank: int, size: int) -> tuple[int, int]:
    """(start, end) of a rank's part of ``length``; parts differ by one at most, and lie in the ranks' order."""
    return rank * length // size, (rank + 1) * length // size


def check_division(config: ModelConfig, size: int) -> None:
    """Refuse a number of ranks the model's heads cannot be shared among."""
    if size < 1:
        raise UserError(f"tensor_parallel={size} must be at least 1")
    fits = [n for n in range(1, config.n_kv_heads + 1) if config.n_kv_heads % n == config.n_heads % n == 0]
    for field in ("n_kv_heads", "n_heads"):
        if getattr(config, field) % size:
            raise UserError(
                f"tensor_parallel={size} does not divide the model's {field}={getattr(config, field)}: "
                f"use one of {', '.join(map(str, fits))}"
            )
