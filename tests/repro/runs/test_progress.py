import logging
import sys
from io import StringIO

import pytest
from rich.console import Console
from support.fake_system import breaking, fake_cell

from engines.errors import UserError
from repro.runs.experiment import prepare
from repro.runs.progress import MANY_CELLS, preparing, sweep_progress
from repro.runs.store import Store
from repro.runs.sweep import CellEvent, Sweep

GOOD = prepare(fake_cell(seed=0))
BAD = breaking(prepare(fake_cell(seed=1)).cell, UserError("seed=1 is unlucky: use another"))


def test_progress_off_a_terminal_is_log_lines(tmp_path, caplog):
    out = StringIO()
    with caplog.at_level(logging.INFO), sweep_progress(2, Console(file=out)) as progress:
        Sweep([GOOD, BAD], Store(tmp_path)).run(on_event=progress.on_event, continue_on_error=True)
    assert out.getvalue() == ""
    names = [each.cell.folder_name for each in (GOOD, BAD)]
    assert [entry.getMessage() for entry in caplog.records] == [
        f"[0/2] started {names[0]}: not stored",
        f"[1/2] ran {names[0]}: not stored",
        f"[1/2] started {names[1]}: not stored",
        f"[2/2] failed {names[1]}: seed=1 is unlucky: use another",
    ]
    assert [entry.levelname for entry in caplog.records] == ["INFO", "INFO", "INFO", "ERROR"]


def test_progress_on_a_terminal_draws_and_tells_failures(tmp_path, caplog):
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=200)
    with caplog.at_level(logging.INFO, logger="repro.runs.progress"), sweep_progress(2, console) as progress:
        Sweep([GOOD, BAD], Store(tmp_path)).run(on_event=progress.on_event, continue_on_error=True)
    assert "unlucky: use another" in out.getvalue()
    assert "2/2" in out.getvalue()
    assert [entry for entry in caplog.records if entry.name == "repro.runs.progress"] == []


def test_a_bar_says_which_figure_it_is_of(tmp_path, monkeypatch):
    monkeypatch.setenv("REPRO_PROGRESS", "figure 3 of 14")
    out = StringIO()
    with sweep_progress(2, Console(file=out, force_terminal=True, width=200)) as progress:
        Sweep([GOOD, BAD], Store(tmp_path)).run(on_event=progress.on_event, continue_on_error=True)
    assert "figure 3 of 14" in out.getvalue()


def test_many_cells_are_prepared_behind_a_bar_on_a_terminal(caplog):
    cell = GOOD.cell
    for count, is_terminal, is_drawn in ((MANY_CELLS, True, True), (MANY_CELLS, False, False), (9, True, False)):
        caplog.clear()
        out = StringIO()
        with caplog.at_level(logging.INFO):
            cells = preparing([cell] * count, Console(file=out, force_terminal=is_terminal, width=200))
        assert list(cells) == [cell] * count
        assert ("preparing" in out.getvalue()) is is_drawn
        is_logged = count == MANY_CELLS and not is_terminal
        assert [entry.getMessage() for entry in caplog.records] == ["preparing 1000 runs"] * is_logged


def test_few_cells_are_prepared_without_what_draws_bars(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert preparing([GOOD.cell]) == [GOOD.cell]
    with pytest.raises(ImportError):
        preparing([GOOD.cell] * MANY_CELLS)


def test_what_is_left_follows_the_runs_that_were_made():
    """Ten were stored, and took no time; each of those made since took a minute."""
    now, out = [0.0], StringIO()
    events = ((5, "reused", 10), (5, "started", 10), (65, "ran", 11), (125, "ran", 12))
    console = Console(file=out, force_terminal=True, color_system=None, width=200, get_time=lambda: now[0])
    with sweep_progress(20, console) as progress:
        for at, kind, num_closed in events:
            now[0] = float(at)
            progress.on_event(CellEvent(kind=kind, cell=GOOD.cell, message="", num_closed=num_closed, num_total=20))
    assert "0:02:00 0:08:00 left" in out.getvalue()
