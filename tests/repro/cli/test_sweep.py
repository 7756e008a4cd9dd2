"""A sweep as a command makes it: devices are looked at before anything is prepared."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.errors import UserError
from repro.cli.sweep import sweep_of
from repro.runs.cell import COMPARISON, Cell
from repro.runs.store import Store

KNOBS = ((COMPARISON, "rates"), ("num_prompts", 1))


@pytest.mark.parametrize("force", [False, True])
def test_cells_of_a_comparison_that_are_not_stored_will_run(tmp_path: Path, force: bool) -> None:
    cell = Cell(
        system="dllm-serve", dataset="osc", platform="cpu-tiny", executor="torch", rate=8.0, seed=0, knobs=KNOBS
    )
    sweep = sweep_of([cell], Store(tmp_path), force=force)
    assert len(sweep.missing) == 1


def test_a_missing_device_comes_before_what_else_is_wrong(tmp_path: Path) -> None:
    knobs = (*KNOBS, ("device", "cuda:7"), ("weights", "random"))
    cell = Cell(system="dllm-serve", dataset="osc", platform="h200", executor="torch", rate=8.0, seed=0, knobs=knobs)
    with pytest.raises(UserError, match="cuda:7"):
        sweep_of([cell], Store(tmp_path))
