"""DiffusionGemma in the size of the other tiny models: how it starts, and its objective.

Sequences are doubled as block diffusion's are (``objective.double_batch``), but the clean columns are causal, and canvases begin behind the
prompt, wherever that ends. Two forwards make an example: one of canvases that are all noise, as a server's first is, and one of canvases in
which some places hold the truth and the others noise, given what the first expects. A third of the batches stop after the first. Every place
is to be predicted: nothing tells noise from tokens.
"""

from collections.abc import Callable
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
"""What a layer adds begins that large."""
_FIRST_ONLY = 1 / 3


def canvas_config(config: TrainConfig, canvas: int, sizes: dict[str, Any]) -> CanvasConfig:
    """All layers but the last have a window; matrices are as many as the other tiny models have, about."""
    head_dim, hidden = config.d_model // config.n_heads, config.mlp_hidden_size // 2
    experts = ExpertsConfig(
        **_EXPERTS, num_groups=1, groups_per_token=1, scaling=1.0, shared_hidden=hidden, dense_layers=0
    )
    own = {"mask_token_id": NO_MASK, "weight_tying": True, "mlp_hidden_size": hidden}
    return CanvasConfig(
        **sizes | own,
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
    """The published layout of ``config.json``."""
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
    """What ``loop.initialise`` does not know of: experts, and norms that give scores and sums the size they have elsewhere."""
    for block in model.blocks:
        experts: Any = block.experts
        for matrix, share in ((experts.gate_up_proj, 1.0), (experts.down_proj, 0.1)):
            nn.init.normal_(matrix, std=share * matrix.shape[2] ** -0.5, generator=generator)
        for name, gain in _POST_NORMS.items():
            getattr(block, name).weight.fill_(gain)
        attention: Any = block.self_attn
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.fill_(attention.head_dim**-0.25)


@dataclass(frozen=True, kw_only=True)
class CanvasBatch(objective.DoubledBatch):
    noise: np.ndarray
    """[B, R] as ``inputs``, with noise alone in the canvases."""
    in_window: np.ndarray
    """As ``allowed``, of layers with a window."""


def canvas_batch(config: TrainConfig, batch: objective.Batch, tokenizer: TextTokenizer, step: int) -> CanvasBatch:
    block = config.canvas
    assert block is not None
    rng = np.random.default_rng((config.seed, step, 1))
    count, opens = len(batch.ids), batch.prompt_lengths
    canvases = int(batch.answer_lengths.max()) // block + 1
    noisy = canvases * block
    clean = np.pad(batch.ids, ((0, 0), (0, noisy)), constant_values=tokenizer.eos_token_id)[:, : opens.max() + noisy]
    columns = clean.shape[1]
    where = opens[:, None] + np.arange(noisy)
    truth = np.take_along_axis(clean, where, axis=1)
    # Of a canvas, all places hold noise, some of any, or those behind the first.
    replaced = objective.masked_places(config, rng, (count, canvases, block)).reshape(count, noisy)
    noise = rng.integers(tokenizer.vocab_size, size=truth.shape)
    is_fill = where > (opens + batch.answer_lengths)[:, None]
    positions = np.concatenate((np.broadcast_to(np.arange(columns), clean.shape), where), axis=1)
    allowed = _allowed(positions, columns, opens, block)
    starts = np.concatenate((positions[:, :columns], opens[:, None] + np.arange(noisy) // block * block), axis=1)
    is_clean = np.arange(columns + noisy) < columns
    near = positions[:, None, :] > starts[:, :, None] - _WINDOW
    rows = np.arange(count)[:, None] * (columns + noisy) + columns + np.arange(noisy)
    return CanvasBatch(
        inputs=np.concatenate((clean, np.where(replaced, noise, truth)), axis=1),
        noise=np.concatenate((clean, noise), axis=1),
        positions=positions,
        allowed=allowed,
        in_window=allowed & (near | ~is_clean),
        rows=rows.reshape(-1),
        targets=truth.reshape(-1),
        weights=np.where(is_fill, config.fill_weight, 1.0).reshape(-1).astype(np.float32),
    )


def _allowed(positions: np.ndarray, columns: int, opens: np.ndarray, block: int) -> np.ndarray:
    """bool [B, R, R]: clean columns see those up to their own, a canvas itself and the clean columns before it."""
    is_noisy = np.arange(positions.shape[1]) >= columns
    canvas = (positions - opens[:, None]) // block
    begin = opens[:, None] + canvas * block
    own, other = positions[:, :, None], positions[:, None, :]
    of_canvas = np.where(is_noisy, canvas[:, :, None] == canvas[:, None, :], other < begin[:, :, None])
    return np.where(is_noisy[:, None], of_canvas, ~is_noisy & (other <= own))


def canvas_loss(
    config: TrainConfig, model: GemmaModel, batch: CanvasBatch, attention: Callable[[Tensor], Attend], step: int
) -> Tensor:
    rng = np.random.default_rng((config.seed, step, 2))
    rows, positions = torch.from_numpy(batch.rows), torch.from_numpy(batch.positions).reshape(-1)
    full, windowed = (attention(torch.from_numpy(each)) for each in (batch.allowed, batch.in_window))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
        return (full if model.config.is_full(layer) else windowed)(layer, q, k, v)

    def logits(inputs: np.ndarray, soft: Tensor) -> Tensor:
        ids = torch.from_numpy(inputs).reshape(-1)
        return model.logits(model.hidden(ids, rotary, attend, CanvasRows(rows, soft))[rows])

    rotary = model.rotary(positions)
    soft = torch.zeros(len(rows), model.config.d_model)
    inputs = batch.noise
    if rng.random() >= _FIRST_ONLY:
        with torch.no_grad():
            p = (logits(inputs, soft) / rng.uniform(0.4, 0.8)).softmax(dim=-1)
            soft = model.soft_embeddings(p).float()
        inputs = batch.inputs
    return objective.masked_loss(logits(inputs, soft), torch.from_numpy(batch.targets), torch.from_numpy(batch.weights))
