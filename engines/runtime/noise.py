"""Gumbel noise as a pure function of (seed, draw, row position, vocabulary id).

The generator is counter-based: it has no state and no order of calls. So a request samples the same tokens alone, in any batch, in any
chunking of the logits and on any device.
"""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


_CACHED_DRAWS = 2**15
"""Draws that a host makes at once."""


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 (torch's is arithmetic)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 with wrap-around."""
    x = _shift_right(x, 30).bitwise_xor_(x).mul_(_MIX_1)
    x = _shift_right(x, 27).bitwise_xor_(x).mul_(_MIX_2)
    return _shift_right(x, 31).bitwise_xor_(x)


def uniform(keys: Tensor, width: int) -> Tensor:
    """Uniform draws in (0, 1), float64 [rows, width], for int64 row keys [rows]."""
    return _uniform_at(keys.unsqueeze(1), torch.arange(width, device=keys.device))


def _uniform_at(keys: Tensor, places: Tensor) -> Tensor:
    """The draws of ``uniform`` at int64 ``places`` of rows with these keys, in the shape that both broadcast to."""
    bits = _shift_right(mix(mix(keys) + (places + 1) * _GOLDEN), 11)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-53)


def row_keys(seeds: Tensor, draws: Tensor, positions: Tensor) -> Tensor:
    """One int64 key per row, from its request's seed, that request's step count and its position."""
    return mix(mix(mix(seeds + _GOLDEN) + draws * _MIX_1) + positions * _MIX_2)


def gumbel(u: Tensor) -> Tensor:
    """Standard Gumbel draws from uniform ones."""
    return torch.log(u).neg_().log_().neg_()


def gumbel_argmax(logits: Tensor, temperature: Tensor, keys: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Sample softmax(logits / temperature) per row; temperature 0 is the plain argmax.

    LLaDA draws argmax of exp(z) / (-ln u)^tau, which is argmax of z + tau * g with g standard Gumbel. We compute the log form in float64,
    so nothing overflows. Shapes: logits [rows, V], temperature and keys [rows]. With ``allowed`` [rows, V], only those tokens can be drawn,
    each in proportion.
    """
    if logits.device.type != "cpu" or logits.numel() <= _CACHED_DRAWS:
        return _argmax(logits, temperature, keys, allowed)
    # A host takes as many rows at once as its caches hold.
    num = max(1, _CACHED_DRAWS // logits.shape[1])
    rows = zip(logits.split(num), temperature.split(num), keys.split(num), strict=True)
    if allowed is None:
        return torch.cat([_argmax(*part) for part in rows])
    return torch.cat([_argmax_of_allowed(*part, mask) for part, mask in zip(rows, allowed.split(num), strict=True)])


def _argmax(logits: Tensor, temperature: Tensor, keys: Tensor, allowed: Tensor | None = None) -> Tensor:
    noisy = gumbel(uniform(keys, logits.shape[1])).mul_(temperature.unsqueeze(1)).add_(logits)
    if allowed is not None:
        noisy.masked_fill_(~allowed, -torch.inf)
    return noisy.argmax(dim=-1)


def _argmax_of_allowed(logits: Tensor, temperature: Tensor, keys: Tensor, allowed: Tensor) -> Tensor:
    """Return what ``_argmax`` does, with draws for the allowed tokens alone."""
    row, token = allowed.nonzero(as_tuple=True)
    noisy = torch.full(logits.shape, -torch.inf, dtype=torch.float64)
    noisy[row, token] = gumbel(_uniform_at(keys[row], token)).mul_(temperature[row]).add_(logits[row, token])
    return noisy.argmax(dim=-1)
