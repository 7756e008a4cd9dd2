"""What the scripts here share: options of the device and the model, and the file behind a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engines.hardware.catalogue import Gpu
from engines.hardware.peaks import datasheet_gpu, measured_gpu
from engines.models.checkpoint import PUBLISHED_CONFIGS
from engines.models.loader import check_device, load_model, parse_dtype
from engines.models.protocol import DiffusionModel


class Subject(NamedTuple):
    model: DiffusionModel
    device: torch.device
    dtype: torch.dtype
    card: Gpu
    """Whose peaks bound what is timed."""


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16 [default: bfloat16 on CUDA, else float32]")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="tiny", choices=("tiny", *PUBLISHED_CONFIGS), help="the embedded one, or random weights"
    )
    add_device(parser)
    parser.add_argument(
        "--peaks", choices=("datasheet", "measured"), default="datasheet", help="measured where unknown"
    )


def device_of(options: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    check_device(options.device)
    device = torch.device(options.device)
    return device, parse_dtype(options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))


def subject_of(options: argparse.Namespace) -> Subject:
    device, dtype = device_of(options)
    weights = "checkpoint" if options.model == "tiny" else "random"
    model = load_model(options.model, dtype=dtype, device=options.device, weights=weights)
    card = (datasheet_gpu(device) if options.peaks == "datasheet" else None) or measured_gpu(device, dtype)
    return Subject(model, device, dtype, card)


def subject_facts(options: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "device": options.device,
        "dtype": str(subject.dtype),
        "threads": torch.get_num_threads(),
        "card": subject.card.name,
        "source": subject.card.source,
        "flops_per_s": subject.card.peak_flops,
        "bytes_per_s": subject.card.bandwidth,
    }


def save(path: Path | None, rows: Sequence[Any], **facts: Any) -> None:
    """The facts and the rows (dataclasses) as JSON, whole or not at all. Called after every row, so that one that fails
    or takes too long loses no other."""
    if path is None:
        return
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    temporary.rename(path)
