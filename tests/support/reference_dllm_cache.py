"""dLLM-Cache written down row by row from its description, for one request, on LLaDA and on Dream.

As in ``reference_samplers`` nothing here is shared with what it checks. P prompt rows, T = P + gen_length rows.
"""

import math
from dataclasses import dataclass, field

import torch
from support.reference_samplers import (
    Algorithm,
    Dims,
    Margins,
    Sampled,
    Ties,
    Weights,
    _dream_confidence,
    _even,
    _is_dream,
    _largest,
    _masked,
    _norm,
    _remainder_first,
    _rotate,
    _shifted,
    _split,
    _take,
    _timestep_count,
)
from torch import Tensor

# (prompt_interval, gen_interval, transfer_ratio)
INTERVALS = (
    (100, 7, 0.25),
    (3, 2, 0.5),
    (5, 100, 0.3),
    (4, 6, 0.0),
    (100, 100, 0.0),
    (100, 5, 1.0),
    (2, 5, 0.02),
    (1, 3, 0.25),
    (3, 1, 0.25),
)


@dataclass(frozen=True, kw_only=True)
class Names:
    """Published tensor names; a layer's follow its own prefix."""

    embedding: str
    layer: str
    attention_norm: str
    query: str
    key: str
    value: str
    attention_output: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    final_norm: str
    head: str


LLADA_NAMES = Names(
    embedding="model.transformer.wte",
    layer="model.transformer.blocks.{}.",
    attention_norm="attn_norm",
    query="q_proj",
    key="k_proj",
    value="v_proj",
    attention_output="attn_out",
    mlp_norm="ff_norm",
    gate="ff_proj",
    up="up_proj",
    down="ff_out",
    final_norm="model.transformer.ln_f",
    head="model.transformer.ff_out",
)
DREAM_NAMES = Names(
    embedding="model.embed_tokens",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    attention_output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    final_norm="model.norm",
    head="lm_head",
)


def dllm_cache(
    weights: Weights,
    dims: Dims,
    prompt: tuple[int, ...],
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    prompt_interval: int,
    gen_interval: int,
    transfer_ratio: float,
    ties: Ties = "stable",
) -> Sampled:
    """LLaDA's loop over the response's logits; a token is the argmax of exponentials."""
    num_blocks, per_block = _even(gen_length, block_length, steps)
    p, x, margins = len(prompt), _masked(prompt, gen_length, dims), Margins()
    features = Features(
        weights=weights,
        dims=dims,
        prompt_len=p,
        prompt_interval=prompt_interval,
        gen_interval=gen_interval,
        transfer_ratio=transfer_ratio,
        ties=ties,
        margins=margins,
    )
    for b in range(num_blocks):
        s, e = p + b * block_length, p + (b + 1) * block_length
        quota = _remainder_first(int((x[s:e] == dims.mask_id).sum()), per_block)
        for i in range(per_block):
            logits = features.logits(x)
            token = torch.exp(logits).argmax(dim=1)
            confidence = torch.softmax(logits, dim=1).gather(1, token[:, None])[:, 0]
            level = {row: float(confidence[row]) for row in range(s, e) if int(x[row]) == dims.mask_id}
            _take(x, token, logits, level, quota[i], margins)
    return Sampled(token_ids=tuple(x[p:].tolist()), forwards=num_blocks * per_block, margins=margins)


def dream_dllm_cache(
    weights: Weights,
    dims: Dims,
    prompt: tuple[int, ...],
    *,
    gen_length: int,
    steps: int,
    alg: Algorithm,
    prompt_interval: int,
    gen_interval: int,
    transfer_ratio: float,
    ties: Ties = "stable",
) -> Sampled:
    """Dream's own loop, without blocks. The response's first token is predicted by the prompt's last row."""
    p, x, margins = len(prompt), _masked(prompt, gen_length, dims), Margins()
    features = Features(
        weights=weights,
        dims=dims,
        prompt_len=p,
        prompt_interval=prompt_interval,
        gen_interval=gen_interval,
        transfer_ratio=transfer_ratio,
        ties=ties,
        margins=margins,
    )
    times = torch.linspace(1, 1e-3, steps + 1)
    for i in range(steps):
        logits = _shifted(features.logits(x))
        token, confidence = _dream_confidence(logits, alg)
        level = {row: float(confidence[row]) for row in range(len(x)) if int(x[row]) == dims.mask_id}
        _take(x, token, logits, level, _timestep_count(len(level), times, i, margins), margins)
    return Sampled(token_ids=tuple(x[p:].tolist()), forwards=steps, margins=margins)


