"""Samplers written down step by step from their published descriptions, for one request.

Nothing here is shared with ``engines``: an own dense forward over the published tensor names, with
explicit softmax and rotation, and one plain loop per sampler. Slow on purpose. Every function also
reports by how much its decisions were decided, so that a test case can be told from a coin toss.

P prompt tokens, T = P + gen_length, a block covers [s, e). Shapes: x [T], q [H, n, D], k and v [Hkv, n, D].
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from support.tables import data_beside
from torch import Tensor

Weights = Mapping[str, Tensor]
Ties = Literal["stable", "topk", "last"]
"""Among equals ``stable`` takes the lower index, ``last`` the higher, ``topk`` whatever torch.topk does, as published."""
Draw = Callable[[int, int], float]
"""(step, position) -> a number in [0, 1): the source of chance is given, not part of a sampler."""
Selection = Literal["head", "uniform", "attended", "dense"]


@dataclass(frozen=True, kw_only=True)
class Dims:
    heads: int
    kv_heads: int
    layers: int
    mask_id: int
    theta: float = 500000.0
    eps: float = 1e-5


@dataclass(kw_only=True)
class Margins:
    """The smallest distance from another outcome, over the whole generation; inf where nothing was decided."""

    confidence: float = math.inf
    """Last committed minus first not committed; with a threshold, distance of a candidate from it."""
    token: float = math.inf
    """Top-1 minus top-2 logit of committed positions."""
    selection: float = math.inf
    """Last kept minus first dropped importance; exact ties are not counted here."""
    selection_ties: int = 0
    """Selections whose cut falls between equal importances."""
    similarity: float = math.inf
    """dLLM-Cache: last recomputed minus first not recomputed cosine."""
    schedule: float = math.inf
    """Dream: distance of a product that is rounded down to a count from the nearest whole number."""


@dataclass(kw_only=True)
class Sampled:
    token_ids: tuple[int, ...]
    forwards: int
    margins: Margins = field(default_factory=Margins)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one layer saw: rotated queries and keys, and values."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Context of one layer: per KV head its own rows, [Hkv, kept, D]."""

    k: Tensor
    v: Tensor


# ---- the model ----------------------------------------------------------------------------------


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


LLADA_NAMES, DREAM_NAMES = (
    Names(**data_beside(__file__, "reference_samplers")["names"][family]) for family in ("llada", "dream")
)


def names_of(weights: Weights) -> Names:
    return DREAM_NAMES if _is_dream(weights) else LLADA_NAMES


def linear(weights: Weights, name: str, rows: Tensor) -> Tensor:
    """With a bias where there is one: Dream's q, k and v."""
    out = rows @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return out if bias is None else out + bias


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[n, H D] of q [H, n, D] over all rows of k and v [Hkv, m, D]."""
    group, heads = len(q) // len(k), []
    for head in range(len(q)):
        scores = q[head] @ k[head // group].T / math.sqrt(q.shape[-1])
        odds = torch.exp(scores - scores.max(dim=1, keepdim=True).values)
        heads.append(odds / odds.sum(dim=1, keepdim=True) @ v[head // group])
    return torch.cat(heads, dim=1)


def mlp(weights: Weights, layer: str, names: Names, h: Tensor) -> Tensor:
    gate, up = linear(weights, layer + names.gate, h), linear(weights, layer + names.up, h)
    return linear(weights, layer + names.down, gate / (1 + torch.exp(-gate)) * up)


def forward(
    weights: Weights, dims: Dims, ids: Tensor, positions: Tensor, cache: list[Kept] | None
) -> tuple[Tensor, list[Layer]]:
    """Raw logits [n, V] of ``ids`` at ``positions``; rows see each other and, first, the cached rows. Dream's row i predicts the token at
    i + 1."""
    names = names_of(weights)
    x = weights[f"{names.embedding}.weight"][ids]
    seen = []
    for n in range(dims.layers):
        layer = names.layer.format(n)
        h = _norm(x, weights[f"{layer}{names.attention_norm}.weight"], dims.eps)
        q = _rotate(_split(linear(weights, layer + names.query, h), dims.heads), positions, dims.theta)
        k = _rotate(_split(linear(weights, layer + names.key, h), dims.kv_heads), positions, dims.theta)
        v = _split(linear(weights, layer + names.value, h), dims.kv_heads)
        seen.append(Layer(q=q, k=k, v=v))
        if cache is not None:
            k, v = torch.cat((cache[n].k, k), dim=1), torch.cat((cache[n].v, v), dim=1)
        x = x + linear(weights, layer + names.attention_output, attention(q, k, v))
        x = x + mlp(weights, layer, names, _norm(x, weights[f"{layer}{names.mlp_norm}.weight"], dims.eps))
    return linear(weights, names.head, _norm(x, weights[f"{names.final_norm}.weight"], dims.eps)), seen


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(dim=1, keepdim=True) + eps)


def _split(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], heads, -1).transpose(0, 1)


def _rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x cos + rotate_half(x) sin with the D/2 angles repeated twice, never interleaved."""
    half = x.shape[-1] // 2
    cos, sin = _turns(tuple(positions.tolist()), x.shape[-1], theta, x.dtype)
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


