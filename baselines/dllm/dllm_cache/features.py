"""What dLLM-Cache keeps between the steps of a batch: features of every layer and column.

A batch is laid out [n, W] with prompts padded on the left to the longest, so that prompts and responses
are plain slices of columns, whatever the prompt lengths; padding is computed and never attended to.

Shapes: n members, W = prompt width + G columns, Hkv heads, D head width, d model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baselines.dllm.dllm_cache.layers import Layers
from baselines.dllm.dllm_cache.schedule import CacheStep
from engines.dllm.executor.state import RequestState
from engines.dllm.plan import StepPlan
from engines.models.config import ModelConfig
from engines.runtime.device import Staging


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """One layer's features of every column. ``k`` is stored rotated: a column's position never changes,
    so rotating it again at every step, as published, gives the same bits."""

    k: Tensor
    v: Tensor
    attention: Tensor
    mlp: Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    request_ids: tuple[int, ...]
    padding: tuple[int, ...]
    """Columns on the left of each member that are no tokens of its."""
    flat: Tensor
    """[n, W] indices into the flattened token store."""
    cos: Tensor
    sin: Tensor
    members: Tensor
    prompt_columns: Tensor
    key_mask: Tensor | None
    caches: tuple[LayerCache, ...]
    blind_caches: tuple[LayerCache, ...]
    """Caches of the forwards without the prompts; empty unless a member asks for guidance."""


def form_batch(
    plan: StepPlan,
    step: CacheStep,
    shape: ModelConfig,
    parts: Layers,
    state: RequestState,
    staging: Staging,
    *,
    dtype: torch.dtype,
    masks_keys: bool,
) -> Batch:
    """``masks_keys`` where the batch attends in one call, padding included."""
    n, width, device = len(plan.items), step.total_width, state.tokens.device
    padding = np.array([width - item.total_len for item in plan.items])
    slots = np.array(state.slots(plan.items))[:, None]
    position = np.maximum(np.arange(width)[None, :] - padding[:, None], 0)
    cos, sin = (table.unflatten(0, (n, width)) for table in parts.rotary(staging.ints(position.ravel())))
    key_mask = None
    if padding.any() and masks_keys:
        is_key = staging.ints(np.arange(width)[None, :] >= padding[:, None]) != 0
        key_mask = is_key[:, None, None, :]

    def features(*row: int) -> tuple[Tensor, ...]:
        return torch.empty((shape.n_layers, n, width, *row), dtype=dtype, device=device).unbind()

    def caches() -> tuple[LayerCache, ...]:
        kv = (shape.n_kv_heads, shape.head_dim)
        each = zip(features(*kv), features(*kv), features(shape.d_model), features(shape.d_model), strict=True)
        return tuple(LayerCache(k=k, v=v, attention=a, mlp=f) for k, v, a, f in each)

    is_guided = any(generation.cfg_scale > 0 for generation in state.generations(plan.items))
    return Batch(
        request_ids=tuple(item.request_id for item in plan.items),
        padding=tuple(padding.tolist()),
        flat=staging.ints(slots * state.width + position),
        cos=cos,
        sin=sin,
        members=torch.arange(n, device=device).unsqueeze(1),
        prompt_columns=torch.arange(step.prompt_width, device=device).expand(n, -1),
        key_mask=key_mask,
        caches=caches(),
        blind_caches=caches() if is_guided else (),
    )
