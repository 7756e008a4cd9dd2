from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.driven import drive

from engines.errors import UserError
from repro.runs.cell import Cell
from repro.runs.progress import sweep_progress
from repro.runs.record import RunRecord
from repro.runs.runner import CellEvent, run_cells
from repro.runs.store import Store

CELLS = [
    Cell(figure="fig", system="fake", dataset="poisson", platform="cpu", executor="virtual", rate=rate, seed=seed)
    for rate in (0.5, 0.9)
    for seed in range(3)
]


def simulate(cell: Cell) -> RunRecord:
    assert cell.rate is not None
    arrivals = np.random.default_rng(cell.seed).exponential(1 / cell.rate, size=30).cumsum()
    return drive(arrivals.tolist(), 1.0)


def simulate_or_break(cell: Cell) -> RunRecord:
    if cell.seed == 1:
        raise UserError(f"seed={cell.seed} is unlucky: use another")
    return simulate(cell)


class Counting:
    def __init__(self, run_cell: Callable[[Cell], RunRecord] = simulate) -> None:
        self.seen: list[Cell] = []
        self._run_cell = run_cell

    def __call__(self, cell: Cell) -> RunRecord:
        self.seen.append(cell)
        return self._run_cell(cell)


def contents(store: Store) -> dict[str, bytes]:
    """Every stored byte but the times and machine of a run."""
    files = (path for path in store.root.rglob("*") if path.is_file() and path.name != "provenance.json")
    return {str(path.relative_to(store.root)): path.read_bytes() for path in files}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "local")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """An uninterrupted sweep."""
    store = Store(tmp_path_factory.mktemp("whole"))
    run_cells(CELLS, simulate, store)
    return contents(store)


def test_runs_then_reuses(store: Store, expected: dict[str, bytes]) -> None:
    run_cell = Counting()
    first = run_cells(CELLS, run_cell, store)
    assert [(o.cell, o.status, o.reason) for o in first] == [(cell, "ran", "no folder") for cell in CELLS]
    assert all(o.validity is not None and o.validity.valid for o in first)
    assert contents(store) == expected

    second = run_cells(CELLS, run_cell, store)
    assert run_cell.seen == CELLS
    assert [o.status for o in second] == ["reused"] * len(CELLS)
    assert all(o.reason.startswith("done: same cell, finished 2") for o in second)
    assert [o.folder for o in second] == [o.folder for o in first] == [store.folder(cell) for cell in CELLS]


def test_force_runs_again(store: Store) -> None:
    run_cells(CELLS[:1], simulate, store)
    run_cell = Counting()
    (outcome,) = run_cells(CELLS[:1], run_cell, store, force=True)
    assert run_cell.seen == CELLS[:1]
    assert outcome.reason.startswith("forced (done: same cell")


def test_a_cell_asked_for_twice_runs_once(store: Store) -> None:
    other = replace(CELLS[0], figure="another")
    run_cell = Counting()
    outcomes = run_cells([CELLS[0], CELLS[1], other], run_cell, store)
    assert run_cell.seen == CELLS[:2]
    assert [o.cell for o in outcomes] == [CELLS[0], CELLS[1], other]
    assert outcomes[2].folder == outcomes[0].folder


def test_a_corrupt_folder_is_run_again(store: Store, expected: dict[str, bytes]) -> None:
    run_cells(CELLS, simulate, store)
    (store.folder(CELLS[1]) / "steps.parquet").write_bytes(b"PAR1")
    (store.folder(CELLS[4]) / "manifest.json").unlink()
    run_cell = Counting()
    outcomes = run_cells(CELLS, run_cell, store)
    assert run_cell.seen == [CELLS[1], CELLS[4]]
    assert outcomes[1].reason == "incomplete: steps.parquet is not as it was written"
    assert outcomes[4].reason == "incomplete: manifest.json is missing"
    assert contents(store) == expected


def test_a_stored_run_that_cannot_be_loaded_is_run_again(store: Store, expected: dict[str, bytes]) -> None:
    run_cells(CELLS, simulate, store)
    manifest = store.folder(CELLS[1]) / "manifest.json"
    manifest.write_text(json.dumps({k: v for k, v in json.loads(manifest.read_text()).items() if k != "facts"}))
    (store.folder(CELLS[2]) / "provenance.json").write_text('{"finished_utc": null}')
    (store.folder(CELLS[4]) / "manifest.json").write_text("[" * 100_000)
    run_cell = Counting()
    run_cells(CELLS, run_cell, store)
    assert run_cell.seen == [CELLS[1], CELLS[2], CELLS[4]]
    assert contents(store) == expected


@pytest.mark.parametrize("k", range(len(CELLS)))
def test_an_interrupted_sweep_continues_to_the_same_bytes(store: Store, expected: dict[str, bytes], k: int) -> None:
    def interrupted(cell: Cell) -> RunRecord:
        if cell == CELLS[k]:
            signal.raise_signal(signal.SIGINT)
        return simulate(cell)

    events: list[CellEvent] = []
    with pytest.raises(KeyboardInterrupt):
        run_cells(CELLS, interrupted, store, on_event=events.append)
    assert events[-1].kind == "interrupted"
    assert events[-1].message == f"interrupted: {k} cells done, 0 failed, {6 - k} left; the same command continues"
    stored = sorted(path.name for path in store.root.iterdir()) if store.root.exists() else []
    assert stored == sorted(cell.folder_name for cell in CELLS[:k])

    run_cell = Counting()
    outcomes = run_cells(CELLS, run_cell, store)
    assert run_cell.seen == CELLS[k:]
    assert [o.status for o in outcomes] == ["reused"] * k + ["ran"] * (6 - k)
    assert contents(store) == expected


