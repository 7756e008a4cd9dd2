"""Dream's denoising schedule: time runs from 1 to eps, and each step keeps the share s / t of the masks."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

EPS = 1e-3


@lru_cache(maxsize=64)
def timesteps(num_steps: int) -> tuple[np.float32, ...]:
    """linspace(1, EPS, num_steps + 1) in float32, rounded as torch does it: from both ends inwards.

    The rounding decides tokens: a quota is a truncated product of these numbers.
    """
    start, end = np.float32(1.0), np.float32(EPS)
    # A float64 product and sum rounded once is the fused multiply-add that torch's kernel uses.
    step = float((end - start) / np.float32(num_steps))
    half = (num_steps + 1) // 2
    return tuple(
        np.float32(float(start) + step * i) if i < half else np.float32(float(end) - step * (num_steps - i))
        for i in range(num_steps + 1)
    )


def commit_share(step: int, num_steps: int) -> np.float32:
    """1 - s / t of step ``step``; 1 on the last."""
    if step >= num_steps - 1:
        return np.float32(1.0)
    times = timesteps(num_steps)
    return np.float32(1.0) - times[step + 1] / times[step]


def quota(masks_left: int, step: int, num_steps: int) -> int:
    """Tokens of step ``step``: truncated in float32, everything left on the last."""
    return int(np.float32(masks_left) * commit_share(step, num_steps))
