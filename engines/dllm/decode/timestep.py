"""Dream's denoising schedule: time runs from 1 to EPS, and each step keeps the share s / t of the masks.

All in float32, rounded as torch rounds: a quota is a truncated product of these numbers, so their last
bit decides tokens.
"""

from __future__ import annotations

import struct
from functools import lru_cache

_EPS = 1e-3


def _float32(x: float) -> float:
    """``x`` rounded to the nearest float32."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


@lru_cache(maxsize=64)
def timesteps(num_steps: int) -> tuple[float, ...]:
    """linspace(1, EPS, num_steps + 1), built from both ends inwards.

    A product and sum in double precision, rounded once, is the fused multiply-add of torch's kernel.
    """
    end = _float32(_EPS)
    step = _float32(_float32(end - 1.0) / num_steps)
    half = (num_steps + 1) // 2
    return tuple(_float32(1.0 + step * i if i < half else end - step * (num_steps - i)) for i in range(num_steps + 1))


def commit_share(step: int, num_steps: int) -> float:
    """1 - s / t of step ``step``; 1 on the last."""
    if step >= num_steps - 1:
        return 1.0
    times = timesteps(num_steps)
    return _float32(1.0 - _float32(times[step + 1] / times[step]))


def quota(masks_left: int, step: int, num_steps: int) -> int:
    """Tokens of step ``step``: truncated in float32, everything left on the last."""
    return int(_float32(masks_left * commit_share(step, num_steps)))
