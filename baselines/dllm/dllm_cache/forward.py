"""dLLM-Cache's forward: every layer recomputes the columns that a step refreshes, and reads cached features of the others.

A batch has shape [n, W], with prompts padded on the left to the longest, so that prompts and responses are plain slices of columns.
Padding is computed but never attended to. Shapes: n members, W = prompt width + G columns, r recomputed columns, H / Hkv heads, D head
width, d model width; x and h are [rows, d]. Grouped-query attention works here; the published code reshapes keys to the query width and
fails on it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.dllm.dllm_cache.schedule import BatchClock, CacheStep, FeatureCacheConfig
from engines.attention.backends import HostVarlen, VarlenAttention, sdpa
from engines.dllm.executor.compose import Shared
from engines.dllm.executor.step import Forwarded, Guidance, StepLayout
from engines.dllm.plan import PlanItem, StepPlan
from engines.kernels.host import Runs, attend_runs
from engines.models.decoder import DreamModel
from engines.models.layers import rotate_halves, rotate_in_float32
from engines.models.llada import LLaDAModelLM
from engines.models.protocol import DiffusionModel, Rotary
from engines.runtime.rows import MIN_ROWS

# -- features ---------------------------------------------------------------------------------------------

Part = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Layer:
    attention_norm: Part
    query: Part
    """[rows, H * D], not rotated; ``key`` and ``value`` return [rows, Hkv * D]."""
    key: Part
    value: Part
    attention_output: Part
    """[rows, d] from the heads' results [rows, H * D]."""
    mlp_norm: Part
    gated_mlp: Part

    def mlp(self, x: Tensor) -> Tensor:
        """[rows, d] including the norm; the caller adds it to x."""
        return self.gated_mlp(self.mlp_norm(x))


_PARTS = json.loads(Path(__file__).with_name("parts.json").read_text(encoding="utf-8"))
"""Family -> our name of a layer's part -> the model's name. Dream's projections include their biases."""


class Layers:
    """A model taken apart into its layers."""

    def __init__(self, model: DiffusionModel) -> None:
        if not isinstance(model, LLaDAModelLM | DreamModel):
            raise TypeError(f"dLLM-Cache does not know the layers of {type(model).__name__}")
        names = _PARTS["llada" if isinstance(model, LLaDAModelLM) else "dream"]
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
    """One layer's features of every column. ``k`` is stored rotated: a column's position never changes. The published code rotates it
    again at every step, which gives the same bits."""

    k: Tensor
    v: Tensor
    attention: Tensor
    mlp: Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    request_ids: tuple[int, ...]
    padding: tuple[int, ...]
    """For each member, columns on the left that hold no tokens of it."""
    flat: Tensor
    """[n, W] indices into the flattened token store."""
    cos: Tensor
    sin: Tensor
    members: Tensor
    prompt_columns: Tensor
    key_mask: Tensor | None
    caches: tuple[LayerCache, ...]
    blind_caches: tuple[LayerCache, ...]
    """Caches for the forwards without prompts; empty unless a member asks for guidance."""


# -- the forward ------------------------------------------------------------------------------------------

Columns = tuple[slice | Tensor, slice | Tensor]
"""Indexes some columns of every member: two slices, or a member column [n, 1] and columns [n, r]."""

EVERY = slice(None)


