"""Generation whose steps leave settled rows out, one request at a time on dense tensors: K and V of every position and layer as they
were computed last, and each step says which positions it computes.

Every row of the context is kept and a block's cache is built at its first step. What ``Settling`` and the packed engine are held to.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engines.dllm.config import Settling
from engines.models.protocol import DiffusionModel


class Answer(NamedTuple):
    ids: tuple[int, ...]
    computed: list[list[int]]
    """Positions, by step."""
    keys: torch.Tensor
    values: torch.Tensor
    """[layers, positions, Hkv, D] in the end."""

    @property
    def rows(self) -> int:
        return sum(map(len, self.computed))


@torch.inference_mode()
def generate(
    model: DiffusionModel,
    prompt: tuple[int, ...],
    *,
    gen_length: int,
    block_length: int,
    settling: Settling,
    threshold: float | None = None,
    per_step: int = 1,
    builds: Collection[int] = (),
    fulls: Collection[int] = (),
) -> Answer:
    """The cache is built anew at the steps ``builds`` of a block too, and at ``fulls`` all is computed and nothing kept. ``per_step`` tokens are committed in each step, or all that reach the threshold and the best one."""
    shape = model.config
    start, total = len(prompt), len(prompt) + gen_length
    ids = torch.tensor([*prompt, *[shape.mask_token_id] * gen_length])
    keys, values = torch.zeros(2, shape.n_layers, total, shape.n_kv_heads, shape.head_dim)
    steps: list[list[int]] = []

    def hidden(positions: torch.Tensor, *, keeps: bool) -> torch.Tensor:
        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if keeps:
                keys[layer, positions], values[layer, positions] = k, v
                k, v = keys[layer], values[layer]
            return F.scaled_dot_product_attention(*(each.transpose(0, 1)[None] for each in (q, k, v)), enable_gqa=True)[
                0
            ].transpose(0, 1)

        return model.hidden(ids[positions], model.rotary(positions), attend)

    for block, begin in enumerate(range(start, total, block_length)):
        end = min(begin + block_length, total)
        committed_in = torch.full((total,), -1)
        step, renewed = 0, False
        while (masked := (ids == shape.mask_token_id) & (torch.arange(total) < end)).any():
            left = int(masked.sum())
            if step == 0:
                first = 0 if block % settling.full_every == 0 else begin - block_length
                computed = torch.arange(total) >= first
            elif step in builds or step in fulls:
                computed = torch.ones(total, dtype=torch.bool)
                renewed = renewed or (step in builds and left <= settling.renew_at)
            else:
                computed = (torch.arange(total) >= begin) & (torch.arange(total) < end)
                renews = left <= settling.renew_at and not renewed
                renewed = renewed or renews
                if settling.settle_after is not None and not renews and step - 1 not in fulls:
                    computed &= masked | (committed_in >= step - settling.settle_after)
            positions = computed.nonzero()[:, 0]
            steps.append(positions.tolist())
            states = torch.zeros(total, shape.d_model)
            states[positions] = hidden(positions, keeps=step not in fulls)
            candidates = masked.nonzero()[:, 0]
            logits = model.logits(states[candidates])
            probabilities = logits.softmax(dim=-1)
            logits[:, shape.mask_token_id] = -torch.inf
            token = logits.argmax(dim=-1)
            confidence = probabilities.gather(1, token[:, None])[:, 0]
            best = confidence.sort(descending=True, stable=True).indices
            count = per_step if threshold is None else max(1, int((confidence >= threshold).sum()))
            chosen = best[:count]
            ids[candidates[chosen]] = token[chosen]
            committed_in[candidates[chosen]] = step
            step += 1
    return Answer(tuple(ids[start:].tolist()), steps, keys, values)
