"""A grid by options of bench, in a file and in Python: the same cells, and the same refusals."""

import json
from pathlib import Path

import pytest
import yaml
from support.command import refused, repro
from support.fake_system import fake_cell
from support.refusals import refuses
from support.tables import data_beside

import repro as toolkit
from engines.errors import UserError
from repro.runs.experiment import prepare
from repro.runs.store import Store
from repro.runs.sweep import CellEvent, Sweep
from repro.workbench.grid import Grid, grid_of_file, in_turns

GRIDS = data_beside(__file__, "cases")["grids"]
KINDS = {"rate": [0.5, float("inf")], "dataset": ("osc", "livebench")}
"""Values of the first grid as only Python has them."""


def folder_names(text: str) -> list[str]:
    return [run["run"] for run in json.loads(text)["runs"]]


@pytest.mark.parametrize("name", GRIDS)
def test_options_a_file_and_python_ask_for_the_same_runs(name, tmp_path):
    text, options = GRIDS[name]
    mapping = yaml.safe_load(text)
    if name == "methods":
        mapping |= KINDS
    file = tmp_path / "grid.yaml"
    file.write_text(text)
    by_python = [prepare(cell).cell.folder_name for cell in Grid.from_dict(mapping).cells()]
    dry = ("--dry-run", "--json", "--result-dir", tmp_path / "runs")
    assert folder_names(repro(f"sweep {file}", *dry).out) == by_python
    assert folder_names(repro(f"bench {options}", *dry).out) == by_python
    assert len(by_python) == (8 if name == "methods" else 1)


def test_every_combination_is_a_cell_and_repeats_follow_each_other():
    grid = Grid.from_dict(
        {
            "platform": ["l40s", "rtx4090"],
            "rate": [1, 2],
            "knobs": {"num_prompts": 2, "retention_ratio": [None, 0.5, 0.9]},
        }
    ).repeated(3)
    cells = grid.cells()
    assert len({cell.key for cell in cells}) == len(cells) == 2 * 2 * 3 * 3
    assert [cell.seed for cell in cells] == [0, 1, 2] * 12
    assert grid.varied == ("retention_ratio",)
    # Null leaves a knob at its default: the run that does not name it.
    assert cells[0] == Grid.from_dict({"platform": "l40s", "rate": 1, "knobs": {"num_prompts": 2}}).cells()[0]
    assert {cell.executor for cell in cells} == {"roofline"}


def test_turns_are_of_repeats_and_begin_with_another_setting_each():
    cells = Grid.from_dict({"platform": "l40s", "rate": [1, 2, 3]}).repeated(3).cells()
    asked = [(cell.seed, cell.rate) for cell in in_turns(cells)]
    assert asked == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (1, 1), (2, 3), (2, 1), (2, 2)]


def test_measured_runs_are_made_in_turns(tmp_path):
    cells = [fake_cell(rate, seed, num_prompts=2, executor="real") for rate in (1.0, 2.0) for seed in (0, 1)]
    sweep = Sweep([prepare(cell) for cell in in_turns(cells)], Store(tmp_path))
    begun: list[tuple[int, float | None]] = []

    def note(event: CellEvent) -> None:
        if event.kind == "started" and event.cell is not None:
            begun.append((event.cell.seed, event.cell.rate))

    sweep.run(on_event=note)
    assert begun == [(0, 1), (0, 2), (1, 2), (1, 1)]


def test_numbers_of_a_file_are_those_of_options(tmp_path):
    file = tmp_path / "grid.yaml"
    file.write_text("platform: l40s\nrate: 1e0\nknobs: {threshold: 9e-1, model: '2024', device: cpu}")
    assert grid_of_file(file).rate == (1.0,)
    assert grid_of_file(file).knobs == {"threshold": (0.9,), "model": ("2024",), "device": ("cpu",)}


def test_python_refuses_likewise(tmp_path):
    for given, says in (
        ({"cells": {"sytem": "llada"}}, "grid key 'sytem' is unknown"),
        ({"cells": {}}, "must be a mapping"),
        ({"cells": {"platform": "l40s"}, "repeats": True}, "repeats=True must be a whole number"),
        ({"cells": [], "repeats": 2}, "repeats=2 is of a grid"),
        ({"cells": {"platform": "l40s"}, "interleave": 1}, "interleave=1 must be true or false"),
    ):
        with pytest.raises(UserError, match=says):
            toolkit.sweep(**{"result_dir": tmp_path / "runs", **given})
    assert not list(tmp_path.iterdir())


def test_a_sweep_in_python_is_in_the_order_of_the_grid(tmp_path: Path):
    grid = {"platform": "l40s", "dataset": "livebench", "rate": [1, 2], "knobs": {"num_prompts": 2}}
    runs = toolkit.sweep(grid, repeats=2, interleave=True, result_dir=tmp_path, jobs=1)
    assert [(run.cell.rate, run.cell.seed) for run in runs] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    again = toolkit.sweep(grid, repeats=2, result_dir=tmp_path, jobs=1)
    assert [run.provenance for run in again] == [run.provenance for run in runs]


def test_a_grid_of_many_cells_is_counted_before_they_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr(Grid, "_cells", lambda _: pytest.fail("cells were made"))
    file = tmp_path / "grid.yaml"
    file.write_text(f"platform: l40s\nseed: {[*range(1000)]}\nknobs: {{num_prompts: {[*range(1, 1001)]}}}")
    refused(repro("sweep", file), "1,000,000 cells", "--max-cells")
    refused(repro("sweep", file, "--max-cells", 999_999), "1,000,000 cells")
    refused(repro("sweep", file, "--max-cells", 0), "max_cells=0")
    with pytest.raises(UserError, match="1,000,000 cells"):
        toolkit.sweep({"platform": "l40s", "seed": range(1000), "knobs": {"num_prompts": range(1, 1001)}})


def test_the_bound_can_be_raised():
    grid = Grid.from_dict({"platform": "l40s", "seed": [0, 1], "knobs": {"num_prompts": [2, 3]}})
    assert len(grid.cells(4)) == grid.num_cells == 4
    with refuses("max_cells=3"):
        grid.cells(3)