@lru_cache(maxsize=512)
def _turns(positions: tuple[int, ...], width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Every layer and step asks for the same ones."""
    frequencies = theta ** -(torch.arange(width // 2, dtype=torch.float32) * 2 / width)
    angles = torch.outer(torch.tensor(positions, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=1).to(dtype)
    return angles.cos(), angles.sin()


# ---- samplers -----------------------------------------------------------------------------------


def llada(
    weights: Weights,
    dims: Dims,
    prompt: tuple[int, ...],
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    cfg_scale: float = 0.0,
    draw: Draw | None = None,
    ties: Ties = "stable",
) -> Sampled:
    """The reference loop: every step forwards the whole sequence; a predicted mask id is not guarded against. Confidences are drawn at
    random where ``draw`` is given."""
    num_blocks, per_block = _even(gen_length, block_length, steps)
    x = _masked(prompt, gen_length, dims)
    margins = Margins()
    for b in range(num_blocks):
        s, e = len(prompt) + b * block_length, len(prompt) + (b + 1) * block_length
        quota = _remainder_first(int((x[s:e] == dims.mask_id).sum()), per_block)
        for i in range(per_block):
            logits = _guided(weights, dims, x, len(prompt), cfg_scale)
            if draw is None:
                _commit(x, logits, 0, s, e, quota[i], dims, ties, margins)
                continue
            level = {row: draw(b * per_block + i, row) for row in range(s, e) if int(x[row]) == dims.mask_id}
            _take(x, logits.argmax(dim=1), logits, level, quota[i], margins)
    return Sampled(token_ids=tuple(x[len(prompt) :].tolist()), forwards=num_blocks * per_block, margins=margins)


def sparse_dllm(
    weights: Weights,
    dims: Dims,
    prompt: tuple[int, ...],
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    keep_ratio: float,
    kernel_size: int,
    ties: Ties = "stable",
) -> Sampled:
    """Per block: a full step, a full step that builds the cache, then block-only steps over it."""
    num_blocks, per_block = _even(gen_length, block_length, steps)
    x, total = _masked(prompt, gen_length, dims), len(prompt) + gen_length
    margins = Margins()
    for b in range(num_blocks):
        s, e = len(prompt) + b * block_length, len(prompt) + (b + 1) * block_length
        quota = _remainder_first(int((x[s:e] == dims.mask_id).sum()), per_block)
        cache: list[Kept] | None = None
        for i in range(per_block):
            if i < 2:
                logits, seen = forward(weights, dims, x, torch.arange(total), None)
                if i == 1:
                    num_kept = int((total - block_length) * keep_ratio)
                    cache = [_select(layer, s, e, num_kept, kernel_size, "uniform", ties, margins) for layer in seen]
                _commit(x, logits, 0, s, e, quota[i], dims, ties, margins)
            else:
                logits, _ = forward(weights, dims, x[s:e], torch.arange(s, e), cache)
                _commit(x, logits, s, s, e, quota[i], dims, ties, margins)
    return Sampled(token_ids=tuple(x[len(prompt) :].tolist()), forwards=num_blocks * per_block, margins=margins)


def dllm_serve(
    weights: Weights,
    dims: Dims,
    prompt: tuple[int, ...],
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    keep_ratio: float = 0.5,
    kernel_size: int = 3,
    selection: Selection = "head",
    whole_layer: int | None = None,
    delay_step: int = 1,
    first_token_rule: bool = False,
    threshold: float | None = None,
    factor: float | None = None,
    ties: Ties = "stable",
) -> Sampled:
    """Any number of steps and a last block of any length; a block ends when no mask is left in it.

    ``first_token_rule``: a block's first position is committed in its uncached step, whatever its confidence. On Dream
    it always is, in the block's first step: later ones shift their own rows, and that row has none in front of it.
    """
    shifts = _is_dream(weights)
    x, total = _masked(prompt, gen_length, dims), len(prompt) + gen_length
    ends = [min(len(prompt) + end, total) for end in range(block_length, gen_length + block_length, block_length)]
    # Steps 1..steps are laid over the region like a ruler: a step belongs to the block that its tip is in.
    share = [0] * len(ends)
    for step in range(1, steps + 1):
        share[next(b for b, e in enumerate(ends) if (e - len(prompt)) * steps >= step * gen_length)] += 1
    margins, forwards, s = Margins(), 0, len(prompt)
    for e, num_steps in zip(ends, share, strict=True):
        cache: list[Kept] | None = None
        i = 0
        while left := int((x[s:e] == dims.mask_id).sum()):
            k = 1 if threshold is not None or factor is not None else math.ceil(left / (num_steps - i))
            if i <= delay_step:
                logits, seen = forward(weights, dims, x, torch.arange(total), None)
                if i == delay_step:
                    outside = total - (e - s)
                    num_kept = outside if selection == "dense" else max(1, int(outside * keep_ratio))
                    cache = [
                        _select(
                            each,
                            s,
                            e,
                            num_kept,
                            kernel_size,
                            "dense" if at == whole_layer else selection,
                            ties,
                            margins,
                        )
                        for at, each in enumerate(seen)
                    ]
                offset = 0
            else:
                logits, _ = forward(weights, dims, x[s:e], torch.arange(s, e), cache)
                offset = s
            _commit(
                x,
                _shifted(logits) if shifts else logits,
                offset,
                s,
                e,
                k,
                dims,
                ties,
                margins,
                suppress_mask=True,
                threshold=threshold,
                factor=factor,
                force_first=i == 0 if shifts else first_token_rule and i < delay_step,
            )
            forwards, i = forwards + 1, i + 1
        s = e
    return Sampled(token_ids=tuple(x[len(prompt) :].tolist()), forwards=forwards, margins=margins)


Cache = Literal["none", "prefix", "dual"]
Algorithm = Literal["origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold"]


def fast_dllm(
    weights: Weights,
    dims: Dims,
    prompt: tuple[int, ...],
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    cache: Cache,
    threshold: float | None = None,
    factor: float | None = None,
) -> Sampled:
    """One full forward per block, then its window over what that forward saw elsewhere; a block ends when no mask is
    left. ``forwards`` counts as published: a cached loop runs once more on a block its full forward completed."""
    num_blocks, per_block = _even(gen_length, block_length, steps)
    x, total, p = _masked(prompt, gen_length, dims), len(prompt) + gen_length, len(prompt)
    margins, forwards = Margins(), 0
    for b in range(num_blocks):
        s, e = p + b * block_length, p + (b + 1) * block_length
        end = total if cache == "prefix" else e
        quota = _remainder_first(e - s, per_block)
        frozen: list[Kept] | None = None
        i = 0
        while open_ := [row for row in range(s, e) if int(x[row]) == dims.mask_id]:
            if cache == "none" or i == 0:
                logits, seen = forward(weights, dims, x, torch.arange(total), None)
                frozen = _outside(seen, s, end, total)
            else:
                logits, _ = forward(weights, dims, x[s:end], torch.arange(s, end), frozen)
                logits = torch.cat((logits.new_zeros(s, logits.shape[1]), logits))
            confidence, token = torch.softmax(logits.double(), dim=1).max(dim=1)
            level = {row: float(confidence[row]) for row in open_}
            if threshold is not None:
                count = _threshold_count(level, threshold, margins)
            elif factor is not None:
                count = _factor_count(level, factor, margins)
            else:
                count = quota[i]
            _take(x, token, logits, level, count, margins)
            forwards, i = forwards + 1, i + 1
        if cache != "none" and i == 1:
            forwards += 1
    return Sampled(token_ids=tuple(x[p:].tolist()), forwards=forwards, margins=margins)


def dream(
    weights: Weights,
    dims: Dims,
    prompt: tuple[int, ...],
    *,
    gen_length: int,
    steps: int,
    alg: Algorithm,
    draw: Draw | None = None,
) -> Sampled:
    """Dream's own loop: no blocks, no cache, logits shifted right by one."""
    x, total, p = _masked(prompt, gen_length, dims), len(prompt) + gen_length, len(prompt)
    times = torch.linspace(1, 1e-3, steps + 1)
    margins = Margins()
    for i in range(steps):
        raw, _ = forward(weights, dims, x, torch.arange(total), None)
        logits = _shifted(raw)
        open_ = [row for row in range(total) if int(x[row]) == dims.mask_id]
        token, confidence = _dream_confidence(logits, alg)
        if alg == "origin":
            assert draw is not None
            share = 1.0 if i == steps - 1 else float(1 - times[i + 1] / times[i])
            for row in open_:
                if draw(i, row) < share:
                    x[row] = token[row]
            continue
        count = _timestep_count(len(open_), times, i, margins)
        _take(x, token, logits, {row: float(confidence[row]) for row in open_}, count, margins)
    return Sampled(token_ids=tuple(x[p:].tolist()), forwards=steps, margins=margins)


def dream_blocks(
    weights: Weights,
    dims: Dims,
    prompt: tuple[int, ...],
    *,
    gen_length: int,
    block_length: int,
    steps: int,
    alg: Algorithm,
    cache: Literal["prefix", "dual", "sparse"],
    threshold: float = 0.9,
    keep_ratio: float = 0.5,
    kernel_size: int = 3,
    ties: Ties = "stable",
) -> Sampled:
    """Fast-dLLM's and Sparse-dLLM's loops on Dream: a block's full forward commits its first position alone, windows
    shift their own rows. Sparse-dLLM's second forward is full as well and selects; its every step runs."""
    num_blocks, per_block = _even(gen_length, block_length, steps)
    x, total, p = _masked(prompt, gen_length, dims), len(prompt) + gen_length, len(prompt)
    times = torch.linspace(1, 1e-3, per_block + 1)
    margins, forwards = Margins(), 0
    for b in range(num_blocks):
        s, e = p + b * block_length, p + (b + 1) * block_length
        end = total if cache == "prefix" else e
        frozen: list[Kept] | None = None
        i = 0
        while True:
            open_ = [row for row in range(s, e) if int(x[row]) == dims.mask_id]
            if (i == per_block) if cache == "sparse" else not open_:
                break
            if i < (2 if cache == "sparse" else 1):
                raw, seen = forward(weights, dims, x, torch.arange(total), None)
                logits = _shifted(raw)
                if cache != "sparse":
                    frozen = _outside(seen, s, end, total)
                elif i == 1:
                    kept = int((total - block_length) * keep_ratio)
                    frozen = [_select(layer, s, e, kept, kernel_size, "uniform", ties, margins) for layer in seen]
            else:
                raw, _ = forward(weights, dims, x[s:end], torch.arange(s, end), frozen)
                logits = torch.cat((raw.new_zeros(s, raw.shape[1]), _shifted(raw)))
            # Whatever its algorithm is called, the cached loop of Fast-dLLM ranks by entropy.
            token, confidence = _dream_confidence(
                logits, alg if alg == "confidence_threshold" or cache == "sparse" else "entropy"
            )
            level = {row: float(confidence[row]) for row in open_}
            if i == 0:
                level, count = {s: level[s]}, 1
            elif alg == "confidence_threshold":
                count = _threshold_count(level, threshold, margins)
            else:
                count = _timestep_count(len(open_), times, i, margins)
            _take(x, token, logits, level, count, margins)
            forwards, i = forwards + 1, i + 1
        if cache != "sparse" and i == 1:
            forwards += 1
    return Sampled(token_ids=tuple(x[p:].tolist()), forwards=forwards, margins=margins)


# ---- their parts --------------------------------------------------------------------------------


def _is_dream(weights: Weights) -> bool:
    return "model.embed_tokens.weight" in weights


def _shifted(raw: Tensor) -> Tensor:
    """Row i of what was forwarded predicts the token at i + 1; the first row keeps its own."""
    return torch.cat((raw[:1], raw[:-1]))


def _guided(weights: Weights, dims: Dims, x: Tensor, prompt_len: int, cfg_scale: float) -> Tensor:
    """Logits of every row, those of the sequence with its prompt masked subtracted."""
    positions = torch.arange(len(x))
    logits, _ = forward(weights, dims, x, positions, None)
    if cfg_scale == 0:
        return logits
    blind = x.clone()
    blind[:prompt_len] = dims.mask_id
    without, _ = forward(weights, dims, blind, positions, None)
    return without + (cfg_scale + 1) * (logits - without)


def _timestep_count(masks: int, times: Tensor, step: int, margins: Margins) -> int:
    """``times`` [steps + 1] in float32, as is the product that is rounded down; the last step commits what is left."""
    if step == len(times) - 2:
        return masks
    product = float(masks * (1 - times[step + 1] / times[step]))
    margins.schedule = min(margins.schedule, abs(product - round(product)) if masks else math.inf)
    return int(product)


def _masked(prompt: tuple[int, ...], gen_length: int, dims: Dims) -> Tensor:
    return torch.tensor([*prompt, *[dims.mask_id] * gen_length])


def _even(gen_length: int, block_length: int, steps: int) -> tuple[int, int]:
    assert gen_length % block_length == 0
    num_blocks = gen_length // block_length
    assert steps % num_blocks == 0
    return num_blocks, steps // num_blocks


def _outside(seen: list[Layer], start: int, end: int, total: int) -> list[Kept]:
    rows = [*range(start), *range(end, total)]
    return [Kept(k=layer.k[:, rows], v=layer.v[:, rows]) for layer in seen]


def _dream_confidence(logits: Tensor, alg: Algorithm) -> tuple[Tensor, Tensor]:
    p = torch.softmax(logits, dim=1)
    best = p.topk(2, dim=1)
    if alg == "entropy":
        return best.indices[:, 0], (p * torch.log(p + 1e-10)).sum(dim=1)
    if alg == "topk_margin":
        return best.indices[:, 0], best.values[:, 0] - best.values[:, 1]
    return best.indices[:, 0], best.values[:, 0]


def _threshold_count(level: Mapping[int, float], threshold: float, margins: Margins) -> int:
    """The best always, and all that reach the threshold."""
    margins.confidence = min([margins.confidence, *(abs(c - threshold) for c in level.values())])
    return max(1, sum(c >= threshold for c in level.values()))


def _factor_count(level: Mapping[int, float], factor: float, margins: Margins) -> int:
    """All in front of the first that misses its level; all of them if that is the very last."""
    ordered = sorted(level.values(), reverse=True)
    for j in range(2, len(ordered) + 1):
        needed = 1 - factor / (j + 1)
        margins.confidence = min(margins.confidence, abs(ordered[j - 1] - needed))
        if ordered[j - 1] < needed:
            return j if j == len(ordered) else j - 1
    return len(ordered)


def _take(x: Tensor, token: Tensor, logits: Tensor, level: Mapping[int, float], count: int, margins: Margins) -> None:
    """Commits the ``count`` best of ``level`` (position -> confidence), the lower of equals."""
    ranked = sorted(level, key=lambda row: (-level[row], row))
    if 0 < count < len(ranked):
        margins.confidence = min(margins.confidence, level[ranked[count - 1]] - level[ranked[count]])
    for row in ranked[:count]:
        best, second = logits[row].topk(2).values.tolist()
        margins.token = min(margins.token, best - second)
        x[row] = token[row]


def _remainder_first(masks: int, steps: int) -> list[int]:
    return [masks // steps + (i < masks % steps) for i in range(steps)]


def _largest(values: Tensor, count: int, ties: Ties) -> list[int]:
    """Indices of the ``count`` largest, largest first."""
    if ties == "topk":
        return torch.topk(values, count).indices.tolist()
    sign = -1 if ties == "last" else 1
    return sorted(range(len(values)), key=lambda i: (-float(values[i]), sign * i))[:count]


def _commit(
    x: Tensor,
    logits: Tensor,
    offset: int,
    s: int,
    e: int,
    count: int,
    dims: Dims,
    ties: Ties,
    margins: Margins,
    *,
    suppress_mask: bool = False,
    threshold: float | None = None,
    factor: float | None = None,
    force_first: bool = False,
) -> None:
    """Low-confidence remasking over rows [offset, offset + n) of the sequence; changes ``x`` in place."""
    probability = torch.softmax(logits, dim=1)
    choosable = logits.clone()
    if suppress_mask:
        choosable[:, dims.mask_id] = -math.inf
    token = choosable.argmax(dim=1)
    confidence = probability.gather(1, token[:, None])[:, 0]
    for row in range(len(confidence)):
        if not (s <= offset + row < e) or int(x[offset + row]) != dims.mask_id:
            confidence[row] = -math.inf
    if factor is not None:
        level = {row: float(c) for row, c in enumerate(confidence) if c > -math.inf}
        if force_first and s - offset in level:
            level[s - offset] = math.inf
        count = _factor_count(level, factor, margins)
    chosen: list[int] = []
    if force_first and confidence[s - offset] > -math.inf:
        chosen.append(s - offset)
        confidence[s - offset] = -math.inf
    ranked = _largest(confidence, count - len(chosen), ties)
    chosen += ranked
    candidates = sorted((float(c) for c in confidence if c > -math.inf), reverse=True)
    if threshold is not None:
        chosen += [row for row in range(len(confidence)) if confidence[row] >= threshold and row not in chosen]
        margins.confidence = min([margins.confidence, *(abs(c - threshold) for c in candidates)])
        if candidates[1:] and candidates[0] < threshold and ranked:
            margins.confidence = min(margins.confidence, candidates[0] - candidates[1])
    elif 0 < len(ranked) < len(candidates):
        margins.confidence = min(margins.confidence, candidates[len(ranked) - 1] - candidates[len(ranked)])
    for row in chosen:
        best, second = choosable[row].topk(2).values.tolist()
        margins.token = min(margins.token, best - second)
        x[offset + row] = token[row]


def _select(
    layer: Layer, s: int, e: int, num_kept: int, kernel: int, selection: Selection, ties: Ties, margins: Margins
) -> Kept:
    """Rows outside [s, e) by importance: mean block query times key, or the largest attention probability, pooled over neighbours in the
    joined list."""
    heads, total, _ = layer.q.shape
    kv_heads = layer.k.shape[0]
    group = heads // kv_heads
    outside = [*range(s), *range(e, total)]
    if selection == "dense":
        return Kept(k=layer.k[:, outside], v=layer.v[:, outside])
    score = torch.stack(
        [layer.k[head // group][outside] @ layer.q[head, s:e].mean(dim=0) for head in range(heads)]
    )  # [H, N]
    if selection == "attended":
        scale = layer.q.shape[2] ** -0.5
        of_heads = [(scale * layer.q[head, s:e] @ layer.k[head // group].T).softmax(dim=1) for head in range(heads)]
        rankings = [_pool(torch.stack(of_heads).amax(dim=(0, 1))[outside], kernel)] * kv_heads
    elif selection == "uniform":
        rankings = [_pool(score.mean(dim=0), kernel)] * kv_heads
    else:
        rankings = [_pool(score[g * group : (g + 1) * group].max(dim=0).values, kernel) for g in range(kv_heads)]
    kept_k, kept_v = [], []
    for g, ranking in enumerate(rankings):
        index = _largest(ranking, num_kept, ties)
        if 0 < num_kept < len(outside):
            ordered = ranking.sort(descending=True).values
            gap = float(ordered[num_kept - 1] - ordered[num_kept])
            if gap == 0:
                margins.selection_ties += 1
            above, below = ordered[ordered > ordered[num_kept]], ordered[ordered < ordered[num_kept - 1]]
            gaps = [float(ordered[num_kept - 1] - below[0])] if len(below) else []
            gaps += [float(above[-1] - ordered[num_kept])] if len(above) else []
            margins.selection = min([margins.selection, *gaps])
        rows = [outside[j] for j in index]
        kept_k.append(layer.k[g, rows])
        kept_v.append(layer.v[g, rows])
    return Kept(k=torch.stack(kept_k), v=torch.stack(kept_v))


def _pool(score: Tensor, kernel: int) -> Tensor:
    half, n = kernel // 2, len(score)
    return torch.stack([score[max(0, j - half) : min(n, j + half + 1)].max() for j in range(n)])
