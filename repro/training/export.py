"""Write a trained model as a checkpoint folder, and describe how it was trained."""

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from engines.models.block_config import BLOCK_TYPES, BlockConfig
from engines.models.config import DECODER_SIZES, LLaDAConfig
from engines.models.decoder import BlockModel
from engines.models.llada import LLaDAModelLM
from engines.models.protocol import Attend
from engines.models.tokenizer import load_tokenizer
from repro.files import replace_bytes, replace_text
from repro.training.config import TrainConfig


def batched_attention(lengths: Tensor, columns: int) -> Attend:
    """Rows are B sequences of ``columns`` each; columns beyond ``lengths`` [B] are never attended."""
    padded = torch.arange(columns, device=lengths.device) >= lengths[:, None]
    return masked_attention(~padded[:, None])


def masked_attention(allowed: Tensor) -> Attend:
    """Rows are B sequences of R each; ``allowed`` [B, R or 1, R] says which columns a row of its sequence sees.

    It is written as two batched products: on a CPU their backward pass takes half the time of the
    fused call's in bfloat16. Query and key heads must be equal in number.
    """
    batch, _, columns = allowed.shape
    is_masked = not bool(allowed.all())
    bias = torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, -1e4)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, width = q.shape[1:]

        def per_head(x: Tensor) -> Tensor:
            return x.view(batch, columns, heads, width).transpose(1, 2).reshape(batch * heads, columns, width)

        scores = torch.bmm(per_head(q) * width**-0.5, per_head(k).transpose(1, 2))
        if is_masked:
            scores = (scores.view(batch, heads, columns, columns) + bias[:, None].to(scores.dtype)).view_as(scores)
        mixed = torch.bmm(scores.softmax(-1).to(v.dtype), per_head(v))
        return mixed.view(batch, heads, columns, width).transpose(1, 2).reshape(batch * columns, heads, width)

    return attend


WEIGHTS_FILE = "model.safetensors"
REPORT_FILE = "training_report.json"
MADE = (WEIGHTS_FILE, "config.json", "generation_config.json", REPORT_FILE)
"""Files of a checkpoint that is exported, besides its tokenizer's."""


def _write_json(path: Path, content: Any) -> None:
    replace_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def save_model(model: LLaDAModelLM | BlockModel, config: TrainConfig, directory: Path) -> None:
    """``config.json``, ``generation_config.json`` and float16 weights."""
    halved = {name: tensor.detach().to(torch.float16).contiguous() for name, tensor in model.state_dict().items()}
    replace_bytes(directory / WEIGHTS_FILE, save(halved, metadata={"format": "pt"}))
    own = model.config
    described = own.to_dict() if isinstance(own, LLaDAConfig) else sdar_dict(own)
    _write_json(directory / "config.json", described | {"torch_dtype": "float16"})
    generation = {
        "gen_length": config.gen_length,
        "block_length": config.block_diffusion or max(config.block_lengths),
        "steps": config.gen_length,
        "temperature": 0.0,
        "mask_token_id": model.config.mask_token_id,
        "eos_token_id": model.config.eos_token_id,
        "pad_token_id": model.config.eos_token_id,
    }
    _write_json(directory / "generation_config.json", generation)


def sdar_dict(config: BlockConfig) -> dict[str, Any]:
    """The published layout of a SDAR's ``config.json``."""
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        **{published: getattr(config, ours) for ours, published in DECODER_SIZES.items()},
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.weight_tying,
        "block_size": config.block_length,
        "mask_token_id": config.mask_token_id,
        "eos_token_id": config.eos_token_id,
    }


def load_model(directory: Path) -> LLaDAModelLM | BlockModel:
    """The stored weights in float32; every name and shape must match."""
    raw = json.loads((directory / "config.json").read_text())
    is_block = raw["model_type"] in BLOCK_TYPES
    model = BlockModel(BlockConfig.from_dict(raw)) if is_block else LLaDAModelLM(LLaDAConfig.from_dict(raw))
    weights = load_file(directory / WEIGHTS_FILE)
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=True)
    return model.eval()


def export_checkpoint(
    model: LLaDAModelLM | BlockModel,
    config: TrainConfig,
    directory: Path,
    *,
    step: int,
    wall_s: float,
    history: list[dict[str, Any]],
) -> dict[str, Any]:
    """Save the weights, write the report and return it."""
    save_model(model, config, directory)
    tokenizer = load_tokenizer(directory)
    report = {
        "schema_version": 2,
        "obtained": "measured",
        "config": asdict(config),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocab_size": tokenizer.vocab_size,
        "steps_done": step,
        "training_wall_s": round(wall_s, 1),
        "hardware": f"{platform.machine()} CPU, {config.threads} threads, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "history": history,
    }
    _write_json(directory / REPORT_FILE, report)
    return report