@dataclass(kw_only=True)
class Features:
    """Per layer K and V before rotation, attention and MLP outputs, and one step count for the whole generation."""

    weights: Weights
    dims: Dims
    prompt_len: int
    prompt_interval: int
    gen_interval: int
    transfer_ratio: float
    ties: Ties
    margins: Margins
    step: int = 0
    layers: list[dict[str, Tensor]] = field(default_factory=list)

    def logits(self, x: Tensor) -> Tensor:
        """[T, V] raw logits of one more forward."""
        names = DREAM_NAMES if _is_dream(self.weights) else LLADA_NAMES
        self.step += 1
        h = self.weights[f"{names.embedding}.weight"][x]
        if not self.layers:
            self.layers = [self._empty(names, n, h) for n in range(self.dims.layers)]
        for n, cache in enumerate(self.layers):
            h = self._layer(names, n, cache, h)
        h = _norm(h, self.weights[f"{names.final_norm}.weight"], self.dims.eps)
        return h @ self.weights[f"{names.head}.weight"].T

    def _empty(self, names: Names, n: int, h: Tensor) -> dict[str, Tensor]:
        kv = len(self.weights[f"{names.layer.format(n)}{names.value}.weight"])
        widths = {"k": kv, "v": kv, "attention": h.shape[1], "mlp": h.shape[1]}
        return {key: h.new_full((len(h), width), math.nan) for key, width in widths.items()}

    def _layer(self, names: Names, n: int, cache: dict[str, Tensor], h: Tensor) -> Tensor:
        weights, dims, p, total = self.weights, self.dims, self.prompt_len, len(h)
        prefix = names.layer.format(n)
        prompt_due = n == 0 or (self.step - 1) % self.prompt_interval == 0
        response_due = n == 0 or (self.step - 1) % self.gen_interval == 0

        def linear(what: str, rows: Tensor) -> Tensor:
            out = rows @ weights[f"{prefix}{what}.weight"].T
            bias = weights.get(f"{prefix}{what}.bias")
            return out if bias is None else out + bias

        hn = _norm(h, weights[f"{prefix}{names.attention_norm}.weight"], dims.eps)
        rows = [*(range(p) if prompt_due else ()), *(range(p, total) if response_due else ())]
        cache["k"][rows], cache["v"][rows] = linear(names.key, hn[rows]), linear(names.value, hn[rows])
        if not response_due and self.transfer_ratio > 0:
            value = linear(names.value, hn[p:])
            selected = [p + j for j in self._most_changed(value, cache["v"][p:])]
            cache["v"][p:] = value
            cache["k"][selected] = linear(names.key, hn[selected])
            rows += selected
        if rows:
            q = _rotate(_split(linear(names.query, hn[rows]), dims.heads), torch.tensor(rows), dims.theta)
            k = _rotate(_split(cache["k"], dims.kv_heads), torch.arange(total), dims.theta)
            v = _split(cache["v"], dims.kv_heads)
            heads = []
            for head in range(dims.heads):
                shared = head // (dims.heads // dims.kv_heads)
                heads.append(torch.softmax(q[head] @ k[shared].T / math.sqrt(q.shape[-1]), dim=1) @ v[shared])
            cache["attention"][rows] = linear(names.attention_output, torch.cat(heads, dim=1))
        h = h + cache["attention"]
        if rows:
            hm = _norm(h[rows], weights[f"{prefix}{names.mlp_norm}.weight"], dims.eps)
            gate, up = linear(names.gate, hm), linear(names.up, hm)
            cache["mlp"][rows] = linear(names.down, gate * torch.sigmoid(gate) * up)
        return h + cache["mlp"]

    def _most_changed(self, new: Tensor, old: Tensor) -> list[int]:
        """The int(gen_length * transfer_ratio) response rows whose value turned furthest from the step before's."""
        new, old = new.double(), old.double()
        cosine = (new * old).sum(dim=1) / (new.norm(dim=1).clamp(min=1e-8) * old.norm(dim=1).clamp(min=1e-8))
        count = int(len(new) * self.transfer_ratio)
        if 0 < count < len(new):
            ordered = cosine.sort().values
            self.margins.similarity = min(self.margins.similarity, float(ordered[count] - ordered[count - 1]))
        return _largest(-cosine, count, self.ties)
