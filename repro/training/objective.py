"""Which positions are masked, and the loss on them.

The prompt is never masked. Three patterns over the answer region, drawn per sequence:

- whole answer: each position masked with probability t ~ U(0, 1) (the LLaDA objective);
- block, random: blocks before a drawn one clean, later ones masked, the drawn one masked as above;
- block, left to right: the same, but the drawn block is clean up to a random position; a quarter of
  the rest is revealed half of the time. Confidence decoding walks through states of this shape.

The loss is the weighted mean cross-entropy over the masked positions of the whole answer or of the
drawn block, without LLaDA's 1/t. Plain means give rare, nearly clean sequences no excess weight.
"""

from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from repro.training.config import TrainConfig
from repro.training.data import Batch


@dataclass(frozen=True, kw_only=True)
class MaskedBatch:
    inputs: np.ndarray
    """[B, T] ids with the masked positions replaced."""
    rows: np.ndarray
    """[B * gen_length] flat indices of the answer region into [B * T]."""
    targets: np.ndarray
    """[B * gen_length] clean ids."""
    weights: np.ndarray
    """[B * gen_length] float32; zero wherever the loss is not taken, so on every clean position."""


def mask_batch(config: TrainConfig, batch: Batch, mask_token_id: int, step: int) -> MaskedBatch:
    rng = np.random.default_rng((config.seed, step, 1))
    count, columns = batch.ids.shape
    g = config.gen_length
    offsets = np.arange(g)
    patterns = np.asarray(rng.choice(3, size=count, p=config.pattern_shares))
    masked = rng.random((count, g)) < rng.random((count, 1))
    scored = np.ones((count, g), dtype=bool)
    for i in np.flatnonzero(patterns > 0):
        block = int(rng.choice(config.block_lengths))
        # Blocks behind the answer hold only fill: at most one of them is worth training on.
        last = min(g // block - 1, int(batch.answer_lengths[i]) // block)
        start = int(rng.integers(last + 1)) * block
        inside = (offsets >= start) & (offsets < start + block)
        if patterns[i] == 2:
            reveal = 0.25 if rng.random() < 0.5 else 0.0
            masked[i] = (offsets >= start + rng.integers(block)) & (rng.random(g) >= reveal)
        masked[i] = np.where(inside, masked[i], offsets >= start + block)
        scored[i] = inside
    empty = ~(masked & scored).any(axis=1)
    for i in np.flatnonzero(empty):
        choice = int(rng.choice(np.flatnonzero(scored[i])))
        masked[i, choice] = True

    where = batch.prompt_lengths[:, None] + offsets
    flat = np.arange(count)[:, None] * columns + where
    inputs = batch.ids.copy()
    inputs.reshape(-1)[flat[masked]] = mask_token_id
    weights = np.where(offsets > batch.answer_lengths[:, None], config.fill_weight, 1.0) * (masked & scored)
    rows = flat.reshape(-1)
    return MaskedBatch(
        inputs=inputs, rows=rows, targets=batch.ids.reshape(-1)[rows], weights=weights.reshape(-1).astype(np.float32)
    )


def masked_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy; logits [rows, V]."""
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum()
