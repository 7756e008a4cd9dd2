"""DiffusionGemma in the size of the other tiny models: its configuration, its initial weights and its objective.

We compute clean sequences once, causally, and then canvases against their K/V, as a server does. Canvases begin right after the prompt.
They get two forwards. The first has only noise, like a server's first. The second has several copies, in which some positions hold the
true token and the others noise, and gets the first one's expectation. The model must predict all positions, because noise is not marked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engines.models.block_config import CANVAS_TYPE, NO_MASK, CanvasConfig, ExpertsConfig
from engines.models.config import DECODER_SIZES, LAYERS, Rope
from engines.models.gemma import CanvasRows, GemmaModel
from engines.models.protocol import Attend
from engines.models.tokenizer import TextTokenizer
from repro.training import objective
from repro.training.config import TrainConfig

_EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_hidden": 64}
_WINDOW = 256
_FULL_THETA, _ROTATED = 1e6, 0.25
_POST_NORMS = {"post_attention_layernorm": 0.5, "post_feedforward_layernorm": 0.2}
"""Initial gains of the norms behind attention and MLP, which set the size of what a layer adds."""
_COPIES = 2
"""How many times as many canvases the second forward has as the first."""


def canvas_config(config: TrainConfig, canvas: int, sizes: dict[str, Any]) -> CanvasConfig:
    """The configuration of the tiny DiffusionGemma. All layers but the last have a window. It is about as large as other tiny models."""
    head_dim, hidden = config.d_model // config.n_heads, config.mlp_hidden_size // 2
    experts = ExpertsConfig(
        **_EXPERTS, num_groups=1, groups_per_token=1, scaling=1.0, shared_hidden=hidden, dense_layers=0
    )
    overrides = {"mask_token_id": NO_MASK, "weight_tying": True, "mlp_hidden_size": hidden}
    return CanvasConfig(
        **sizes | overrides,
        family="diffusion-gemma",
        head_dim=head_dim,
        rotary_dim=head_dim,
        rope=Rope(theta=config.rope_theta),
        block_length=canvas,
        experts=experts,
        window=_WINDOW,
        full_layers=(config.n_layers - 1,),
        full_kv_heads=config.n_heads // 2,
        full_head_dim=2 * head_dim,
        full_theta=_FULL_THETA,
        full_rotary_dim=2 * int(head_dim * _ROTATED),
    )


def canvas_dict(config: CanvasConfig) -> dict[str, Any]:
    """The content of ``config.json``, in the published layout."""
    mixture = config.mixture
    heads = {"head_dim": config.full_head_dim, "num_key_value_heads": config.full_kv_heads}
    share = config.full_rotary_dim / config.full_head_dim
    text = {
        **{published: getattr(config, ours) for ours, published in DECODER_SIZES.items()},
        "model_type": f"{CANVAS_TYPE}_text",
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "sliding_window": config.window,
        "layer_types": [LAYERS[not config.is_full(layer)] for layer in range(config.n_layers)],
        "per_layer_config": {str(layer): heads for layer in config.full_layers},
        "num_experts": mixture.num_experts,
        "top_k_experts": mixture.experts_per_token,
        "moe_intermediate_size": mixture.expert_hidden,
        "rope_parameters": {
            LAYERS[0]: {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": config.full_theta},
            LAYERS[1]: {"rope_type": "default", "rope_theta": config.rope.theta},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "eos_token_id": config.eos_token_id,
        "tie_word_embeddings": True,
    }
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": CANVAS_TYPE,
        "canvas_length": config.block_length,
        "text_config": text,
    }


@torch.no_grad()
def prepare(model: GemmaModel, generator: torch.Generator) -> None:
    """Initialise what ``loop.initialise`` does not know: experts, and norms that give scores and sums the same size as in other models."""
    for block in model.blocks:
        experts: Any = block.experts
        for matrix, share in ((experts.gate_up_proj, 1.0), (experts.down_proj, 0.1)):
            nn.init.normal_(matrix, std=share * matrix.shape[2] ** -0.5, generator=generator)
        for name, gain in _POST_NORMS.items():
            getattr(block, name).weight.fill_(gain)
        attention: Any = block.self_attn
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.fill_(attention.head_dim**-0.25)


Masks = Sequence[np.ndarray]
"""bool [B, N, columns]: which columns a row sees in full layers, and in layers with a window."""


@dataclass(frozen=True, kw_only=True)
class Canvases:
    """N canvas positions after each of B sequences, which have T clean columns."""

    ids: np.ndarray
    """[B, N]"""
    positions: np.ndarray
    """[B, N]"""
    masks: Masks
    targets: np.ndarray
    """[B, N]"""
    weights: np.ndarray
    """[B, N] float32"""


@dataclass(frozen=True, kw_only=True)
class CanvasBatch:
    clean: np.ndarray
    """[B, T]"""
    noise: Canvases
    mixed: Canvases
    """Copies of the canvases of ``noise``, one after the other."""


def canvas_batch(config: TrainConfig, batch: objective.Batch, tokenizer: TextTokenizer, step: int) -> CanvasBatch:
    block = config.canvas
    assert block is not None
    rng = np.random.default_rng((config.seed, step, 1))
    opens, ends = batch.prompt_lengths[:, None], (batch.prompt_lengths + batch.answer_lengths)[:, None]
    count = int(batch.answer_lengths.max()) // block + 1
    columns = int(opens.max()) + count * block
    clean = np.pad(batch.ids, ((0, 0), (0, count * block)), constant_values=tokenizer.eos_token_id)[:, :columns]

    def canvases(copies: int, *, has_truth: bool) -> Canvases:
        offsets = np.tile(np.arange(count * block), copies)
        positions = opens + offsets
        truth = np.take_along_axis(clean, positions, axis=1)
        ids = rng.integers(tokenizer.vocab_size, size=truth.shape)
        if has_truth:
            replaced = objective.masked_positions(config, rng, (len(clean), copies * count, block))
            ids = np.where(replaced.reshape(truth.shape), ids, truth)
        masks = _masks(opens + offsets // block * block, columns, block)
        weights = np.where(positions > ends, config.fill_weight, 1.0).astype(np.float32)
        return Canvases(ids=ids, positions=positions, masks=masks, targets=truth, weights=weights)

    return CanvasBatch(clean=clean, noise=canvases(1, has_truth=False), mixed=canvases(_COPIES, has_truth=True))


def _masks(begins: np.ndarray, columns: int, block: int) -> Masks:
    """The masks of canvases. A canvas sees itself and the clean columns before it; with a window, only the last of them."""
    number, starts = np.arange(begins.shape[1]) // block, begins[:, :, None]
    inside = np.broadcast_to(number[:, None] == number, (*begins.shape, begins.shape[1]))
    before = np.arange(columns) < starts
    near = before & (np.arange(columns) > starts - _WINDOW)
    return np.concatenate((before, inside), axis=2), np.concatenate((near, inside), axis=2)


def canvas_loss(
    config: TrainConfig, model: GemmaModel, batch: CanvasBatch, attention: Callable[[Tensor], Attend], step: int
) -> Tensor:
    rng = np.random.default_rng((config.seed, step, 2))
    count, columns = batch.clean.shape
    cache: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(ids: np.ndarray, positions: np.ndarray, masks: Masks, canvas: CanvasRows | None) -> Tensor:
        full, windowed = (attention(torch.from_numpy(mask)) for mask in masks)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if canvas is None:
                cache[layer] = k, v
            else:
                k, v = (_joined(cached, current, count) for cached, current in zip(cache[layer], (k, v), strict=True))
            group = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
            return (full if model.config.is_full(layer) else windowed)(layer, q, k, v)

        rotary = model.rotary(torch.from_numpy(positions).reshape(-1))
        return model.hidden(torch.from_numpy(ids).reshape(-1), rotary, attend, canvas)

    def denoise(canvases: Canvases, soft: Tensor) -> tuple[Tensor, Tensor]:
        rows = CanvasRows(torch.arange(canvases.ids.size), soft)
        logits = model.logits(forward(canvases.ids, canvases.positions, canvases.masks, rows))
        targets, weights = (torch.from_numpy(array).reshape(-1) for array in (canvases.targets, canvases.weights))
        return logits, objective.masked_loss(logits, targets, weights)

    index = np.arange(columns)
    before = index <= index[:, None]
    near = before & (index > index[:, None] - _WINDOW)
    forward(batch.clean, np.tile(index, count), tuple(np.tile(mask, (count, 1, 1)) for mask in (before, near)), None)
    first, noise = denoise(batch.noise, torch.zeros(batch.noise.ids.size, model.config.d_model))
    with torch.no_grad():
        p = (first / rng.uniform(0.4, 0.8)).softmax(dim=-1)
        soft = model.soft_embeddings(p).float().view(*batch.noise.ids.shape, -1)
    mixed = denoise(batch.mixed, soft.repeat(1, _COPIES, 1).flatten(0, 1))[1]
    return (noise + _COPIES * mixed) / (1 + _COPIES)


def _joined(kept_rows: Tensor, own_rows: Tensor, count: int) -> Tensor:
    """Join the rows of ``count`` sequences: for each, its kept rows and then its own."""
    parts = (x.reshape(count, -1, *x.shape[1:]) for x in (kept_rows, own_rows))
    return torch.cat(tuple(parts), dim=1).flatten(0, 1)
