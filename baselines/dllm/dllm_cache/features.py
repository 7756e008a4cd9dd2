"""What dLLM-Cache keeps between the steps of a batch: features of every layer and column; and the parts of a layer one by one, under
one name for all published models, which is how it recomputes them.

A batch is laid out [n, W] with prompts padded on the left to the longest, so that prompts and responses are plain slices of columns;
padding is computed and never attended to. n members, W = prompt width + G columns, Hkv heads, D head width, d model width; x and h are
[rows, d].
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from baselines.dllm.dllm_cache.schedule import CacheStep
from engines.dllm.executor.state import RequestState
from engines.dllm.plan import StepPlan
from engines.models.config import ModelConfig
from engines.models.decoder import DreamModel
from engines.models.layers import rotate_halves, rotate_in_float32
from engines.models.llada import LLaDAModelLM
from engines.models.protocol import DiffusionModel, Rotary
from engines.runtime.device import Staging

Part = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Layer:
    attention_norm: Part
    query: Part
    """[rows, H * D], not rotated; likewise ``key`` and ``value`` [rows, Hkv * D]."""
    key: Part
    value: Part
    attention_output: Part
    """[rows, d] of the heads' results [rows, H * D]."""
    mlp_norm: Part
    gated_mlp: Part

    def mlp(self, x: Tensor) -> Tensor:
        """[rows, d], its norm included; to be added to x."""
        return self.gated_mlp(self.mlp_norm(x))


_LLADA = {
    "attention_norm": "attn_norm",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "attention_output": "attn_out",
    "mlp_norm": "ff_norm",
    "gated_mlp": "mlp",
}
"""Our names of a layer's parts -> those of the model."""
_DREAM = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gated_mlp": "mlp",
}
"""Under Qwen2's names; the projections bring their biases along."""


class Layers:
    """A model, taken apart."""

    def __init__(self, model: DiffusionModel) -> None:
        if not isinstance(model, LLaDAModelLM | DreamModel):
            raise TypeError(f"dLLM-Cache does not know the layers of {type(model).__name__}")
        names = _LLADA if isinstance(model, LLaDAModelLM) else _DREAM
        self.layers = [
            Layer(**{part: attrgetter(name)(block) for part, name in names.items()}) for block in model.blocks
        ]
        self.embed, self.final_norm = model.embedding, model.final_norm
        self.rotate = rotate_in_float32 if model.rotates_in_float32 else rotate_halves
        self._model = model

    def rotary(self, positions: Tensor) -> Rotary:
        """cos, sin [N, 1, D] of positions [N], in the dtype of the rotation."""
        cos, sin = self._model.rotary(positions)
        dtype = cos.dtype if self._model.rotates_in_float32 else self._model.dtype
        return cos.to(dtype), sin.to(dtype)


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
