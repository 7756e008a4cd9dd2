"""What a published sampler pays per step and nothing else: plain batched torch over padded ids.

No engine, no scheduler, no packing: one padded forward per step, monolithic logits, a softmax over all
of them, top-k, an index update. Two readings of one method, with the same ids:

    bare        functions of the weights and the fewest operators the method needs: a lower bound
    published   what the authors' own code does. Modules are called; norms and rotations are single operators in
                regions without autocast; every layer slices the rotary tables; cached keys are rotated again at
                every step (Fast-dLLM, dLLM-Cache) or cloned before some are chosen (Sparse-dLLM); top-k runs member
                by member, and tokens are committed through masks over the whole segment. Left out, so that it is a
                lower bound of theirs: dropout modules, output objects, dLLM-Cache's hooks and dictionaries

A batch is [n, W] with prompts padded on the left, as published code pads, so that every cache policy
is slices of columns. Shapes: L query columns, H / Hkv heads, D head width, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from time import process_time
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from bare_model import Attend, BareModel, Layer, attention, published_rotate, rotate
from torch import Tensor

from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from engines.dllm.config import GenerationConfig
from engines.models.llada import LLaDAModelLM

StepKind = Literal["refresh", "build", "reuse", "response", "partial"]
"""``response`` and ``partial`` are dLLM-Cache's: the response recomputed as a whole, or its most changed rows."""


@dataclass(kw_only=True)
class BareSampler:
    """One batch from masks to text; greedy, a fixed number of tokens per step.

    ``published`` is the reading. ``stable`` breaks ties by the lower index, which the library's top-k does not promise; it costs a
    sort and is meant for comparing ids, not for timing.
    """

    confidence_dtype: ClassVar[torch.dtype | None] = None
    """Dtype of the softmax; None is the logits' own."""
    turns_keys = True
    """Whether keys are rotated as they are made, not as they are used."""

    network: LLaDAModelLM
    prompts: Sequence[Sequence[int]]
    generation: GenerationConfig
    published: bool = False
    stable: bool = False

    def __post_init__(self) -> None:
        model, prompts, generation = self.network, self.prompts, self.generation
        self.model = BareModel(model, as_modules=self.published)
        self.mask_id = model.config.mask_token_id
        self.start = max(len(prompt) for prompt in prompts)
        self.width = self.start + generation.gen_length
        self.padding = torch.tensor([self.start - len(prompt) for prompt in prompts])
        self.ids = torch.full((len(prompts), self.width), self.mask_id)
        for i, prompt in enumerate(prompts):
            row = [0] * (self.start - len(prompt)) + list(prompt)
            self.ids[i, : self.start] = torch.tensor(row)
        columns = torch.arange(self.width)
        is_ragged = bool(self.padding.any())
        positions = (columns - self.padding[:, None]).clamp(min=0) if is_ragged else columns[None]
        self.cos, self.sin = self.model.rotary(positions)
        self.is_key = columns >= self.padding[:, None]
        self.key_mask = self.is_key[:, None, None] if is_ragged else None
        self.model_s = 0.0
        """Processor time in the layers and the output head, over all steps so far."""

    @property
    def token_ids(self) -> list[list[int]]:
        return self.ids[:, self.start :].tolist()

    def steps(self) -> Iterator[StepKind]:
        """Runs one step per item."""
        generation = self.generation
        per_block = generation.steps // generation.num_blocks
        for start in range(self.start, self.width, generation.block_length):
            end = start + generation.block_length
            quota, extra = divmod(generation.block_length, per_block)
            for i in range(per_block):
                kind, first, logits = self.forward(i, start, end)
                self.commit(logits, first, end, quota + (i < extra))
                yield kind
                if self.is_done(start, end):
                    break

    def forward(self, i: int, start: int, end: int) -> tuple[StepKind, int, Tensor]:
        """(kind, first column that has logits, logits) of step ``i`` of the block ``start`` .. ``end``."""
        return "refresh", 0, self.run(slice(None), self.full)

    def full(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, self.key_mask)

    def run(self, columns: slice, attend: Attend, wanted: slice = slice(None)) -> Tensor:
        """Logits of the ``wanted`` ones among ``columns``."""
        started = process_time()
        # One pair for all layers, or slices of its own for each.
        tables = (self.tables(columns) for _ in self.model.layers) if self.published else repeat(self.tables(columns))
        x = self.model.hidden(self.ids[:, columns], tables, attend, turns_keys=self.turns_keys or not self.published)
        logits = self.model.logits(x[:, wanted])
        self.model_s += process_time() - started
        return logits

    def tables(self, columns: slice) -> tuple[Tensor, Tensor]:
        return self.cos[:, :, columns], self.sin[:, :, columns]

    def reduce(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        token = logits.argmax(dim=-1)
        p = F.softmax(logits, dim=-1, dtype=self.confidence_dtype)
        return token, p.gather(-1, token.unsqueeze(-1)).squeeze(-1)

    def commit(self, logits: Tensor, first: int, end: int, quota: int) -> None:
        if quota == 0:
            return
        token, confidence = self.reduce(logits)
        ids = self.ids[:, first : first + logits.shape[1]]
        is_masked = ids == self.mask_id
        confidence = torch.where(is_masked, confidence, -torch.inf)
        confidence[:, end - first :] = -torch.inf
        if self.published:
            token = torch.where(is_masked, token, ids)
            is_chosen = torch.zeros_like(is_masked)
            for row, values in enumerate(confidence):
                is_chosen[row, self.largest(values, quota)] = True
            ids[is_chosen] = token[is_chosen]
            return
        chosen = self.largest(confidence, quota)
        ids.scatter_(1, chosen, token.gather(1, chosen))

    def largest(self, x: Tensor, count: int) -> Tensor:
        if self.stable:
            return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]
        return x.topk(count, dim=-1).indices

    def is_done(self, start: int, end: int) -> bool:
        """Whether the block ends before its steps do."""
        return False


