"""A decoder in plain numpy and float64, from a checkpoint's tensors and its published config alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]


def logits(
    raw: Mapping[str, Any],
    tensors: Tensors,
    ids: Sequence[int],
    positions: Sequence[int] | None = None,
    sequence: Sequence[int] | None = None,
) -> np.ndarray:
    """[N, V] of ids [N], by the config as it is on the hub; plain positions, no window. Causal, unless ``sequence`` says which
    rows see each other, both ways."""
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    width = raw.get("head_dim") or raw["hidden_size"] // heads
    x = tensors["model.embed_tokens.weight"][np.asarray(ids)]
    places = np.arange(len(ids)) if positions is None else np.asarray(positions)
    hidden_from = places[None, :] > places[:, None] if sequence is None else np.not_equal.outer(sequence, sequence)
    for layer in range(raw["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        own = {name.removeprefix(at): value for name, value in tensors.items() if name.startswith(at)}
        h = _norm(x, own["input_layernorm.weight"], raw)
        q, k, v = (
            _linear(h, own, f"self_attn.{name}_proj").reshape(len(ids), -1, width).transpose(1, 0, 2) for name in "qkv"
        )
        if raw["model_type"] == "qwen3":
            q, k = (_norm(y, own[f"self_attn.{name}_norm.weight"], raw) for y, name in ((q, "q"), (k, "k")))
        q, k = (_rotated(y, places, raw["rope_theta"]) for y in (q, k))
        k, v = (np.repeat(y, heads // kv_heads, axis=0) for y in (k, v))
        scores = np.where(hidden_from, -np.inf, q @ k.transpose(0, 2, 1) / np.sqrt(width))
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (shares / shares.sum(axis=-1, keepdims=True)) @ v
        x = x + _linear(mixed.transpose(1, 0, 2).reshape(len(ids), -1), own, "self_attn.o_proj")
        h = _norm(x, own["post_attention_layernorm.weight"], raw)
        gate, up = (_linear(h, own, f"mlp.{name}_proj") for name in ("gate", "up"))
        x = x + _linear(gate / (1 + np.exp(-gate)) * up, own, "mlp.down_proj")
    head = "model.embed_tokens.weight" if raw["tie_word_embeddings"] else "lm_head.weight"
    return _norm(x, tensors["model.norm.weight"], raw) @ tensors[head].T


def _norm(x: np.ndarray, weight: np.ndarray, raw: Mapping[str, Any]) -> np.ndarray:
    return weight * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + raw["rms_norm_eps"])


def _linear(x: np.ndarray, own: Tensors, name: str) -> np.ndarray:
    return x @ own[f"{name}.weight"].T + own.get(f"{name}.bias", 0.0)


def _rotated(x: np.ndarray, places: np.ndarray, theta: float) -> np.ndarray:
    half = x.shape[-1] // 2
    angles = places[:, None] / theta ** (np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate((a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)), axis=-1)
