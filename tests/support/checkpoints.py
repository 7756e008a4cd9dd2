"""Small checkpoints, of texts too."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from support.tables import data_beside
from support.tiny_models import MHA
from support.tokenizers import LLADA_SPECIAL, write_dream_tokenizer, write_tokenizer
from torch import Tensor

from engines.models.config import DreamConfig
from engines.models.tokenizer import load_tokenizer

DREAM = DreamConfig(**data_beside(__file__, "checkpoints")["dream"])


def dream_layout(config: DreamConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published Dream checkpoint, head included even if it is tied."""
    d, kv, mlp = config.d_model, config.n_kv_heads * config.head_dim, config.mlp_hidden_size
    layout: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for n in range(config.n_layers):
        layout |= {
            f"model.layers.{n}.input_layernorm.weight": (d,),
            f"model.layers.{n}.self_attn.q_proj.weight": (d, d),
            f"model.layers.{n}.self_attn.q_proj.bias": (d,),
            f"model.layers.{n}.self_attn.k_proj.weight": (kv, d),
            f"model.layers.{n}.self_attn.k_proj.bias": (kv,),
            f"model.layers.{n}.self_attn.v_proj.weight": (kv, d),
            f"model.layers.{n}.self_attn.v_proj.bias": (kv,),
            f"model.layers.{n}.self_attn.o_proj.weight": (d, d),
            f"model.layers.{n}.post_attention_layernorm.weight": (d,),
            f"model.layers.{n}.mlp.gate_proj.weight": (mlp, d),
            f"model.layers.{n}.mlp.up_proj.weight": (mlp, d),
            f"model.layers.{n}.mlp.down_proj.weight": (d, mlp),
        }
    return layout | {"model.norm.weight": (d,), "lm_head.weight": (config.vocab_size, d)}


def dream_weights(config: DreamConfig, seed: int = 0) -> dict[str, Tensor]:
    random = np.random.RandomState(seed)

    def values(shape: tuple[int, ...]) -> np.ndarray:
        gain = 1.5 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.4
        return random.standard_normal(shape) * gain

    weights = {name: torch.from_numpy(values(shape).astype(np.float32)) for name, shape in dream_layout(config).items()}
    return {name: 1 + tensor if "norm" in name else tensor for name, tensor in weights.items()}


def write(
    directory: Path, config: dict[str, Any], weights: dict[str, Tensor], dtype: torch.dtype | None, shards: int = 1
) -> Path:
    """A checkpoint folder; more than one shard come with an index, as on the hub. No dtype: each as it is."""
    (directory / "config.json").write_text(json.dumps(config))
    weights = {name: tensor.to(dtype or tensor.dtype) for name, tensor in weights.items()}
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    names, placed = list(weights), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        save_file({name: weights[name] for name in part}, directory / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


LLADA = replace(MHA, name="llada-with-text", vocab=256 + len(LLADA_SPECIAL))
MASK, EOS, EOT = (256 + LLADA_SPECIAL.index(token) for token in ("<|mdm_mask|>", "<|endoftext|>", "<|eot_id|>"))
HEAD = "model.transformer.ff_out.weight"


def write_llada(directory: Path, *, shards: int = 1, mask_gain: float = 0.0, **tokenizer: object) -> Path:
    """Bytes and LLaDA's special tokens; every layout detail as on the hub."""
    directory.mkdir()
    write_tokenizer(directory, **tokenizer)
    config = replace(LLADA.config, mask_token_id=MASK, eos_token_id=EOS, pad_token_id=EOS)
    weights = LLADA.weights()
    weights[HEAD][MASK] *= mask_gain
    write(
        directory, config.to_dict() | {"n_kv_heads": None, "torch_dtype": "bfloat16"}, weights, torch.bfloat16, shards
    )
    return directory


def write_dream(directory: Path, *, shards: int = 1, **tokenizer: object) -> Path:
    directory.mkdir()
    base = load_tokenizer(write_dream_tokenizer(directory, **tokenizer))
    config = replace(
        DREAM,
        vocab_size=base.vocab_size + 2,
        mask_token_id=base.mask_token_id,
        eos_token_id=base.eos_token_id,
        pad_token_id=base.eos_token_id,
    )
    weights = dream_weights(config)
    weights["lm_head.weight"][base.mask_token_id] = 0
    write(directory, config.to_dict(), weights, torch.bfloat16, shards)
    return directory
