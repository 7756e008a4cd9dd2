"""Gumbel noise as a pure function of (seed, draw, row position, vocabulary id).

The generator is counter-based: it has no state and no order of calls. So a request samples the same tokens alone, in any batch, in any
chunking of the logits and on any device.
"""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 with wrap-around."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(keys: Tensor, width: int) -> Tensor:
    """Uniform draws in (0, 1), float64 [rows, width], for int64 row keys [rows]."""
    counters = torch.arange(1, width + 1, dtype=torch.int64, device=keys.device) * _GOLDEN
    bits = _shift_right(mix(mix(keys).unsqueeze(1) + counters), 11)
    return (bits.to(torch.float64) + 0.5) * 2.0**-53


def row_keys(seeds: Tensor, draws: Tensor, positions: Tensor) -> Tensor:
    """One int64 key per row, from its request's seed, that request's step count and its position."""
    return mix(mix(mix(seeds + _GOLDEN) + draws * _MIX_1) + positions * _MIX_2)


def gumbel(u: Tensor) -> Tensor:
    """Standard Gumbel draws from uniform ones."""
    return -torch.log(-torch.log(u))


def gumbel_argmax(logits: Tensor, temperature: Tensor, keys: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Sample softmax(logits / temperature) per row; temperature 0 is the plain argmax.

    LLaDA draws argmax of exp(z) / (-ln u)^tau, which is argmax of z + tau * g with g standard Gumbel. We compute the log form in float64,
    so nothing overflows. Shapes: logits [rows, V], temperature and keys [rows]. With ``allowed`` [rows, V], only those tokens can be drawn,
    each in proportion.
    """
    noisy = logits.to(torch.float64) + temperature.unsqueeze(1) * gumbel(uniform(keys, logits.shape[1]))
    if allowed is not None:
        noisy.masked_fill_(~allowed, -torch.inf)
    return noisy.argmax(dim=-1)
