"""Write a trained model as a checkpoint folder, measure the very weights written, and describe them."""

import json
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from engines.models.block_config import BLOCK_TYPES, BlockConfig
from engines.models.config import DECODER_SIZES, LLaDAConfig
from engines.models.decoder import BlockModel
from engines.models.llada import LLaDAModelLM
from engines.models.tokenizer import load_tokenizer
from repro.files import replace_bytes, replace_text
from repro.tasks.mini import GENERATORS
from repro.training.config import TrainConfig
from repro.training.evaluate import measure_accuracy

FINAL_SEED = 7_002
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
        "block_length": max(config.own_block_lengths),
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


def evaluate_task(directory: Path, config: TrainConfig, task: str) -> list[dict[str, Any]]:
    """Accuracy of the stored weights on held-out problems of one task, one entry per block length."""
    torch.set_num_threads(1)
    model, tokenizer = load_model(directory), load_tokenizer(directory)
    problems = GENERATORS[task](FINAL_SEED, config.final_problems, "heldout")
    return [
        {"task": task, "block_length": block_length, "obtained": "measured"}
        | asdict(measure_accuracy(model, tokenizer, problems, gen_length=config.gen_length, block_length=block_length))
        for block_length in config.own_block_lengths
    ]


def export_checkpoint(
    model: LLaDAModelLM | BlockModel,
    config: TrainConfig,
    directory: Path,
    *,
    step: int,
    wall_s: float,
    history: list[dict[str, Any]],
) -> dict[str, Any]:
    """Save, reload, evaluate on held-out problems, write the report and return it."""
    save_model(model, config, directory)
    began = time.perf_counter()
    accuracy = [entry for task in config.tasks for entry in evaluate_task(directory, config, task)]
    tokenizer = load_tokenizer(directory)
    report = {
        "schema_version": 1,
        "obtained": "measured",
        "config": asdict(config),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocab_size": tokenizer.vocab_size,
        "steps_done": step,
        "training_wall_s": round(wall_s, 1),
        "evaluation_wall_s": round(time.perf_counter() - began, 1),
        "hardware": f"{platform.machine()} CPU, {config.threads} threads, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "accuracy": accuracy,
        "history": history,
    }
    _write_json(directory / REPORT_FILE, report)
    return report
