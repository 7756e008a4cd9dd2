"""The Python interface: the same runs as the command line's."""

from pathlib import Path

import pytest

import repro
from engines.errors import UserError
from repro.runs.cell import Cell
from repro.runs.store import StoreError


def test_a_run_is_made_once_and_found_again(tmp_path: Path) -> None:
    first = repro.run("dllm-serve", "burst", platform="l40s", rate=1.0, num_prompts=4, result_dir=tmp_path)
    assert first.validity.valid
    assert first.obtained == "simulated"
    again = repro.run("dllm-serve", "burst", platform="l40s", rate=1.0, num_prompts=4, result_dir=tmp_path)
    assert again.folder == first.folder
    assert again.provenance == first.provenance
    assert repro.load(first.cell, result_dir=str(tmp_path)).summary == first.summary


def test_a_sweep_keeps_the_order_of_its_cells(tmp_path: Path) -> None:
    cells = [
        Cell(
            system=system,
            dataset="osc",
            platform="rtx4090",
            executor="roofline",
            rate=0.5,
            seed=0,
            knobs=(("num_prompts", 2),),
        )
        for system in ("sparse-dllm", "dllm-serve")
    ]
    assert [run.cell.system for run in repro.sweep(cells, result_dir=tmp_path, jobs=1)] == ["sparse-dllm", "dllm-serve"]


def test_what_is_not_stored_is_not_loaded(tmp_path: Path) -> None:
    cell = Cell(
        system="dllm-serve",
        dataset="burst",
        platform="l40s",
        executor="roofline",
        rate=1.0,
        seed=0,
        knobs=(("num_prompts", 2),),
    )
    with pytest.raises(StoreError, match="no folder"):
        repro.load(cell, result_dir=tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_name_that_is_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="system='fastest'"):
        repro.run("fastest", "burst", result_dir=tmp_path)
    with pytest.raises(AttributeError, match="no attribute 'simulate'"):
        _ = repro.simulate  # type: ignore[attr-defined]
