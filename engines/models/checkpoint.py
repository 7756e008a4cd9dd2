"""Finds a checkpoint's folder and files, and reads its config; no torch."""

import hashlib
import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engines import data
from engines.errors import UserError, require
from engines.models.config import DREAM_7B, LLADA_8B, DreamConfig, LLaDAConfig

TINY_DIR = Path(__file__).parent / "tiny"
"""The embedded checkpoint: a small model trained on tasks this project generates."""
EMBEDDED = MappingProxyType(
    {"tiny": TINY_DIR, **{f"tiny-{name}": Path(__file__).parent / f"tiny_{name}" for name in ("long", "far", "roll")}}
)
"""Embedded checkpoints by name; "long" and "far" answer in up to 96 tokens, "far" after prompts of up to 2,048, "roll" in 202."""

PUBLISHED_CONFIGS: dict[str, LLaDAConfig | DreamConfig] = {"llada-8b": LLADA_8B, "dream-7b": DREAM_7B}
"""Full-size shapes that need no download with ``weights="random"``."""

_LONGEST_NAME = 255
"""Most bytes of a file's name."""

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"

_MOST_TEXT_BYTES = 1 << 28
"""Most bytes of a configuration, tokenizer or template; published ones have some 10 MB."""

_TEXT_FILES = ("*.json", "*.jinja", "merges.txt")

# Configs, and what a tokenizer or a chat template may be stored in; no code.
_HUB_FILES = ["*.json", "merges.txt", "*.jinja"]


def checkpoint_dir(model: str, *, weights: bool = True, known: Iterable[str] = EMBEDDED) -> Path:
    """Return the directory of ``model``: an embedded one, a local path, or a hub id (fetched with huggingface_hub, without
    its weights unless ``weights``). Errors list the ``known`` names."""
    if model in EMBEDDED:
        return EMBEDDED[model]
    *names, last = map(repr, known)
    advice = f"give a checkpoint directory, a hub id, {', '.join(names)} or {last}"
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path
    except (RuntimeError, OSError, ValueError) as error:  # no such user; a name too long, or no name
        raise UserError(f"model={model!r} is no path ({error}): {advice}") from None
    if model.count("/") != 1 or path.exists() or model.startswith((".", "/", "~")):
        raise UserError(f"model={model!r} is not a directory: {advice}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UserError(
            f"model={model!r} is a hub id and huggingface_hub is missing: pip install 'dllm-serve-repro[hub]' or give a directory"
        ) from error
    try:
        return Path(snapshot_download(model, allow_patterns=[*_HUB_FILES, *(["*.safetensors"] if weights else [])]))
    except (OSError, ValueError) as error:
        raise UserError(
            f"model={model!r} could not be fetched from the hub ({type(error).__name__}): check the id and the network, or give a directory"
        ) from error


def is_base(model: str) -> bool:
    """Whether a checkpoint's name says that it continues texts (``LLaDA-8B-Base``) and was not trained on conversations.

    Files do not say so: a base model has the configuration, and often the chat template, of the models trained from it.
    """
    path = Path(model).expanduser()
    names = {path.name, path.resolve().name}
    # A snapshot of the hub's cache: models--ORG--NAME/snapshots/COMMIT.
    names |= {folder.parents[1].name for folder in (path, path.resolve()) if folder.parent.name == "snapshots"}
    words = {word for name in names for word in re.split(r"[^a-z0-9]+", name.lower())}
    return "base" in words and not words & {"instruct", "chat"}


def read_text(path: Path) -> str:
    """A text file of a checkpoint, which must exist."""
    try:
        return data.read_text("file", path, max_bytes=_MOST_TEXT_BYTES)
    except UserError as error:
        raise UserError(f"{error}, or restore the file") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object stored at ``path``, which must exist."""
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON (line {error.lineno}): restore the file") from error
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is JSON nested too deeply, or with a number too long, to be read: restore the file"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not an object: restore the file")
    return content


def stored_type(model: str) -> str | None:
    """Return the ``model_type`` of a checkpoint's config.json; None if the model is no checkpoint."""
    try:
        path = checkpoint_dir(model, weights=False) / "config.json"
        return read_json(path).get("model_type") if path.is_file() else None
    except UserError:
        return None


def published_config(directory: Path, kinds: str) -> dict[str, Any]:
    """Read a checkpoint's ``config.json``. Raises UserError, which asks for one of these ``kinds``, if there is none."""
    path = directory / "config.json"
    require(path.is_file(), f"model directory {directory} has no config.json: give a {kinds} checkpoint")
    return read_json(path)


def read_config(directory: Path) -> LLaDAConfig | DreamConfig:
    raw = published_config(directory, "LLaDA or Dream")
    model_type = raw.get("model_type")
    if model_type == "llada":
        return LLaDAConfig.from_dict(raw)
    if model_type == "Dream":
        generation = directory / "generation_config.json"
        return DreamConfig.from_dict(raw, read_json(generation) if generation.is_file() else None)
    raise UserError(
        f"{directory / 'config.json'} has model_type={model_type!r}: give a checkpoint of type llada or Dream"
    )


def config_of(model: str) -> LLaDAConfig | DreamConfig:
    """Return the config for a shape's name, a directory or a hub id."""
    return PUBLISHED_CONFIGS[model] if model in PUBLISHED_CONFIGS else read_config(checkpoint_dir(model, weights=False))


def weight_files(directory: Path) -> dict[str, set[str] | None]:
    """Return file name -> the tensor names that the index promises for it, or None if there is no index.

    As in transformers, a single file wins over an index. We ignore files that neither names.
    """
    if (directory / SINGLE_FILE).is_file():
        return {SINGLE_FILE: None}
    index = directory / INDEX_FILE
    if not index.is_file():
        raise UserError(
            f"model directory {directory} lacks weights {SINGLE_FILE} and {INDEX_FILE}: restore them, or use --weights random"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map: restore the checkpoint's index")
    files: dict[str, set[str] | None] = {}
    for file in sorted({str(file) for file in weight_map.values()}):
        if Path(file).name != file or len(file.encode(errors="replace")) > _LONGEST_NAME:
            raise UserError(
                f"{index} names the shard {file[:_LONGEST_NAME]!r} outside its directory: restore the checkpoint's index"
            )
        files[file] = {name for name, shard in weight_map.items() if shard == file}
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise UserError(
            f"model directory {directory} lacks weights {', '.join(missing)}: restore them, or use --weights random"
        )
    return files


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def checkpoint_digest(directory: Path) -> str:
    """Digest of all files behind a model: weights, configuration, tokenizer."""
    texts = (path for pattern in _TEXT_FILES for path in directory.glob(pattern) if path.is_file())
    names = {*weight_files(directory), *(path.name for path in texts)}
    files = [directory / name for name in sorted(names)]
    stats = [path.stat() for path in files]
    return _digest_of_files(tuple(files), tuple((stat.st_size, stat.st_mtime_ns) for stat in stats))


@lru_cache(maxsize=32)
def _digest_of_files(paths: tuple[Path, ...], _: tuple[tuple[int, int], ...]) -> str:
    """Digest the files, and again only after a size or a time of change differs. Reads piece by piece: files may exceed memory."""
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        whole.update(path.name.encode() + digest)
    return whole.hexdigest()[:12]
