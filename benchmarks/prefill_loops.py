"""LAPS's Figures 1, 3, 5 and 6 on a measured worker: python benchmarks/prefill_loops.py --help

Every step is run and timed; the clock between them is virtual. One row a cell, written as it is measured.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter

import torch
from common import save

from engines.ar.torch.measured import CPU_TIME
from engines.errors import UserError
from engines.models.loader import check_device
from engines.models.qwen2_config import CAUSAL_SHAPES
from repro.prefill.instance import measured_instance, setting_of
from repro.prefill.loops import LoopGrid, WorkerFacts, run_cell

FIGURES = ("fig1", "fig3", "fig5", "fig6")


def main() -> None:
    options = _options()
    check_device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    is_cuda = options.device.startswith("cuda")
    setting = setting_of(options.model)
    if is_cuda:  # a quarter of the grid: capturing all of it would take longer than the loops
        setting = replace(setting, lengths=setting.lengths[1::2], batches=setting.batches[::2])
    instance = measured_instance(
        setting,
        device=options.device,
        dtype=options.dtype or ("bfloat16" if is_cuda else "float32"),
        repeats=options.repeats,
        timer=CPU_TIME if options.clock == "cpu" else perf_counter,
    )
    grid = LoopGrid(
        seeds=range(options.seeds),
        **({"concurrency": options.concurrency} if options.concurrency else {}),
        **({"compared": options.systems, "interference": options.systems} if options.systems else {}),
    )
    facts = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(options.device) if is_cuda else "cpu",
        "threads": torch.get_num_threads(),
        "clock": options.clock,
        "duration_s": options.duration,
        "instance": asdict(WorkerFacts.of(instance)),
        "paths": instance.executor.paths(),
    }
    print(*(f"{name}={value}" for name, value in facts["instance"].items()), flush=True)  # type: ignore[union-attr]
    rows = []
    for cell in grid.cells(options.figures, instance.floor_s):
        rows.append(run_cell(instance, cell, options.duration))
        print(*(f"{name}={_short(value)}" for name, value in asdict(rows[-1]).items()), flush=True)
        save(options.json, rows, **facts)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=("tiny", *CAUSAL_SHAPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16 [default: bfloat16 on CUDA, else float32]")
    parser.add_argument("--figures", nargs="+", default=list(FIGURES), choices=FIGURES)
    parser.add_argument("--systems", nargs="+")
    parser.add_argument("--concurrency", nargs="+", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=2.0, help="seconds of measured steps in a cell")
    parser.add_argument("--repeats", type=int, default=5, help="of each step of the profile that policies rest on")
    parser.add_argument("--threads", type=int, default=0, help="of torch on a CPU; 0 leaves its own choice")
    parser.add_argument(
        "--clock", default="wall", choices=("wall", "cpu"), help="cpu: the process's own time, with --threads 1"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"Error: {error}") from None
