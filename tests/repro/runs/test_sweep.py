"""Sweeps of a system without a model: what is stored is not run again, and a stop loses only what is in flight."""

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
from support.cells import a_cell
from support.fake_system import breaking, deployed, fake_cell
from support.refusals import refuses
from support.stored_runs import contents, parts
from support.tables import data_beside

from engines.errors import RunError, UserError
from repro.families.dllm import requests
from repro.runs import pool
from repro.runs.cell import Cell
from repro.runs.experiment import Experiment, prepare, prepare_all
from repro.runs.pool import CELLS_PER_WORKER
from repro.runs.record import SCHEMA_VERSION, DriveProgress
from repro.runs.store import Store, encoded
from repro.runs.sweep import CellEvent, CellOutcome, Sweep
from repro.workloads.workload import Workload, WorkloadConfig, build_workload

CASES = data_beside(__file__, "cases")

EXPERIMENTS = [prepare(fake_cell(rate=rate, seed=seed)) for rate in (0.5, 0.9) for seed in range(3)]
CELLS = [experiment.cell for experiment in EXPERIMENTS]


Contents = dict[str, dict[str, bytes]]


def run(
    store: Store, experiments: Sequence[Experiment] = EXPERIMENTS, *, force: bool = False, **how: Any
) -> list[CellOutcome]:
    return Sweep(experiments, store, force=force).run(**how)


def is_done(store: Store, experiment: Experiment) -> bool:
    return store.find(experiment).run is not None


UNLUCKY = [
    breaking(each.cell, UserError("seed=1 is unlucky: use another")) if each.cell.seed == 1 else each
    for each in EXPERIMENTS
]
"""The same cells, some of whose deployments break."""


class Counted:
    """The experiments, and which of them were run in this process."""

    def __init__(self, experiments: Sequence[Experiment] = EXPERIMENTS) -> None:
        self.seen: list[Cell] = []
        self.experiments = [deployed(each, before=partial(self.seen.append, each.cell)) for each in experiments]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    """An uninterrupted sweep."""
    store = Store(tmp_path_factory.mktemp("whole"))
    run(store)
    return contents(store.root)


@pytest.fixture
def workers_can_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are fresh processes: they find the system as this one does."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


def test_runs_then_reuses(store, expected):
    counted = Counted()
    first = run(store, counted.experiments)
    assert [(o.cell, o.status, o.reason) for o in first] == [(cell, "ran", "not stored") for cell in CELLS]
    assert all(o.run is not None and o.run.validity.valid for o in first)
    assert contents(store.root) == expected

    second = run(store, counted.experiments)
    assert counted.seen == CELLS
    assert [o.status for o in second] == ["reused"] * len(CELLS)
    assert all(o.reason.startswith("done: same cell, finished 2") for o in second)
    files = [[o.run.file for o in outcomes if o.run is not None] for outcomes in (first, second)]
    assert files[0] == files[1] == [store.file(cell) for cell in CELLS]


def test_force_runs_again(store):
    run(store, EXPERIMENTS[:1])
    counted = Counted(EXPERIMENTS[:1])
    (outcome,) = run(store, counted.experiments, force=True)
    assert counted.seen == CELLS[:1]
    assert outcome.reason.startswith("forced (done: same cell")


def test_cells_of_one_seed_are_prepared_one_after_the_other(monkeypatch):
    """The systems of a comparison stand far apart in a grid, and serve the same requests."""
    cells = [
        a_cell(system, platform="l40s", executor="roofline", rate=1.0, num_prompts=2, seed=seed)
        for system in ("dllm-serve", "sparse-dllm")
        for seed in range(70)
    ]
    drawn: list[int] = []

    def built(config: WorkloadConfig, *given: Any, **named: Any) -> Workload:
        drawn.append(config.seed)
        return build_workload(config, *given, **named)

    monkeypatch.setattr(requests, "_workload_of", lru_cache(maxsize=64)(built))
    found = prepare_all(cells)
    assert [(each.cell.system, each.cell.seed) for each in found] == [(each.system, each.seed) for each in cells]
    assert drawn == list(range(70))


def test_a_cell_asked_for_twice_runs_once(store):
    counted = Counted()
    other = replace(counted.experiments[0], cell=replace(CELLS[0], figure="another"))
    sweep = Sweep([*counted.experiments[:2], other], store)
    assert sweep.num_cells == 2
    outcomes = sweep.run()
    assert counted.seen == CELLS[:2]
    assert [o.cell for o in outcomes] == [CELLS[0], CELLS[1], other.cell]
    assert outcomes[2].run is not None is not outcomes[0].run
    assert outcomes[2].run.file == outcomes[0].run.file


