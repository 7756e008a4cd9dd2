"""Where a checkpoint lies and what its config says; no torch."""

from __future__ import annotations

import json
from pathlib import Path

from engines.errors import UserError
from engines.models.config import LLaDAConfig

TINY_DIR = Path(__file__).parent / "tiny"
"""The embedded checkpoint: a small model trained on tasks this project generates."""


def checkpoint_dir(model: str) -> Path:
    """Directory of ``model``: 'tiny', a local path, or a hub id (fetched with huggingface_hub)."""
    if model == "tiny":
        return TINY_DIR
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model.count("/") != 1 or path.exists() or model.startswith((".", "/", "~")):
        raise UserError(f"model={model!r} is not a directory: give a checkpoint directory, a hub id or 'tiny'")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UserError(
            f"model={model!r} is a hub id and huggingface_hub is missing: pip install '.[hub]' or give a directory"
        ) from error
    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise UserError(
            f"model={model!r} could not be fetched from the hub ({type(error).__name__}): check the id and the network, or give a directory"
        ) from error


def read_config(directory: Path) -> LLaDAConfig:
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"model directory {directory} has no config.json: give a LLaDA checkpoint")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON (line {error.lineno}): restore the checkpoint's config") from error
    return LLaDAConfig.from_dict(raw)
