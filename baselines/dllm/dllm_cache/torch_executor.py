"""dLLM-Cache on a torch model: static batches, per-layer feature caches of the whole sequence.

A batch is laid out [n, W] with prompts padded on the left to the longest, so that prompts and responses
are plain slices of columns, whatever the prompt lengths; padding is computed and never attended to.
Grouped-query attention works here; the published code reshapes keys to the query width and fails on it.

Shapes: n members, W = prompt width + G columns, r recomputed columns, H / Hkv heads, D head width, d model width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.dllm.dllm_cache.layers import Layer, layers_of
from baselines.dllm.dllm_cache.schedule import BatchClock, CacheStep, FeatureCacheConfig, refuse_unsupported
from baselines.dllm.static.executor import MonolithicTorchExecutor
from engines.attention import sdpa
from engines.dllm.config import EngineConfig
from engines.dllm.decode.denoise import Reduced, Reduction, Sampling, choose_parity, reduce_in_parts
from engines.dllm.executor.rows import ItemTable, PackedRows
from engines.dllm.executor.step import MIN_ROWS, Block, Guidance, StepLayout
from engines.dllm.plan import PlanItem, StepPlan
from engines.dllm.request import Request
from engines.errors import require

Columns = tuple[slice | Tensor, slice | Tensor]
"""Index of some columns of every member: two slices, or a member column [n, 1] and columns [n, r]."""

EVERY = slice(None)


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
    """Of the forwards without the prompts; none unless a member asks for guidance."""


class FeatureCacheTorchExecutor(MonolithicTorchExecutor):
    """Each member gets the ids it would get alone, on CPU bit for bit.

    There, members of unequal length attend one by one over their own columns; ``masked_attention``
    (the default elsewhere) is one call for the batch with a mask over the padding, which rounds
    differently. At a temperature above zero the noise is the engine's, a function of the request
    alone; published code draws it in the logits' dtype from a global generator.
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        cache: FeatureCacheConfig,
        *,
        batch_size: int,
        masked_attention: bool | None = None,
        stop_ids: Collection[int] | None = None,
        profile_every: int = 0,
    ) -> None:
        decode = config.decode
        require(
            decode.first_step == "ranked",
            f"first_step={decode.first_step!r} is not implemented for dLLM-Cache, which has no first step of a block: "
            f"use 'ranked'",
        )
        require(
            model.config.shifts_logits or (decode.confidence, decode.confidence_dtype) == ("max_prob", "native"),
            f"confidence={decode.confidence!r} in {decode.confidence_dtype!r} is not LLaDA's under dLLM-Cache: "
            f"use 'max_prob' in 'native'",
        )
        super().__init__(model, config, 0, num_slots=batch_size, stop_ids=stop_ids, profile_every=profile_every)
        self.parts = layers_of(model)
        self.masked_attention = self.device.type != "cpu" if masked_attention is None else masked_attention
        self._clock, self._blind_clock = BatchClock(cache), BatchClock(cache)
        self._batch: Batch | None = None
        self._residual: Tensor | None = None

    # ---- requests -------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        super().validate(request)
        refuse_unsupported(request)

    def release(self, request_id: int) -> tuple[int, ...]:
        token_ids = super().release(request_id)
        if not self._slots:
            self._batch = self._residual = None
        return token_ids

    def _form(self, plan: StepPlan, step: CacheStep) -> Batch:
        shape, n, width = self.model.config, len(plan.items), step.total_width
        padding = np.array([width - item.total_len for item in plan.items])
        slots = np.array([[self._slots[item.request_id]] for item in plan.items])
        position = np.maximum(np.arange(width)[None, :] - padding[:, None], 0)
        cos, sin = (table.unflatten(0, (n, width)) for table in self.parts.rotary(self._ints(position.ravel())))
        key_mask = None
        if padding.any() and self.masked_attention:
            is_key = self._ints(np.arange(width)[None, :] >= padding[:, None]) != 0
            key_mask = is_key[:, None, None, :]

        def features(*row: int) -> tuple[Tensor, ...]:
            return torch.empty((shape.n_layers, n, width, *row), dtype=self.dtype, device=self.device).unbind()

        def caches() -> tuple[LayerCache, ...]:
            kv = (shape.n_kv_heads, shape.head_dim)
            parts = zip(features(*kv), features(*kv), features(shape.d_model), features(shape.d_model), strict=True)
            return tuple(LayerCache(k=k, v=v, attention=a, mlp=f) for k, v, a, f in parts)

        is_guided = any(self._requests[item.request_id].generation.cfg_scale > 0 for item in plan.items)
        return Batch(
            request_ids=tuple(item.request_id for item in plan.items),
            padding=tuple(padding.tolist()),
            flat=self._ints(slots * self.tokens.shape[1] + position),
            cos=cos,
            sin=sin,
            members=torch.arange(n, device=self.device).unsqueeze(1),
            prompt_columns=torch.arange(step.prompt_width, device=self.device).expand(n, -1),
            key_mask=key_mask,
            caches=caches(),
            blind_caches=caches() if is_guided else (),
        )

    # ---- one step -------------------------------------------------------------------------

    def _forward(
        self, plan: StepPlan, items: list[PlanItem], layout: StepLayout
    ) -> tuple[Tensor, Guidance | None, int]:
        step = self._clock.tick(plan)
        if plan.admitted:
            self._batch = self._residual = None  # the last batch's caches go before new ones are made
            self._batch = self._form(plan, step)
            self._timer.lap("metadata")
        batch = self._batch
        assert batch is not None
        assert batch.request_ids == tuple(item.request_id for item in items)
        ids = self.tokens.take(batch.flat)
        hidden = self._hidden(batch, batch.caches, ids, step)
        guidance, blind_rows = None, 0
        if batch.blind_caches:
            guidance, blind_rows = self._guidance(batch, plan, ids, hidden)
        return hidden, guidance, len(items) * (step.query_rows + blind_rows)

    def _guidance(self, batch: Batch, plan: StepPlan, ids: Tensor, hidden: Tensor) -> tuple[Guidance, int]:
        """Classifier-free guidance, and the rows a member's forward without its prompt computed for it.

        That forward has features and a count of its own and runs at some steps only. Between them
        the difference it made to the logits is kept (``_logits``).
        """
        generations = [self._requests[item.request_id].generation for item in plan.items]
        gen_length = generations[0].gen_length
        scale = self._floats(np.repeat([generation.cfg_scale for generation in generations], gen_length))
        scale = F.pad(scale.to(hidden.dtype), (0, len(hidden) - len(scale)))
        if not self._clock.config.refresh_guidance(self._clock.t):
            return Guidance(hidden, scale), 0
        step = self._blind_clock.tick(plan)
        blind = ids.clone()
        blind[:, : step.prompt_width] = self.model.config.mask_token_id
        self._residual = None
        return Guidance(self._hidden(batch, batch.blind_caches, blind, step), scale), step.query_rows

    def _hidden(self, batch: Batch, caches: tuple[LayerCache, ...], ids: Tensor, step: CacheStep) -> Tensor:
        """Final-norm hidden states [n * G, d] of the rows that predict the responses."""
        x = self.parts.embed(ids)
        for n, (layer, cache) in enumerate(zip(self.parts.layers, caches, strict=True)):
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
        shift = int(self.model.config.shifts_logits)
        x = x[:, step.prompt_width - shift : step.total_width - shift]
        return _at_least(self.parts.final_norm(x).flatten(0, 1), MIN_ROWS)

    def _refresh(
        self, layer: Layer, cache: LayerCache, batch: Batch, x: Tensor, columns: Columns
    ) -> tuple[Columns, Tensor]:
        """New keys and values of the columns; their normed inputs."""
        h = layer.attention_norm(x[columns])
        self._write_keys(layer, cache, batch, h, columns)
        cache.v[columns] = self._heads(over_rows(layer.value, h))
        return columns, h

    def _refresh_partly(
        self, layer: Layer, cache: LayerCache, batch: Batch, x: Tensor, step: CacheStep
    ) -> tuple[Columns, Tensor | None]:
        """Prompt or response as a whole, and the most changed rows of a response that is not refreshed."""
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
        chosen = candidates[batch.members, selected]
        selected = selected + step.prompt_width
        self._write_keys(layer, cache, batch, chosen, (batch.members, selected))
        if h is None:
            return (batch.members, selected), chosen
        columns = (batch.members, torch.cat((batch.prompt_columns, selected), dim=1))
        return columns, torch.cat((h, chosen), dim=1)

    def _write_keys(self, layer: Layer, cache: LayerCache, batch: Batch, h: Tensor, columns: Columns) -> None:
        k = self._heads(over_rows(layer.key, h))
        cache.k[columns] = self.parts.rotate(k, batch.cos[columns], batch.sin[columns])

    def _least_similar(self, value: Tensor, previous: Tensor, count: int) -> Tensor:
        """[n, count] response rows whose value [n, G, Hkv * D] turned furthest from that of the step before."""
        self._timer.lap_inside("gemm")
        similarity = F.cosine_similarity(value, previous, dim=-1, eps=1e-8)
        if self.config.tie_policy == "parity":
            selected = similarity.topk(count, dim=1, largest=False).indices
        else:
            selected = similarity.sort(dim=1, stable=True).indices[:, :count]
        self._timer.lap_inside("selection")
        return selected

    def _attention(
        self, layer: Layer, cache: LayerCache, batch: Batch, h: Tensor, columns: Columns, *, has_prompt: bool
    ) -> Tensor:
        """Attention-block output [n, r, d] of the columns, over every column of their member."""
        q = self.parts.rotate(self._heads(over_rows(layer.query, h)), batch.cos[columns], batch.sin[columns])
        timer = self._timer
        timer.lap_inside("gemm")
        if self.masked_attention or not any(batch.padding):
            out = sdpa(q, cache.k, cache.v, batch.key_mask)
        else:
            out = torch.zeros_like(q)
            for i, first in enumerate(batch.padding):
                # Padding is left of the prompt, so among the queries it is first or not there.
                own, keys = slice(first if has_prompt else 0, None), slice(first, None)
                out[i, own] = sdpa(q[i, None, own], cache.k[i, None, keys], cache.v[i, None, keys])[0]
        timer.lap_inside("attention")
        return over_rows(layer.attention_output, out.flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.model.config.head_dim)

    # ---- decoding -------------------------------------------------------------------------

    def _packed_rows(self, items: list[PlanItem], table: ItemTable) -> PackedRows:
        """The hidden rows are the responses', end to end; a run starts where its position 0 would lie."""
        shift = int(self.model.config.shifts_logits)
        gen_length = self._requests[items[0].request_id].generation.gen_length
        starts = np.arange(len(items)) * gen_length - (table.total_len - gen_length - shift)
        num_rows, none = len(items) * gen_length, np.empty(0, dtype=np.int64)
        return PackedRows(
            num_rows=num_rows,
            num_refresh_rows=num_rows,
            base=np.append(starts, starts[-1] + table.total_len[-1]),
            position=none,
            flat=none,
            pool_row=none,
            key_len=none,
        )

    def _reduce_at_once(
        self, logits: Tensor, wanted: Tensor | slice, reduction: Reduction, sampling: Sampling | None
    ) -> Reduced:
        if self.model.config.shifts_logits:
            # Dream's own rule ranks probabilities.
            return reduce_in_parts(reduction, logits[wanted], sampling)
        by_exponentials = partial(reduce_exponentials, suppress_id=reduction.suppress_id)
        token, confidence = reduce_in_parts(by_exponentials, logits, None)
        token, confidence = token[wanted], confidence[wanted]
        if sampling is None:
            return token, confidence
        drawn, drawn_confidence = reduce_in_parts(reduction, logits[wanted], sampling)
        hot = sampling.temperature > 0
        drawn_confidence = drawn_confidence.to(confidence.dtype)
        return (
            torch.where(hot, drawn, token),
            torch.where(hot | sampling.random_remasking, drawn_confidence, confidence),
        )

    def _logits(self, hidden: Tensor, guidance: Guidance | None) -> Tensor:
        """Logits; the difference guidance makes is kept until the next forward without the prompts."""
        logits = self.model.logits(hidden)
        if guidance is None:
            return logits
        if self._residual is None:
            self._residual = logits - self.model.logits(guidance.hidden)
        scale = guidance.scale.unsqueeze(1)
        return torch.where(scale > 0, (logits - self._residual) + (scale + 1) * self._residual, logits)

    def _choose(self, items: list[PlanItem], conf: Tensor, block: Block) -> tuple[Tensor, list[int] | None]:
        if self.config.tie_policy != "parity" or self.config.decode.quota == "origin":
            return super()._choose(items, conf, block)
        # Published code ranks the response alone.
        commit = [item.commit for item in items]
        requests = [self._requests[item.request_id] for item in items]
        offsets = [item.block_start - request.prompt_len for item, request in zip(items, requests, strict=True)]
        return choose_parity(conf, commit, offsets, [r.generation.gen_length for r in requests]), commit


def reduce_exponentials(logits: Tensor, _: Sampling | None = None, *, suppress_id: int | None) -> Reduced:
    """Greedy token and its probability, both in the logits' dtype.

    The token is the argmax of exp(logits), as published: where exp overflows or distinct logits share
    an exponential, the lowest id wins.
    """
    odds = logits.exp()
    if suppress_id is not None:
        odds[:, suppress_id] = -1
    token = odds.argmax(dim=-1)
    del odds
    return token, torch.softmax(logits, dim=-1).gather(1, token.unsqueeze(1)).squeeze(1)


def over_rows(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies a row-wise part to the packed rows of x [n, r, in]; [n, r, out]."""
    rows = x.shape[0] * x.shape[1]
    return part(_at_least(x.reshape(rows, -1), MIN_ROWS))[:rows].view(*x.shape[:2], -1)


def _at_least(x: Tensor, rows: int) -> Tensor:
    return x if x.shape[0] >= rows else F.pad(x, (0, 0, 0, rows - x.shape[0]))