def test_what_cannot_be_read_is_run_again(store, expected):
    run(store)
    whole = parts(store.file(CELLS[1]))
    store.file(CELLS[0]).write_bytes(b"PAR1")
    store.file(CELLS[1]).write_bytes(encoded({**whole, "manifest": {"schema_version": SCHEMA_VERSION}}))
    store.file(CELLS[2]).write_bytes(encoded({**whole, "provenance": {"finished_utc": None}}))
    store.file(CELLS[4]).unlink()
    store.file(CELLS[5]).write_text("[" * 100_000)
    counted = Counted()
    outcomes = run(store, counted.experiments)
    assert counted.seen == [*CELLS[:3], *CELLS[4:]]
    assert outcomes[0].reason == "incomplete: it is not as it was written"
    assert outcomes[4].reason == "not stored"
    assert contents(store.root) == expected


@pytest.mark.parametrize("k", range(len(CELLS)))
def test_an_interrupted_sweep_continues_to_the_same_bytes(store, expected, k):
    interrupted = [*EXPERIMENTS]
    interrupted[k] = deployed(EXPERIMENTS[k], before=partial(signal.raise_signal, signal.SIGINT))

    events: list[CellEvent] = []
    with pytest.raises(KeyboardInterrupt):
        run(store, interrupted, on_event=events.append)
    assert events[-1].kind == "interrupted"
    assert events[-1].message == f"interrupted: {k} cells done, 0 failed, {6 - k} left; the same command continues"
    stored = sorted(path.name for path in store.root.iterdir()) if store.root.exists() else []
    assert stored == sorted(store.file(cell).name for cell in CELLS[:k])

    counted = Counted()
    outcomes = run(store, counted.experiments)
    assert counted.seen == CELLS[k:]
    assert [o.status for o in outcomes] == ["reused"] * k + ["ran"] * (6 - k)
    assert contents(store.root) == expected