class FastDllm(BareSampler):
    """Float64 confidence, and a block ends when it holds no mask."""

    confidence_dtype = torch.float64

    def is_done(self, start: int, end: int) -> bool:
        return not bool((self.ids[:, start:end] == self.mask_id).any())


class Cached(BareSampler):
    """Keys and values of one forward over all columns, kept for the block; published code keeps keys as
    they were before rotation."""

    turns_keys = False

    def refresh(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer == 0:
            self.keys, self.values = [], []
        self.keys.append(k)
        self.values.append(v)
        return self.over_all(q, k, v)

    def over_all(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self.published:
            keys = published_rotate(keys, self.cos, self.sin)
        return attention(q, keys, values, self.key_mask)


class DualCache(Cached, FastDllm):
    def forward(self, i: int, start: int, end: int) -> tuple[StepKind, int, Tensor]:
        if i == 0:
            return "refresh", 0, self.run(slice(None), self.refresh)
        columns = slice(start, end)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer][:, :, columns], self.values[layer][:, :, columns] = k, v
            return self.over_all(q, self.keys[layer], self.values[layer])

        return "reuse", start, self.run(columns, attend)


class PrefixCache(Cached, FastDllm):
    def forward(self, i: int, start: int, end: int) -> tuple[StepKind, int, Tensor]:
        if i == 0:
            return "refresh", 0, self.run(slice(None), self.refresh)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys = torch.cat((self.keys[layer][:, :, :start], k), dim=2)
            values = torch.cat((self.values[layer][:, :, :start], v), dim=2)
            return self.over_all(q, keys, values)

        return "reuse", start, self.run(slice(start, None), attend)


class SparseDllm(BareSampler):
    """A block's second forward keeps the context that its mean query scores highest."""

    retention_ratio = 0.5
    pool_kernel = 3
    per_head = False
    block_logits = False
    """Whether a full forward gives logits of the block alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        outside = self.width - self.padding - self.generation.block_length
        kept = (outside * self.retention_ratio).long()
        self.kept = int(kept.max())
        self.reuse_mask: Tensor | None = None
        if self.key_mask is not None:
            is_kept = torch.arange(self.kept) < kept[:, None]
            own = torch.ones(len(self.prompts), self.generation.block_length, dtype=torch.bool)
            self.reuse_mask = torch.cat((is_kept, own), dim=1)[:, None, None]

    def forward(self, i: int, start: int, end: int) -> tuple[StepKind, int, Tensor]:
        if i > 1:
            return "reuse", start, self.run(slice(start, end), self.reuse)
        wanted = slice(start, end) if self.block_logits else slice(None)
        if i == 0:
            return "refresh", wanted.start or 0, self.run(slice(None), self.full, wanted)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        if self.key_mask is not None:
            self.context_mask = torch.cat((self.key_mask[..., 0, :start], self.key_mask[..., 0, end:]), dim=2)
        return "build", wanted.start or 0, self.run(slice(None), partial(self.build, start, end), wanted)

    def build(self, start: int, end: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cached = (k.clone(), v.clone()) if self.published else (k, v)
        keys, values = (torch.cat((x[:, :, :start], x[:, :, end:]), dim=2) for x in cached)
        n, kv_heads, _, depth = keys.shape
        query = q[:, :, start:end].mean(dim=2).view(n, kv_heads, -1, depth)
        score = query @ keys.transpose(2, 3)
        score = score.amax(dim=2) if self.per_head else score.flatten(1, 2).mean(dim=1, keepdim=True)
        if self.key_mask is not None:
            score = score.masked_fill(~self.context_mask, -torch.inf)
        if self.pool_kernel > 1:
            score = F.max_pool1d(score, self.pool_kernel, stride=1, padding=self.pool_kernel // 2)
            if self.key_mask is not None:
                score = score.masked_fill(~self.context_mask, -torch.inf)
        chosen = self.largest(score, self.kept).unsqueeze(-1).expand(-1, kv_heads, -1, depth)
        self.keys.append(keys.gather(2, chosen))
        self.values.append(values.gather(2, chosen))
        return attention(q, k, v, self.key_mask)

    def reuse(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = torch.cat((self.keys[layer], k), dim=2)
        values = torch.cat((self.values[layer], v), dim=2)
        return attention(q, keys, values, self.reuse_mask)


class DllmServe(SparseDllm):
    """Its own top-k for every head, logits of the block alone, the mask token never chosen; padded
    like the others, where published code packs."""

    per_head = True
    block_logits = True

    def reduce(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        p = F.softmax(logits, dim=-1)
        p[..., self.mask_id] = -1
        confidence, token = p.max(dim=-1)
        return token, confidence


class DllmCache(BareSampler):
    """Response features refreshed at intervals, the most changed rows in between; the prompt's once."""

    cache = FeatureCacheConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache.prompt_interval < self.generation.steps:
            raise ValueError(f"steps={self.generation.steps} exceed prompt_interval={self.cache.prompt_interval}")
        self.t = 0
        config, n = self.network.config, len(self.prompts)
        self.members = torch.arange(n)[:, None]
        kv = (config.n_layers, n, config.n_kv_heads, self.width, config.head_dim)
        out = (config.n_layers, n, self.width, config.d_model)
        self.keys, self.values = torch.empty(kv), torch.empty(kv)
        self.attention, self.feed = torch.empty(out), torch.empty(out)

    def forward(self, i: int, start: int, end: int) -> tuple[StepKind, int, Tensor]:
        self.t += 1
        started = process_time()
        step = self.cache.step(self.t, self.start, self.generation.gen_length)
        x = self.model.embed(self.ids)
        for n, layer in enumerate(self.model.layers):
            x = self.layer(n, layer, x, prompt=step.prompt, response=step.response, selected=step.num_selected)
        logits = self.model.logits(x[:, self.start :])
        self.model_s += process_time() - started
        kind: StepKind = "refresh" if step.prompt else "response" if step.response else "partial"
        return kind, self.start, logits

    def layer(self, n: int, layer: Layer, x: Tensor, *, prompt: bool, response: bool, selected: int) -> Tensor:
        keys, values, out, feed = self.keys[n], self.values[n], self.attention[n], self.feed[n]
        p, h = self.start, layer.attention_norm(x)
        if n == 0 or (prompt and response):
            columns = slice(None)
        elif response:
            columns = slice(p, None)
        else:
            return self.update(layer, x, h[:, p:], keys, values, out, feed, selected)
        own, (cos, sin) = h[:, columns], self.tables(columns)
        keys[:, :, columns] = self.turned(layer.k(own), cos, sin)
        values[:, :, columns] = self.model.heads(layer.v(own))
        q = self.model.rotate_q(self.model.heads(layer.q(own)), cos, sin)
        out[:, columns] = self.attend(layer, q, keys, values)
        x = x + out
        feed[:, columns] = layer.mlp(x[:, columns])
        return x + feed

    def turned(self, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Published code keeps keys as they were before rotation."""
        k = self.model.heads(k)
        return k if self.published else rotate(k, cos, sin)

    def attend(self, layer: Layer, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self.published:
            keys = published_rotate(keys, self.cos, self.sin)
        return layer.out(attention(q, keys, values, self.key_mask).transpose(1, 2).flatten(2))

    def update(
        self, layer: Layer, x: Tensor, h: Tensor, keys: Tensor, values: Tensor, out: Tensor, feed: Tensor, selected: int
    ) -> Tensor:
        """h are the normed response rows."""
        if self.cache.transfer_ratio == 0:
            return x + out + feed
        p, members = self.start, self.members
        value = self.model.heads(layer.v(h))
        fresh, before = (v.transpose(1, 2).flatten(2) for v in (value, values[:, :, p:]))
        chosen = self.largest(-F.cosine_similarity(fresh, before, dim=-1, eps=1e-8), selected)
        values[:, :, p:] = value
        if selected == 0:
            return x + out + feed
        rows, columns = h[members, chosen], chosen + p
        # [n, 1, r, D]: the tables of an even batch have one row for all.
        table = members if self.cos.shape[0] > 1 else torch.zeros_like(members)
        cos, sin = (t[:, 0][table, columns].unsqueeze(1) for t in (self.cos, self.sin))
        keys.transpose(1, 2)[members, columns] = self.turned(layer.k(rows), cos, sin).transpose(1, 2)
        q = self.model.rotate_q(self.model.heads(layer.q(rows)), cos, sin)
        out[members, columns] = self.attend(layer, q, keys, values)
        x = x + out
        feed[members, columns] = layer.mlp(x[members, columns])
        return x + feed

    def reduce(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The token is the argmax of exponentials."""
        token = logits.exp().argmax(dim=-1)
        return token, F.softmax(logits, dim=-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
