"""What the scripts here share: options of the device and the model, the file behind a table, and how a refusal is said."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from engines.ar.torch.executor import TorchExecutor
from engines.ar.torch.measured import CPU_TIME
from engines.errors import UserError
from engines.hardware.catalogue import Gpu
from engines.hardware.peaks import datasheet_gpu, measured_gpu
from engines.models.checkpoint import PUBLISHED_CONFIGS
from engines.models.loader import check_device, load_model, parse_dtype
from engines.models.protocol import DiffusionModel
from engines.models.qwen2_config import CAUSAL_SHAPES


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
    return torch.device(options.device), parse_dtype(_dtype_of(options))


def _dtype_of(options: argparse.Namespace) -> str:
    return options.dtype or ("bfloat16" if options.device.startswith("cuda") else "float32")


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


# -- causal models -----------------------------------------------------------------------------------------


class Causal(NamedTuple):
    """Where and how a causal model's steps are timed."""

    device: str
    dtype: str
    clock: str
    timer: Callable[[], float]

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")


def add_causal(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny", choices=("tiny", *CAUSAL_SHAPES))
    add_device(parser)
    parser.add_argument("--threads", type=int, default=0, help="of torch on a CPU; 0 leaves its own choice")
    parser.add_argument(
        "--clock", default="wall", choices=("wall", "cpu"), help="cpu: the process's own time, with --threads 1"
    )
    parser.add_argument("--json", type=Path)


def causal_of(options: argparse.Namespace) -> Causal:
    check_device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    timer = CPU_TIME if options.clock == "cpu" else perf_counter
    return Causal(device=options.device, dtype=_dtype_of(options), clock=options.clock, timer=timer)


def causal_facts(asked: Causal, executor: TorchExecutor) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(asked.device) if asked.is_cuda else "cpu",
        "dtype": asked.dtype,
        "threads": torch.get_num_threads(),
        "clock": asked.clock,
        "paths": executor.paths(),
    }


def short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run(main: Callable[[], None]) -> None:
    """Says what is refused in one line."""
    try:
        main()
    except UserError as error:
        raise SystemExit(f"Error: {error}") from None
