"""Load a LLaDA checkpoint from a directory or a hub id, without executing remote code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from engines.errors import UserError
from engines.models.checkpoint import checkpoint_dir, read_config
from engines.models.config import LLADA_8B, LLaDAConfig
from engines.models.llada import LLaDAModelLM

SHAPES = {"llada-8b": LLADA_8B}
"""Full-size shapes that need no download with ``weights="random"``."""

Weights = Literal["checkpoint", "random"]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def parse_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"dtype={name!r} is unknown: use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def read_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of a single-file or sharded safetensors checkpoint."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        shards = ["model.safetensors"]
    missing = [name for name in shards if not (directory / name).is_file()]
    if missing:
        raise UserError(
            f"model directory {directory} lacks weights {', '.join(missing)}: restore them, or use --weights random"
        )
    tensors: dict[str, Tensor] = {}
    for name in shards:
        tensors.update(load_file(directory / name))
    return tensors


def load_model(
    model: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    weights: Weights = "checkpoint",
    seed: int = 0,
) -> LLaDAModelLM:
    """A ready model in eval mode. ``weights="random"`` builds a shape (a name in SHAPES, or the
    config of a checkpoint) with small random weights: throughput does not depend on their values."""
    if weights == "random":
        config = SHAPES[model] if model in SHAPES else read_config(checkpoint_dir(model))
        return _random_model(config, dtype, device, seed)
    if model in SHAPES:
        raise UserError(f"model={model!r} is a shape without weights: add --weights random, or give a checkpoint")
    directory = checkpoint_dir(model)
    config = read_config(directory)
    tensors = read_weights(directory)
    with torch.device("meta"):
        network = LLaDAModelLM(config)
    expected = network.state_dict()
    wrong = sorted(expected.keys() ^ tensors.keys()) or [
        name for name, tensor in tensors.items() if tensor.shape != expected[name].shape
    ]
    if wrong:
        raise UserError(
            f"weights in {directory} do not fit config.json ({wrong[0]} is missing, unexpected or mis-shaped): restore the checkpoint"
        )
    network.load_state_dict(
        {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}, assign=True
    )
    return network.requires_grad_(False).eval()


def _random_model(config: LLaDAConfig, dtype: torch.dtype, device: str, seed: int) -> LLaDAModelLM:
    with torch.device("meta"):
        network = LLaDAModelLM(config)
    network = network.to(dtype).to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("norm.weight") or name.endswith("ln_f.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return network.requires_grad_(False).eval()