KILLED = """
import os, signal, sys
from functools import partial
from pathlib import Path
from support.fake_system import deployed, fake_cell
from repro.runs.experiment import prepare
from repro.runs.store import Store
from repro.runs.sweep import Sweep

last = int(sys.argv[2])
experiments = [prepare(fake_cell(rate=rate, seed=seed)) for rate in (0.5, 0.9) for seed in range(3)]
experiments[last] = deployed(experiments[last], before=partial(os.kill, os.getpid(), signal.Signals[sys.argv[3]]))
Sweep(experiments, Store(Path(sys.argv[1]))).run()
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_a_process_that_is_ended_loses_the_run_in_flight_alone(store, expected, name, workers_can_import):
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(store.root), "3", name], check=False, stderr=subprocess.DEVNULL
    )
    assert ended.returncode == -signal.Signals[name]
    assert sorted(store.root.iterdir()) == sorted(map(store.file, CELLS[:3]))
    counted = Counted()
    run(store, counted.experiments)
    assert counted.seen == CELLS[3:]
    assert contents(store.root) == expected


def test_an_error_ends_the_sweep(store):
    events: list[CellEvent] = []
    with refuses("seed=1"):
        run(store, UNLUCKY, on_event=events.append)
    assert [e.kind for e in events] == ["started", "ran", "started", "failed"]
    assert events[-1].message == "seed=1 is unlucky: use another"
    assert events[-1].num_closed == 2
    assert [is_done(store, each) for each in EXPERIMENTS] == [True] + [False] * 5


def test_continue_on_error(store, caplog):
    broken = [
        breaking(each.cell, ZeroDivisionError("a bug")) if each.cell.seed == 2 else unlucky
        for each, unlucky in zip(EXPERIMENTS, UNLUCKY, strict=True)
    ]
    with caplog.at_level(logging.ERROR):
        outcomes = run(store, broken, continue_on_error=True)
    assert [o.status for o in outcomes] == ["ran", "failed", "failed"] * 2
    assert outcomes[2].reason == "ZeroDivisionError: a bug"
    assert outcomes[2].run is None
    # A bug's traceback is kept; a user's error is one sentence.
    assert [entry.exc_info is not None for entry in caplog.records] == [True, True]
    assert run(store)[1].status == "ran"


def test_a_record_that_cannot_be_stored_is_a_failure(store):
    broken = deployed(EXPERIMENTS[0], after=lambda record: replace(record, manifest={}))
    (outcome,) = run(store, [broken], continue_on_error=True)
    assert outcome.status == "failed"
    assert "obtained" in outcome.reason


def test_measured_runs_come_after_the_simulated_ones_and_in_order(store):
    counted = Counted()
    mixed = [
        deployed(each, obtained="measured") if each.cell.seed == 0 else each for each in reversed(counted.experiments)
    ]
    outcomes = run(store, mixed)
    assert counted.seen == [*[c for c in reversed(CELLS) if c.seed != 0], CELLS[3], CELLS[0]]
    assert [o.cell for o in outcomes] == CELLS[::-1]


def test_steps_of_a_run_are_told_as_they_are_taken(store):
    heard: list[tuple[str, DriveProgress]] = []
    run(store, EXPERIMENTS[:2], on_step=lambda experiment, step: heard.append((experiment.cell.key, step)))
    for cell in CELLS[:2]:
        closed = [step.num_closed for key, step in heard if key == cell.key]
        assert closed == list(range(1, 31))


def test_what_a_machine_lacks_is_said_before_any_run(store):
    run(store, EXPERIMENTS[:1])
    lacking = [deployed(each, lacks="accelerator") for each in EXPERIMENTS[:2]]
    Sweep(lacking[:1], store).check()  # stored: nothing is needed to reuse it
    with pytest.raises(UserError, match="this machine has no accelerator"):
        Sweep(lacking, store).check()


def test_a_root_that_cannot_be_written_is_refused_before_any_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="result_dir="):
        Sweep(EXPERIMENTS[:1], Store(tmp_path / "file")).check()


# -- what a sweep has -------------------------------------------------------------------------------------


def test_what_is_missing_and_why(store):
    run(store, EXPERIMENTS[:2])
    sweep = Sweep(EXPERIMENTS, store)
    assert sweep.missing == CELLS[2:]
    assert [each.cell for each in sweep.to_run] == CELLS[2:]
    assert [stored.cell for stored in sweep.runs] == CELLS[:2]
    assert sweep.why(CELLS[0]).startswith("done: same cell, finished 2")
    assert sweep.why(CELLS[2]) == "not stored"
    sweep.run()
    assert sweep.missing == sweep.to_run == []
    assert [stored.cell for stored in sweep.runs] == CELLS


def test_a_run_that_failed_is_missing(store):
    sweep = Sweep(UNLUCKY, store)
    sweep.run(continue_on_error=True)
    assert sweep.missing == [CELLS[1], CELLS[4]]
    assert len(sweep.runs) == 4


def test_runs_by_grid(store):
    run(store, EXPERIMENTS[:4])
    grids = [CELLS[:3], CELLS[3:], [], [CELLS[0]]]
    sweep = Sweep([*EXPERIMENTS, EXPERIMENTS[0]], store)
    first, second, empty, again = sweep.by_grid(grids)
    assert first is not None is not again
    assert [stored.cell for stored in first] == CELLS[:3]
    assert second is None, "one of its runs is missing"
    assert empty == []
    assert again == first[:1]


def test_the_store_is_asked_once_for_each_cell(store, monkeypatch):
    run(store, EXPERIMENTS[:3])
    asked: list[Cell] = []
    find = Store.find
    monkeypatch.setattr(Store, "find", lambda self, each: asked.append(each.cell) or find(self, each))
    sweep = Sweep([*EXPERIMENTS, *EXPERIMENTS], store)
    sweep.run()
    sweep.by_grid([CELLS])
    assert len(sweep.runs) == 12
    assert asked == CELLS


# -- several processes ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("workers_can_import")
def test_processes_give_the_same_bytes_in_the_same_order(store, expected):
    outcomes = run(store, jobs=2)
    assert [(o.cell, o.status) for o in outcomes] == [(cell, "ran") for cell in CELLS]
    assert contents(store.root) == expected


@pytest.mark.usefixtures("workers_can_import")
def test_processes_report_errors(store):
    outcomes = run(store, UNLUCKY, jobs=2, continue_on_error=True)
    assert [o.status for o in outcomes] == ["ran", "failed", "ran"] * 2
    with refuses("seed=1"):
        run(store, UNLUCKY, jobs=2)


@pytest.mark.usefixtures("workers_can_import")
def test_processes_interrupted_keep_what_is_stored(store, expected):
    def stop(event: CellEvent) -> None:
        if event.kind == "ran":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(store, jobs=2, on_event=stop)
    assert sum(is_done(store, each) for each in EXPERIMENTS) == len(list(store.root.iterdir())) == 1
    run(store)
    assert contents(store.root) == expected


def note_process(folder: Path) -> None:
    (folder / str(os.getpid())).touch()


@pytest.mark.usefixtures("workers_can_import")
def test_few_cells_run_here_and_measured_ones_always(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "usable_cores", lambda: 2)
    monkeypatch.setattr(pool, "CELLS_PER_WORKER", CELLS_PER_WORKER)
    many = [prepare(fake_cell(seed=seed, num_prompts=2)) for seed in range(2 * CELLS_PER_WORKER)]
    here = {str(os.getpid())}

    def processes(name: str, experiments: Sequence[Experiment], **changes: Any) -> set[str]:
        folder = tmp_path / name
        folder.mkdir()
        noted = [deployed(each, before=partial(note_process, folder), **changes) for each in experiments]
        assert {o.status for o in run(Store(tmp_path / f"{name} runs"), noted)} == {"ran"}
        return {path.name for path in folder.iterdir()}

    assert processes("few", many[:-1]) == here
    assert processes("measured", many, obtained="measured") == here
    assert not processes("many", many) & here


@pytest.mark.parametrize("jobs", [0, -1, 10**9, 2.0, "2", True])
def test_jobs_are_checked(store, jobs):
    with pytest.raises(UserError, match=f"^jobs={jobs!r} "):
        run(store, jobs=jobs)


def test_no_more_workers_are_begun_than_there_are_runs(tmp_path, monkeypatch):
    begun: list[int] = []
    monkeypatch.setattr(pool, "run_by_workers", lambda assignment, starts, hooks: begun.append(len(starts)))
    monkeypatch.setattr(pool, "run_here", lambda *asked: begun.append(1))
    for num in (1, 3):
        experiments = [prepare(fake_cell(seed=seed, num_prompts=2)) for seed in range(num)]
        with pytest.raises(KeyError):  # nothing was made
            run(Store(tmp_path), experiments, jobs=1000)
    assert begun == [1, 3]


# -- faults of a system of one's own ----------------------------------------------------------------------


def asked(name: str, service_s: float = 1.0) -> Cell:
    return a_cell(
        f"support.lying_systems:{name}",
        dataset="jobs",
        platform="support.md1:WORKSHOP",
        executor="virtual",
        rate=0.1,
        service_s=service_s,
        num_prompts=6,
    )


def made(root: Path, name: str, service_s: float = 1.0) -> None:
    (outcome,) = Sweep([prepare(asked(name, service_s))], Store(root)).run()
    assert outcome.run is not None
    if not outcome.run.validity.valid:
        raise RunError("; ".join(outcome.run.validity.reasons))


@pytest.mark.parametrize(("name", "service_s", "said"), CASES["lying systems"])
def test_what_a_system_does_wrong_is_said_of_it(name, service_s, said, tmp_path):
    with pytest.raises(RunError, match=re.escape(said)) as failed:
        made(tmp_path, name, service_s)
    assert f"system='support.lying_systems:{name}'" in str(failed.value) or "output_len" in said


def test_a_log_keeps_where_a_wrong_run_was_found(tmp_path, caplog):
    experiments = [prepare(asked("RUNS", service_s)) for service_s in (4.0, 7.0)]
    with caplog.at_level(logging.ERROR):
        wrong, unlucky = Sweep(experiments, Store(tmp_path)).run(continue_on_error=True)
    assert wrong.reason.startswith(
        "system='support.lying_systems:RUNS', platform='support.md1:WORKSHOP' fails (ValueError"
    )
    assert unlucky.reason == "KeyError: 'soon'", "it says itself where it was raised"
    kinds = [entry.exc_info[0] for entry in caplog.records if entry.exc_info is not None]
    assert kinds == [ValueError, KeyError]


def test_another_fault_is_raised_as_it_is(monkeypatch):
    from repro.families.dllm.system import DllmSystem

    monkeypatch.setattr(DllmSystem, "prepare", lambda self, cell: None)
    cell = a_cell(platform="rtx4090", executor="roofline", rate=1.0)
    with pytest.raises(TypeError):
        prepare(cell)
