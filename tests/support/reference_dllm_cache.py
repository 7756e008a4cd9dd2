"""dLLM-Cache written down row by row from its description, for one request, on LLaDA and on Dream.

As in ``reference_samplers`` nothing here is shared with what it checks. P prompt rows, T = P + gen_length rows.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from support.reference_samplers import (
    Algorithm,
    Dims,
    Margins,
    Names,
    Sampled,
    Ties,
    Weights,
    _dream_confidence,
    _even,
    _largest,
    _masked,
    _norm,
    _remainder_first,
    _rotate,
    _shifted,
    _split,
    _take,
    _timestep_count,
    attention,
    linear,
    mlp,
    names_of,
)
from support.tables import data_beside
from torch import Tensor

# (prompt_interval, gen_interval, transfer_ratio)
INTERVALS = data_beside(__file__, "reference_dllm_cache")["intervals"]


def dllm_cache(
    weights: Weights,
    dims: Dims,
    prompt: tuple[int, ...],
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    **cache: Any,
) -> Sampled:
    """LLaDA's loop over the response's logits; a token is the argmax of exponentials."""
    num_blocks, per_block = _even(gen_length, block_length, steps)
    p, x, margins = len(prompt), _masked(prompt, gen_length, dims), Margins()
    features = Features(weights=weights, dims=dims, prompt_len=p, margins=margins, **cache)
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
    weights: Weights, dims: Dims, prompt: tuple[int, ...], *, gen_length: int, steps: int, alg: Algorithm, **cache: Any
) -> Sampled:
    """Dream's own loop, without blocks. The response's first token is predicted by the prompt's last row."""
    p, x, margins = len(prompt), _masked(prompt, gen_length, dims), Margins()
    features = Features(weights=weights, dims=dims, prompt_len=p, margins=margins, **cache)
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
    margins: Margins
    ties: Ties = "stable"
    step: int = 0
    layers: list[dict[str, Tensor]] = field(default_factory=list)

    def logits(self, x: Tensor) -> Tensor:
        """[T, V] raw logits of one more forward."""
        names = names_of(self.weights)
        self.step += 1
        h = self.weights[f"{names.embedding}.weight"][x]
        if not self.layers:
            self.layers = [self._empty(names, n, h) for n in range(self.dims.layers)]
        for n, cache in enumerate(self.layers):
            h = self._layer(names, n, cache, h)
        h = _norm(h, self.weights[f"{names.final_norm}.weight"], self.dims.eps)
        return linear(self.weights, names.head, h)

    def _empty(self, names: Names, n: int, h: Tensor) -> dict[str, Tensor]:
        kv = len(self.weights[f"{names.layer.format(n)}{names.value}.weight"])
        widths = {"k": kv, "v": kv, "attention": h.shape[1], "mlp": h.shape[1]}
        return {key: h.new_full((len(h), width), math.nan) for key, width in widths.items()}

    def _layer(self, names: Names, n: int, cache: dict[str, Tensor], h: Tensor) -> Tensor:
        weights, dims, p, total = self.weights, self.dims, self.prompt_len, len(h)
        prefix = names.layer.format(n)
        prompt_due = n == 0 or (self.step - 1) % self.prompt_interval == 0
        response_due = n == 0 or (self.step - 1) % self.gen_interval == 0

        def of_layer(what: str, rows: Tensor) -> Tensor:
            return linear(weights, prefix + what, rows)

        hn = _norm(h, weights[f"{prefix}{names.attention_norm}.weight"], dims.eps)
        rows = [*(range(p) if prompt_due else ()), *(range(p, total) if response_due else ())]
        cache["k"][rows], cache["v"][rows] = of_layer(names.key, hn[rows]), of_layer(names.value, hn[rows])
        if not response_due and self.transfer_ratio > 0:
            value = of_layer(names.value, hn[p:])
            selected = [p + j for j in self._most_changed(value, cache["v"][p:])]
            cache["v"][p:] = value
            cache["k"][selected] = of_layer(names.key, hn[selected])
            rows += selected
        if rows:
            q = _rotate(_split(of_layer(names.query, hn[rows]), dims.heads), torch.tensor(rows), dims.theta)
            k = _rotate(_split(cache["k"], dims.kv_heads), torch.arange(total), dims.theta)
            v = _split(cache["v"], dims.kv_heads)
            cache["attention"][rows] = of_layer(names.attention_output, attention(q, k, v))
        h = h + cache["attention"]
        if rows:
            hm = _norm(h[rows], weights[f"{prefix}{names.mlp_norm}.weight"], dims.eps)
            cache["mlp"][rows] = mlp(weights, prefix, names, hm)
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
