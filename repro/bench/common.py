"""Code that the scripts here share: options, the device, rows with their table and file, captured calls, and how errors are reported."""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from engines.ar.torch.executor import PagedExecutor
from engines.errors import UserError
from engines.models.loader import check_device, parse_dtype
from engines.models.qwen2_config import CAUSAL_SHAPES
from repro.files import replace_text

# -- options ------------------------------------------------------------------------------------------------


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser with ``doc`` as its description, unwrapped, and the option for the file of rows."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    return parser


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def add_counts(parser: argparse.ArgumentParser, **counts: tuple[int | Sequence[int], str]) -> None:
    """Add options that count from 1, each with its default and help. An option with a list as default takes several numbers."""
    for name, (default, text) in counts.items():
        nargs = None if isinstance(default, int) else "+"
        parser.add_argument(f"--{name.replace('_', '-')}", type=count, nargs=nargs, default=default, help=text)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16 [default: bfloat16 on CUDA, else float32]")


def run(main: Callable[[], None]) -> None:
    """Runs ``main``; reports a UserError in one line and exits with 2."""
    try:
        main()
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


# -- device ---------------------------------------------------------------------------------------


def device_of(options: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """The device, which becomes the current one, and the dtype."""
    check_device(options.device)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device, parse_dtype(_dtype_of(options))


def _dtype_of(options: argparse.Namespace) -> str:
    return options.dtype or ("bfloat16" if options.device.startswith("cuda") else "float32")


def facts_of(device: torch.device, dtype: torch.dtype | str) -> dict[str, Any]:
    """Facts about the machine for every file of rows."""
    is_cuda = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name(device) if is_cuda else platform.machine(),
        "device": str(device),
        "dtype": str(dtype),
        "threads": torch.get_num_threads(),
    }


# -- causal models ------------------------------------------------------------------------------------------


def add_causal(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny", choices=("tiny", *CAUSAL_SHAPES))
    add_device(parser)
    parser.add_argument("--threads", type=int, default=0, help="of torch on a CPU; 0 leaves its own choice")


def causal_of(options: argparse.Namespace) -> dict[str, Any]:
    """The device and the dtype for timing a causal model's steps."""
    check_device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    return {"device": options.device, "dtype": _dtype_of(options)}


def causal_facts(device_options: Mapping[str, Any], executor: PagedExecutor) -> dict[str, Any]:
    return {**facts_of(torch.device(device_options["device"]), device_options["dtype"]), "paths": executor.paths()}


# -- rows ---------------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """Measured rows. They are written after every row, so a run that is cut off loses none."""

    path: Path | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    rows: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)
        self.save()

    def save(self, **facts: Any) -> None:
        """Writes the file atomically."""
        if self.path is not None:
            value = {**self.facts, **facts, "rows": self.rows}
            replace_text(self.path, json.dumps(value, indent=2, default=float) + "\n")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with a line per row, without values that are lists."""
    columns = [name for name, value in rows[0].items() if not isinstance(value, tuple | list)] if rows else []
    frame = pd.DataFrame(rows, columns=columns)
    return frame.to_string(index=False, na_rep="-", float_format="{:.4g}".format) if rows else "nothing was timed"


def row_text(values: Mapping[str, Any]) -> str:
    """A row as one line of text."""
    return "  ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()
    )
