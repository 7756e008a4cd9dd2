"""A sweep as a command makes it: devices are looked at before anything is prepared."""

import pytest
from support.cells import a_cell
from support.fake_system import breaking, fake_cell

from engines.errors import RunError, UserError
from repro.cli.sweep import run_sweep, say_what_ran, sweep_of
from repro.runs.cell import COMPARISON
from repro.runs.experiment import prepare
from repro.runs.store import Store
from repro.runs.sweep import CellOutcome, Sweep

KNOBS: dict[str, object] = {COMPARISON: "rates", "num_prompts": 1}


@pytest.mark.parametrize("force", [False, True])
def test_cells_of_a_comparison_that_are_not_stored_will_run(tmp_path, force):
    cell = a_cell(rate=8.0, **KNOBS)
    sweep = sweep_of([cell], Store(tmp_path), force=force)
    assert len(sweep.missing) == 1


def test_a_missing_device_comes_before_what_else_is_wrong(tmp_path):
    cell = a_cell(platform="h200", rate=8.0, **KNOBS, device="cuda:7", weights="random")
    with pytest.raises(UserError, match="cuda:7"):
        sweep_of([cell], Store(tmp_path))


@pytest.mark.parametrize("kind", [UserError, RunError, KeyError])
def test_what_ends_a_sweep_is_said_once_with_its_run(kind, tmp_path, caplog):
    broken = breaking(prepare(fake_cell(seed=1)).cell, kind("the server\nsaid \x1b[31mno"))
    name = broken.cell.folder_name
    with caplog.at_level("WARNING"), pytest.raises(kind) as raised:
        run_sweep(Sweep([broken], Store(tmp_path)))
    said = [entry.getMessage() for entry in caplog.records]
    if kind is KeyError:
        assert name in said[0]
    else:
        assert (said, str(raised.value).count(name)) == ([], 1)
    with caplog.at_level("WARNING"):
        run_sweep(Sweep([broken], Store(tmp_path)), continue_on_error=True)
    assert all(line.isprintable() for line in (entry.getMessage() for entry in caplog.records) if name in line[:99])


def test_what_many_runs_have_in_common_is_said_of_a_few(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    sweep = Sweep([prepare(fake_cell(seed=seed, num_prompts=3)) for seed in range(5)], Store(tmp_path))
    outcomes: list[CellOutcome] = run_sweep(sweep, jobs=1)
    for outcome in outcomes:
        assert outcome.run is not None
        outcome.run.manifest["validity"].update(valid=False, reasons=["too few"])
    say_what_ran(outcomes, tmp_path)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("INVALID")]
    assert [line.endswith("too few") for line in lines] == [True, True, True, False]
    assert lines[-1] == "INVALID: so too 2 more runs"
