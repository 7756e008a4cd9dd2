"""Initial weights that already lean towards recall from context.

Recall ("Mia has 4 ... Mia has _") needs two things at once: positions that know their neighbours, and
a match of that knowledge across the text. Neither pays without the other, so from plain random
weights training sits on a plateau for thousands of steps. Started near both (in the spirit of
mimetic initialisation, Trockman and Kolter 2023) it recalls within a few hundred. Nothing is
frozen: training changes every weight.
"""

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from engines.models.decoder import BlockModel, DecoderLayer
from engines.models.layers import RotaryAttention
from engines.models.llada import LLaDABlock, LLaDAModelLM

_SHARED = 0.5
"""Value of coordinate 0 in every embedding: what "always on" scores are read from."""
_SHARPNESS = 10.0
_OFFSETS = (-1, 1, -2, 2, -3, 3, -4, 4)
"""What the first layer's heads look at; a sum's operands are two and four to its left."""
_FAST_PAIRS = 3
_SLOW_RADIANS = 0.02
"""Rotary pairs turning less than this per position hardly notice distance."""
_MATCH_GAIN = 2.4
_MASK_PENALTY = 4.6
_NORM_GAINS = (2.6, 1.9)
"""Root mean squares of queries and keys that the first two layers' weights give; behind norms the gains are these, else one."""


class _Layer(NamedTuple):
    attention: RotaryAttention
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out: nn.Linear
    mlp_out: nn.Linear


@torch.no_grad()
def initialise(model: LLaDAModelLM | BlockModel, seed: int) -> None:
    """Seeded. Normal weights of deviation 1/sqrt(fan-in), then:

    - the first layer's heads each look at one relative offset, from four to the left to four to the right;
    - the second layer's heads look for positions with the same token at that offset;
    - keys of later layers equal their queries, so like finds like;
    - value projections are orthogonal, output projections half their transpose: heads copy;
    - the head starts as the embedding, so what is copied is what is predicted.
    """
    generator = torch.Generator().manual_seed(seed)
    embedding = cast(nn.Embedding, model.embedding).weight
    for parameter in model.parameters():
        if parameter.ndim == 2:
            std = 0.1 if parameter is embedding else parameter.shape[1] ** -0.5
            nn.init.normal_(parameter, std=std, generator=generator)
    layers = [_layer(block) for block in model.blocks]
    embedding[:, 0] = 0
    mask = embedding[model.config.mask_token_id].clone()
    direction = mask / mask.norm()
    embedding[:, 0] = _SHARED
    for index, layer in enumerate(layers):
        layer.mlp_out.weight.mul_(0.1)
        nn.init.orthogonal_(layer.v_proj.weight, generator=generator)
        if index == 0:  # Neither the shared coordinate nor a masked neighbour brings anything along.
            layer.v_proj.weight[:, 0] = 0
            layer.v_proj.weight -= torch.outer(layer.v_proj.weight @ direction, direction)
        else:
            layer.k_proj.weight.copy_(layer.q_proj.weight)
        layer.out.weight.copy_(0.5 * layer.v_proj.weight.T)
    theta = model.config.rope_theta if isinstance(model, LLaDAModelLM) else model.config.rope.theta
    _look_at_neighbours(layers[0], embedding, theta)
    if len(layers) > 1:
        _find_same_neighbour(layers[0], layers[1], mask, theta)
    for layer, gain in zip(layers, _NORM_GAINS, strict=False):
        for norm in (layer.attention.q_norm, layer.attention.k_norm):
            if norm is not None:
                norm.weight.fill_(gain)
    if not model.config.weight_tying:
        cast(nn.Linear, model.head).weight.copy_(embedding)


def _layer(block: nn.Module) -> _Layer:
    if isinstance(block, LLaDABlock):
        return _Layer(block, block.q_proj, block.k_proj, block.v_proj, block.attn_out, block.ff_out)
    own = cast(DecoderLayer, block)
    attention = own.self_attn
    return _Layer(attention, attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, own.mlp.down_proj)


def _look_at_neighbours(layer: _Layer, embedding: Tensor, theta: float) -> None:
    """Queries and keys read the shared coordinate into the fastest rotary pairs, turned against each
    other by the offset's angle: a head scores sharpness * sum of cos(theta_f * (distance - offset))."""
    width, half = layer.attention.head_dim, layer.attention.head_dim // 2
    normed = _SHARED / embedding.pow(2).mean(1).sqrt().mean()
    radius = math.sqrt(_SHARPNESS * math.sqrt(width)) / normed
    for weight in (layer.q_proj.weight, layer.k_proj.weight):
        weight.mul_(0.3)
        weight[:, 0] = 0
    for head in range(layer.attention.heads):
        offset = _OFFSETS[head % len(_OFFSETS)]
        first = head * width
        for pair in range(min(_FAST_PAIRS, half)):
            angle = offset * theta ** (-2 * pair / width)
            layer.q_proj.weight[first + pair, 0] = radius * math.cos(angle)
            layer.q_proj.weight[first + half + pair, 0] = radius * math.sin(angle)
            layer.k_proj.weight[first + pair, 0] = radius


def _find_same_neighbour(first: _Layer, second: _Layer, mask: Tensor, theta: float) -> None:
    """Queries and keys of a head both read what the first layer's head of the same index brought, in the
    slow rotary pairs. Keys of masked positions are pushed down: each would find itself first."""
    heads, width, half = second.attention.heads, second.attention.head_dim, second.attention.head_dim // 2
    slow = torch.tensor([theta ** (-2 * pair / width) < _SLOW_RADIANS for pair in range(half)]).repeat(2)
    brought = first.out.weight / first.out.weight.norm(dim=0)
    rows = _MATCH_GAIN * brought.T * slow.repeat(heads)[:, None]
    second.q_proj.weight.copy_(rows)
    second.k_proj.weight.copy_(rows)
    for slowest in range(half - 1, heads * width, width):
        second.q_proj.weight[slowest, 0] += _MASK_PENALTY
        second.k_proj.weight[slowest] -= _MASK_PENALTY * mask / mask.norm()
