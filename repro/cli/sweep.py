"""Running a list of cells with progress, resume and a verdict; shared by bench and reproduce."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engines.errors import UserError

if TYPE_CHECKING:
    from repro.runs.cell import Cell
    from repro.runs.experiment import Experiment
    from repro.runs.runner import CellOutcome
    from repro.runs.store import Store, StoredRun


def prepare_all(cells: Sequence[Cell]) -> list[Experiment]:
    """Check every cell before the first one runs."""
    from repro.runs.experiment import prepare

    return [prepare(cell) for cell in cells]


def check_devices(experiments: Sequence[Experiment]) -> None:
    """Refuse what the measured ones need and this machine has not, before the first run."""
    measured = [e for e in experiments if e.cell.executor != "roofline"]
    if not measured:
        return
    from engines.attention import attention_backend
    from engines.models.checkpoint import config_of
    from engines.models.loader import check_device, check_weights, parse_dtype
    from engines.parallel.group import rank_device

    for experiment in measured:
        settings, given = experiment.settings, experiment.cell.knob_values
        check_device(settings.device)
        dtype = parse_dtype(settings.dtype)
        check_weights(settings.weights)
        for name in ("cuda_graphs", "fused_kernels"):
            if name in given and settings.device == "cpu":
                raise UserError(f"{name}={given[name]!r} has no effect on device='cpu': leave it out")
        size, name = settings.tensor_parallel, settings.engine.attention_backend
        device = rank_device(settings.device, 0, size)
        if name != "auto":
            import torch

            shape = config_of(settings.model)
            heads = shape.n_heads // size, shape.n_kv_heads // size
            attention_backend(name, torch.device(device), dtype, shape.head_dim, *heads)


def run_sweep(
    experiments: Sequence[Experiment],
    store: Store,
    *,
    force: bool,
    continue_on_error: bool,
    out_dir: Path | None = None,
) -> list[CellOutcome]:
    """Simulated cells use all cores, measured ones run alone and in order. ``out_dir``: where their figures will go."""
    from repro.folders import writable_folder
    from repro.runs.experiment import run_cell
    from repro.runs.progress import sweep_progress
    from repro.runs.runner import run_cells

    to_run = [e for e in experiments if force or not store.is_done(e.cell)]
    check_devices(to_run)
    if out_dir is not None:
        writable_folder("out_dir", out_dir)
    if to_run:
        writable_folder("result_dir", store.root)
    simulated = [e.cell for e in experiments if e.cell.executor == "roofline"]
    measured = [e.cell for e in experiments if e.cell.executor != "roofline"]
    outcomes: dict[str, CellOutcome] = {}
    cores = os.cpu_count() or 1
    with sweep_progress(len(simulated)) as on_event:
        new = [cell for cell in simulated if force or not store.is_done(cell)]
        for outcome in run_cells(
            simulated,
            run_cell,
            store,
            force=force,
            continue_on_error=continue_on_error,
            on_event=on_event,
            jobs=min(cores, max(1, len(new) // 4)),
        ):
            outcomes[outcome.cell.key] = outcome
    with sweep_progress(len(measured)) as on_event:
        for outcome in run_cells(
            measured, run_cell, store, force=force, continue_on_error=continue_on_error, on_event=on_event
        ):
            outcomes[outcome.cell.key] = outcome
    return [outcomes[e.cell.key] for e in experiments]


def say_what_ran(outcomes: Sequence[CellOutcome], root: Path) -> None:
    """Runs done, reused and why, on stderr."""
    ran = sum(outcome.status == "ran" for outcome in outcomes)
    reused = [outcome for outcome in outcomes if outcome.status == "reused"]
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    line = f"{ran} runs done, {len(reused)} reused"
    if reused:
        line += f" (e.g. {reused[0].reason}; --force runs them again)"
    print(f"{line}; run folders: {root}", file=sys.stderr)
    for outcome in failed:
        print(f"failed {outcome.cell.folder_name}: {outcome.reason}", file=sys.stderr)
    for outcome in outcomes:
        if outcome.validity is not None and not outcome.validity.valid:
            print(f"INVALID {outcome.cell.folder_name}: {'; '.join(outcome.validity.reasons)}", file=sys.stderr)


def load_all(experiments: Sequence[Experiment], store: Store, *, only_stored: bool = False) -> list[StoredRun]:
    missing = [e for e in experiments if not store.is_done(e.cell)]
    if missing and only_stored:
        raise UserError(
            f"{len(missing)} of {len(experiments)} runs behind this figure are missing "
            f"(first: {missing[0].cell.folder_name}): run 'repro reproduce' first"
        )
    return [store.load(e.cell, with_steps=False) for e in experiments if store.is_done(e.cell)]
