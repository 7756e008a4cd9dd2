"""The next token of each sequence: greedy, or by temperature and top-p from the sequence's own seed.

The draw is a function of (seed, position) alone, so a sequence gets the same tokens alone, in any batch and after
being preempted. Shapes: m sequences, V vocabulary rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from engines.knobs import Checked, Proportion, Range, Seed
from engines.runtime.noise import gumbel_argmax, row_keys


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Checked):
    """Temperature 0 is greedy. ``top_p`` keeps the fewest likely tokens that hold that probability, at least one."""

    temperature: Annotated[float, Range(least=0)] = 0.0
    top_p: Proportion = 1.0
    seed: Seed = 0


GREEDY = SamplingParams()


class Draws(NamedTuple):
    """Random numbers of m sequences, some of which do not take the likeliest token."""

    temperature: Tensor
    """[m] float64"""
    top_p: Tensor
    """[m] float64"""
    keys: Tensor
    """[m] int64, one for each sequence and position."""
    keeps_all: bool
    """Whether every ``top_p`` is 1."""


def draw_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """[m] int64 of seeds and positions [m] int64."""
    return row_keys(seeds, torch.zeros_like(seeds), positions)


def next_tokens(logits: Tensor, draws: Draws | None) -> Tensor:
    """[m] ids of logits [m, V]; without draws all greedy."""
    if draws is None:
        return likeliest(logits)
    kept = None if draws.keeps_all else nucleus(logits, draws.temperature, draws.top_p)
    return gumbel_argmax(logits, draws.temperature, draws.keys, kept)


def likeliest(logits: Tensor) -> Tensor:
    """[m] ids; of equally likely ones the lowest."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    # numpy's takes a tenth of the time of torch's in float32, and a twentieth in bfloat16.
    return torch.from_numpy(logits.float().numpy().argmax(axis=-1))


def nucleus(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """bool [m, V]: the likeliest tokens of softmax(logits / temperature) up to probability ``top_p``, at least one.

    Of equally likely ones that with the lower id comes first. Temperature 0 leaves the likeliest.
    """
    values, order = logits.to(torch.float64).sort(dim=-1, descending=True, stable=True)
    # From the largest down, so that no temperature overflows.
    scaled = (values - values[:, :1]) / temperature.clamp(min=torch.finfo(torch.float64).tiny).unsqueeze(1)
    share = torch.softmax(scaled, dim=-1)
    before = share.cumsum(dim=-1) - share
    return torch.zeros_like(values, dtype=torch.bool).scatter_(1, order, before < top_p.unsqueeze(1))