def test_an_error_ends_the_sweep(store: Store) -> None:
    events: list[CellEvent] = []
    with pytest.raises(UserError, match="seed=1 is unlucky"):
        run_cells(CELLS, simulate_or_break, store, on_event=events.append)
    assert [e.kind for e in events] == ["started", "ran", "started", "failed"]
    assert events[-1].message == "seed=1 is unlucky: use another"
    assert events[-1].num_closed == 2
    assert [store.is_done(cell) for cell in CELLS] == [True] + [False] * 5


def test_continue_on_error(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    def broken(cell: Cell) -> RunRecord:
        if cell.seed == 2:
            raise ZeroDivisionError("a bug")
        return simulate_or_break(cell)

    with caplog.at_level(logging.ERROR):
        outcomes = run_cells(CELLS, broken, store, continue_on_error=True)
    assert [o.status for o in outcomes] == ["ran", "failed", "failed"] * 2
    assert outcomes[2].reason == "ZeroDivisionError: a bug"
    assert outcomes[2].folder is outcomes[2].validity is None
    # A bug's traceback is kept; a user's error is one sentence.
    assert [entry.exc_info is not None for entry in caplog.records] == [True, True]
    assert run_cells(CELLS, simulate, store)[1].status == "ran"


def test_a_record_that_cannot_be_stored_is_a_failure(store: Store) -> None:
    (outcome,) = run_cells(CELLS[:1], lambda cell: replace(simulate(cell), manifest={}), store, continue_on_error=True)
    assert outcome.status == "failed"
    assert "obtained" in outcome.reason


def test_processes_give_the_same_bytes_in_the_same_order(store: Store, expected: dict[str, bytes]) -> None:
    outcomes = run_cells(CELLS, simulate, store, jobs=2)
    assert [(o.cell, o.status) for o in outcomes] == [(cell, "ran") for cell in CELLS]
    assert contents(store) == expected


def test_processes_report_errors(store: Store) -> None:
    outcomes = run_cells(CELLS, simulate_or_break, store, jobs=2, continue_on_error=True)
    assert [o.status for o in outcomes] == ["ran", "failed", "ran"] * 2
    with pytest.raises(UserError, match="seed=1 is unlucky"):
        run_cells(CELLS, simulate_or_break, store, jobs=2)


def test_processes_interrupted_keep_what_is_stored(store: Store, expected: dict[str, bytes]) -> None:
    def stop(event: CellEvent) -> None:
        if event.kind == "ran":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cells(CELLS, simulate, store, jobs=2, on_event=stop)
    assert sum(store.is_done(cell) for cell in CELLS) == len(list(store.root.iterdir())) == 1
    run_cells(CELLS, simulate, store)
    assert contents(store) == expected


def test_jobs_are_checked(store: Store) -> None:
    with pytest.raises(UserError, match="jobs=0"):
        run_cells(CELLS, simulate, store, jobs=0)


def test_progress_off_a_terminal_is_log_lines(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    out = StringIO()
    with caplog.at_level(logging.INFO), sweep_progress(2, Console(file=out)) as on_event:
        run_cells(CELLS[:2], simulate_or_break, store, on_event=on_event, continue_on_error=True)
    assert out.getvalue() == ""
    names = [cell.folder_name for cell in CELLS[:2]]
    assert [entry.getMessage() for entry in caplog.records] == [
        f"[0/2] started {names[0]}: no folder",
        f"[1/2] ran {names[0]}: no folder",
        f"[1/2] started {names[1]}: no folder",
        f"[2/2] failed {names[1]}: seed=1 is unlucky: use another",
    ]
    assert [entry.levelname for entry in caplog.records] == ["INFO", "INFO", "INFO", "ERROR"]


def test_progress_on_a_terminal_draws_and_tells_failures(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=200)
    with caplog.at_level(logging.INFO, logger="repro.runs.progress"), sweep_progress(2, console) as on_event:
        run_cells(CELLS[:2], simulate_or_break, store, on_event=on_event, continue_on_error=True)
    assert "unlucky: use another" in out.getvalue()
    assert "2/2" in out.getvalue()
    assert [entry for entry in caplog.records if entry.name == "repro.runs.progress"] == []


def test_importing_the_harness_loads_nothing_heavy() -> None:
    code = (
        "import sys, repro, repro.runs.cell, repro.runs.clock, repro.runs.drivers.steps, repro.runs.metrics, repro.runs.progress, repro.runs.provenance, "
        "repro.runs.record, repro.runs.runner, repro.runs.store, repro.runs.validity\n"
        "print([m for m in ('torch', 'pandas', 'pyarrow', 'matplotlib', 'datasets', 'transformers', 'rich') "
        "if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
