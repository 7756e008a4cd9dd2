"""Which positions are masked, and the loss on them.

The prompt is never masked. Three patterns over the answer region, drawn per sequence:

- whole answer: each position masked with probability t ~ U(0, 1) (the LLaDA objective);
- block, random: blocks before a drawn one clean, later ones masked, the drawn one masked as above;
- block, left to right: the same, but the drawn block is clean up to a random position; a quarter of
  the rest is revealed half of the time. Confidence decoding walks through states of this shape.

The loss is the weighted mean cross-entropy over the masked positions of the whole answer or of the
drawn block, without LLaDA's 1/t. Plain means give rare, nearly clean sequences no excess weight.

Block diffusion's objective: sequences are doubled, and every block of the answer is trained at once.

Behind the clean sequence lie noisy copies of the blocks that hold its answer. A clean block sees itself and the clean blocks
before; a noisy block sees itself and the clean blocks before it, which is what a server computes it against (Arriola et al.,
arXiv 2503.09573, section 3.1). Blocks begin at multiples of their length; what of the prompt opens the answer's first block is never masked.

Noise is drawn per block: each place masked at a ratio t ~ U(0, 1), or all but a left part, as above, without 1/t. In
some blocks visible tokens are replaced by others of the batch, and what was there is to be predicted: rules that edit ask for
it (LLaDA2.1). Shapes: B sequences of T clean columns and N noisy ones behind them, R = T + N.
"""

from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engines.models.tokenizer import TextTokenizer
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


_VISIBLE_WEIGHT = 0.1
"""Loss weight of a visible token that is right."""


@dataclass(frozen=True, kw_only=True)
class DoubledBatch(MaskedBatch):
    """``inputs`` is [B, R]; ``rows``, ``targets`` and ``weights`` are of the noisy columns."""

    positions: np.ndarray
    """[B, R]"""
    allowed: np.ndarray
    """bool [B, R, R]: which columns a row sees."""


def double_batch(config: TrainConfig, batch: Batch, tokenizer: TextTokenizer, step: int) -> DoubledBatch:
    block = config.block_diffusion
    assert block is not None
    rng = np.random.default_rng((config.seed, step, 1))
    count = len(batch.ids)
    opens = batch.prompt_lengths // block * block
    blocks = int(((batch.prompt_lengths + batch.answer_lengths) // block - opens // block).max()) + 1
    clean = np.pad(batch.ids, ((0, 0), (0, block)), constant_values=tokenizer.eos_token_id)[
        :, : int(opens.max()) + blocks * block
    ]
    columns, noisy = clean.shape[1], blocks * block
    where = opens[:, None] + np.arange(noisy)
    truth = np.take_along_axis(clean, where, axis=1)
    is_answer = where >= batch.prompt_lengths[:, None]
    masked = _masked(config, rng, (count, blocks, block)).reshape(count, noisy) & is_answer
    is_wrong = _replaced(config, rng, (count, blocks, block)).reshape(count, noisy) & is_answer & ~masked
    is_fill = where > (batch.prompt_lengths + batch.answer_lengths)[:, None]
    others = rng.choice(truth[is_answer & ~is_fill], size=truth.shape)
    is_wrong &= others != truth
    weights = np.where(masked | is_wrong, 1.0, _VISIBLE_WEIGHT) * np.where(is_fill, config.fill_weight, 1.0) * is_answer
    positions = np.concatenate((np.broadcast_to(np.arange(columns), clean.shape), where), axis=1)
    rows = np.arange(count)[:, None] * (columns + noisy) + columns + np.arange(noisy)
    inputs = np.where(masked, tokenizer.mask_token_id, np.where(is_wrong, others, truth))
    return DoubledBatch(
        inputs=np.concatenate((clean, inputs), axis=1),
        positions=positions,
        allowed=_allowed(positions // block, columns),
        rows=rows.reshape(-1),
        targets=truth.reshape(-1),
        weights=weights.reshape(-1).astype(np.float32),
    )


def _allowed(block_of: NDArray[np.int64], columns: int) -> NDArray[np.bool_]:
    own, other = block_of[:, :, None], block_of[:, None, :]
    is_noisy = np.arange(block_of.shape[1]) >= columns
    return np.where(
        is_noisy, is_noisy[:, None] & (own == other), np.where(is_noisy[:, None], other < own, other <= own)
    )


def _masked(config: TrainConfig, rng: np.random.Generator, shape: tuple[int, int, int]) -> NDArray[np.bool_]:
    count, blocks, block = shape
    each = (count, blocks, 1)
    at_random = rng.random(shape) < rng.random(each)
    reveal = np.where(rng.random(each) < 0.5, 0.25, 0.0)
    from_left = (np.arange(block) >= rng.integers(block, size=each)) & (rng.random(shape) >= reveal)
    return np.where(rng.random(each) < config.pattern_shares[2], from_left, at_random)


def _replaced(config: TrainConfig, rng: np.random.Generator, shape: tuple[int, int, int]) -> NDArray[np.bool_]:
    of_blocks, of_tokens = config.replaced_shares
    return (rng.random((*shape[:2], 1)) < of_blocks) & (rng.random(shape) < of_tokens)