class FeatureForward:
    """With ``masked_attention``, a batch of unequal lengths attends in one call, with a mask over the padding; else its members attend
    one by one. ``is_parity`` takes the library's order of equal similarities."""

    def __init__(
        self,
        shared: Shared,
        cache: FeatureCacheConfig,
        attention: VarlenAttention,
        *,
        masked_attention: bool,
        is_parity: bool,
    ) -> None:
        model = shared.model
        self._model, self._shape, self._dtype = model, model.config, next(model.parameters()).dtype
        self._parts = Layers(model)
        self._state, self._staging, self._timer = shared.state, shared.staging, shared.timer
        self._residual: Tensor | None = None
        """[N, V] difference that guidance makes to the logits, kept between two forwards without the prompts."""
        self._is_host = isinstance(attention, HostVarlen)
        self._masked_attention, self._is_parity = masked_attention, is_parity
        self._clock, self._blind_clock = BatchClock(cache), BatchClock(cache)
        self.batch: Batch | None = None

    def __call__(self, plan: StepPlan, items: Sequence[PlanItem], layout: StepLayout) -> Forwarded:
        step = self._clock.tick(plan)
        if plan.admitted:
            self.rest()  # free the last batch's caches before new ones are made
            self.batch = self._form_batch(plan, step)
            self._timer.lap("metadata")
        batch = self.batch
        assert batch is not None
        assert batch.request_ids == tuple(item.request_id for item in items)
        ids = self._state.tokens.take(batch.flat)
        hidden = self._hidden(batch, batch.caches, ids, step)
        guidance, blind_rows = None, 0
        if batch.blind_caches:
            guidance, blind_rows = self._guidance(batch, plan, ids, hidden)
        return Forwarded(hidden, guidance, len(items) * (step.query_rows + blind_rows))

    def rest(self) -> None:
        self.batch = self._residual = None

    def logits(self, hidden: Tensor, guidance: Guidance | None) -> Tensor:
        """Project to logits, and keep the difference that guidance makes until the next forward without the prompts."""
        logits = self._model.logits(hidden)
        if guidance is None:
            return logits
        if self._residual is None:
            self._residual = logits - self._model.logits(guidance.hidden)
        scale = guidance.scale.unsqueeze(1)
        return torch.where(scale > 0, (logits - self._residual) + (scale + 1) * self._residual, logits)

    def _form_batch(self, plan: StepPlan, step: CacheStep) -> Batch:
        """Allocate and index a new batch."""
        shape, state, staging = self._shape, self._state, self._staging
        n, width, device = len(plan.items), step.total_width, state.tokens.device
        padding = np.array([width - item.total_len for item in plan.items])
        slots = np.array(state.slots(plan.items))[:, None]
        position = np.maximum(np.arange(width)[None, :] - padding[:, None], 0)
        cos, sin = (table.unflatten(0, (n, width)) for table in self._parts.rotary(staging.ints(position.ravel())))
        key_mask = None
        if padding.any() and self._masked_attention:
            is_key = staging.ints(np.arange(width)[None, :] >= padding[:, None]) != 0
            key_mask = is_key[:, None, None, :]

        def features(*row: int) -> tuple[Tensor, ...]:
            return torch.empty((shape.n_layers, n, width, *row), dtype=self._dtype, device=device).unbind()

        def caches() -> tuple[LayerCache, ...]:
            kv = (shape.n_kv_heads, shape.head_dim)
            layers = zip(features(*kv), features(*kv), features(shape.d_model), features(shape.d_model), strict=True)
            return tuple(LayerCache(k=k, v=v, attention=a, mlp=f) for k, v, a, f in layers)

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

    def _guidance(self, batch: Batch, plan: StepPlan, ids: Tensor, hidden: Tensor) -> tuple[Guidance, int]:
        """Return classifier-free guidance, and how many rows a member's forward without its prompt computed.

        That forward has its own features and its own step count, and runs at some steps only. Between them we keep the difference that it
        made to the logits.
        """
        generations = self._state.generations(plan.items)
        gen_length = generations[0].gen_length
        scale = self._staging.floats(np.repeat([generation.cfg_scale for generation in generations], gen_length))
        scale = F.pad(scale.to(hidden.dtype), (0, len(hidden) - len(scale)))
        if not self._clock.config.refresh_guidance(self._clock.t):
            return Guidance(hidden, scale), 0
        step = self._blind_clock.tick(plan)
        blind = ids.clone()
        blind[:, : step.prompt_width] = self._shape.mask_token_id
        self._residual = None
        return Guidance(self._hidden(batch, batch.blind_caches, blind, step), scale), step.query_rows

    def _hidden(self, batch: Batch, caches: tuple[LayerCache, ...], ids: Tensor, step: CacheStep) -> Tensor:
        """Final-norm hidden states [n * G, d] of the rows that predict the responses."""
        x = self._parts.embed(ids)
        for n, (layer, cache) in enumerate(zip(self._parts.layers, caches, strict=True)):
            columns: Columns
            h: Tensor | None
            if n == 0 or (step.prompt and step.response):
                columns, h = self._refresh(layer, cache, batch, x, (EVERY, EVERY))
            else:
                columns, h = self._refresh_partly(layer, cache, batch, x, step)
            if h is not None:
                a = self._attention(layer, cache, batch, h, columns, has_prompt=n == 0 or step.prompt)
                cache.attention[columns] = a
            x = x + cache.attention
            if h is not None:
                cache.mlp[columns] = over_rows(layer.mlp, x[columns])
            x = x + cache.mlp
        shift = int(self._shape.shifts_logits)
        x = x[:, step.prompt_width - shift : step.total_width - shift]
        return _at_least(self._parts.final_norm(x).flatten(0, 1), MIN_ROWS)

    def _refresh(
        self, layer: Layer, cache: LayerCache, batch: Batch, x: Tensor, columns: Columns
    ) -> tuple[Columns, Tensor]:
        """Write new keys and values of the columns, and return the columns with their normed inputs."""
        h = layer.attention_norm(x[columns])
        self._write_keys(layer, cache, batch, h, columns)
        cache.v[columns] = self._heads(over_rows(layer.value, h))
        return columns, h

    def _refresh_partly(
        self, layer: Layer, cache: LayerCache, batch: Batch, x: Tensor, step: CacheStep
    ) -> tuple[Columns, Tensor | None]:
        """Refresh the whole prompt or response, and the most changed rows of a response that is not refreshed."""
        prompt, response = (EVERY, slice(step.prompt_width)), (EVERY, slice(step.prompt_width, None))
        columns: Columns = response
        h: Tensor | None = None
        if step.prompt or step.response:
            columns, h = self._refresh(layer, cache, batch, x, prompt if step.prompt else response)
        if not step.compares:
            return columns, h
        candidates = layer.attention_norm(x[response])
        value = over_rows(layer.value, candidates)
        selected = self._least_similar(value, cache.v[response].flatten(2), step.num_selected)
        cache.v[response] = self._heads(value)
        if not step.num_selected:
            return columns, h
        changed = candidates[batch.members, selected]
        selected = selected + step.prompt_width
        self._write_keys(layer, cache, batch, changed, (batch.members, selected))
        if h is None:
            return (batch.members, selected), changed
        columns = (batch.members, torch.cat((batch.prompt_columns, selected), dim=1))
        return columns, torch.cat((h, changed), dim=1)

    def _write_keys(self, layer: Layer, cache: LayerCache, batch: Batch, h: Tensor, columns: Columns) -> None:
        k = self._heads(over_rows(layer.key, h))
        cache.k[columns] = self._parts.rotate(k, batch.cos[columns], batch.sin[columns])

    def _least_similar(self, value: Tensor, previous: Tensor, count: int) -> Tensor:
        """[n, count] response rows whose value [n, G, Hkv * D] differs most in direction from that of the step before."""
        self._timer.lap_inside("gemm")
        similarity = F.cosine_similarity(value, previous, dim=-1, eps=1e-8)
        if self._is_parity:
            selected = similarity.topk(count, dim=1, largest=False).indices
        else:
            selected = similarity.sort(dim=1, stable=True).indices[:, :count]
        self._timer.lap_inside("selection")
        return selected

    def _attention(
        self, layer: Layer, cache: LayerCache, batch: Batch, h: Tensor, columns: Columns, *, has_prompt: bool
    ) -> Tensor:
        """Attention-block output [n, r, d] of the columns, which attend over every column of their member."""
        q = self._parts.rotate(self._heads(over_rows(layer.query, h)), batch.cos[columns], batch.sin[columns])
        timer = self._timer
        timer.lap_inside("gemm")
        if self._is_host and not self._masked_attention:
            out = _attend_members(q, cache, batch.padding, has_prompt=has_prompt)
        elif self._masked_attention or not any(batch.padding):
            out = sdpa(q, cache.k, cache.v, batch.key_mask)
        else:
            out = torch.zeros_like(q)
            for i, first in enumerate(batch.padding):
                # Padding is left of the prompt, so among the queries it comes first or is absent.
                queries, keys = slice(first if has_prompt else 0, None), slice(first, None)
                out[i, queries] = sdpa(q[i, None, queries], cache.k[i, None, keys], cache.v[i, None, keys])[0]
        timer.lap_inside("attention")
        return over_rows(layer.attention_output, out.flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self._shape.head_dim)


def _attend_members(q: Tensor, cache: LayerCache, padding: Sequence[int], *, has_prompt: bool) -> Tensor:
    """Let each member's queries [n, r, H, D] attend over its own columns, in one call."""
    n, r, width = *q.shape[:2], cache.k.shape[1]
    first, member = torch.tensor(padding, dtype=torch.int32), torch.arange(n, dtype=torch.int32)
    # Padding is left of the prompt, so among the queries it comes first or is absent.
    runs = Runs(member * r + first * has_prompt, member * r + r, member * width + first, width - first)
    out = torch.zeros(q.shape, dtype=q.dtype)
    attend_runs(q.flatten(0, 1), cache.k.flatten(0, 1), cache.v.flatten(0, 1), runs, out.flatten(0, 1))
    return out


def over_rows(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a row-wise part to the packed rows of x [n, r, in]; returns [n, r, out]."""
    rows = x.shape[0] * x.shape[1]
    return part(_at_least(x.reshape(rows, -1), MIN_ROWS))[:rows].view(*x.shape[:2], -1)


def _at_least(x: Tensor, rows: int) -> Tensor:
    return x if x.shape[0] >= rows else F.pad(x, (0, 0, 0, rows - x.shape[0]))
