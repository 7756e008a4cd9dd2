"""Running a list of cells with progress, resume and a verdict; shared by the commands that run anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engines.errors import UserError

if TYPE_CHECKING:
    from repro.runs.cell import Cell
    from repro.runs.store import Store
    from repro.runs.sweep import CellOutcome, Sweep


MAX_WARNED = 3


def sweep_of(cells: Sequence[Cell], store: Store, *, force: bool = False) -> Sweep:
    """Every cell is checked, and looked up in the store."""
    from repro.runs.experiment import prepare_all
    from repro.runs.sweep import Sweep

    return Sweep(prepare_all(cells), store, force=force)


def run_sweep(sweep: Sweep, *, continue_on_error: bool = False, out_dir: Path | None = None) -> list[CellOutcome]:
    """``out_dir``: where figures of the runs will go."""
    from repro.runs.progress import sweep_progress

    sweep.check(out_dir)
    with sweep_progress(sweep.num_cells) as on_event:
        return sweep.run(continue_on_error=continue_on_error, on_event=on_event)


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
        if outcome.run is not None and not outcome.run.validity.valid:
            print(f"INVALID {outcome.cell.folder_name}: {'; '.join(outcome.run.validity.reasons)}", file=sys.stderr)
    contended = [outcome for outcome in outcomes if outcome.run is not None and outcome.run.validity.warnings]
    for outcome in contended[:MAX_WARNED]:
        assert outcome.run is not None
        print(f"warning {outcome.cell.folder_name}: {'; '.join(outcome.run.validity.warnings)}", file=sys.stderr)
    if len(contended) > MAX_WARNED:
        print(f"warning: so were {len(contended) - MAX_WARNED} more runs", file=sys.stderr)


def is_failure(outcome: CellOutcome) -> bool:
    """Whether a run failed, or its numbers may not be used."""
    return outcome.status == "failed" or (outcome.run is not None and not outcome.run.validity.valid)


def require_runs(sweep: Sweep) -> None:
    """Refuse to go on where a run is missing."""
    if sweep.missing:
        raise UserError(
            f"{len(sweep.missing)} of {sweep.num_cells} runs behind this figure are missing (first: "
            f"{sweep.missing[0].folder_name}: {sweep.why(sweep.missing[0])}): run 'repro reproduce' first"
        )
