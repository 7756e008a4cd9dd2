"""How a measured run says that the machine was busy; every clock is scripted."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import pytest
from support.cells import a_cell
from support.fake_system import deployed, fake_cell
from support.stored_runs import changed, stored

from paper_figures.common.caption import contended_note, obtained_text, seeds_sentence, validity_text
from repro.runs.experiment import prepare
from repro.runs.provenance import MAX_SLOWDOWN, MIN_CPU_SHARE, Load, contention
from repro.runs.record import RunRecord
from repro.runs.sitting import FRESH_S, WARM_UP, Sitting, calibration_loop
from repro.runs.store import Store, StoredRun
from repro.runs.sweep import Sweep


def scripted(values: Iterable[float]) -> Callable[[], float]:
    return iter(values).__next__


def load(
    cpu_s: float = 10.0, slowdown: float = 1.0, busy_s: float | None = 8.0, before: float = 1.0
) -> dict[str, float | None]:
    times = Load(cpu_s=cpu_s, wall_s=12.0, loop_before_s=0.05 * before, loop_after_s=0.05 * slowdown, best_loop_s=0.05)
    return {**asdict(times), "busy_s": busy_s}


@pytest.mark.parametrize(
    ("readings", "said"),
    [
        (load(), ()),
        (load(slowdown=MAX_SLOWDOWN), ()),
        (load(slowdown=1.5), ("contended: the calibration loop took 1.50 times the sitting's best",)),
        (load(before=1.5), ("contended: the calibration loop took 1.50 times the sitting's best",)),
        (load(before=1.3, slowdown=1.4), ("contended: the calibration loop took 1.40 times the sitting's best",)),
        (load(cpu_s=MIN_CPU_SHARE * 8), ()),
        (load(cpu_s=4.0), ("contended: 0.50 processor seconds per second of steps",)),
        (load(cpu_s=4.0, busy_s=None), ()),
        (None, ()),
    ],
)
def test_signs_of_contention(readings, said):
    assert contention(readings) == said


def test_a_busy_start_is_held_against_the_sittings_best():
    loops = [0.06] * (WARM_UP - 1) + [0.05, 0.11, 0.04, 0.05]
    sitting = Sitting(loop=scripted(loops), cpu=scripted([1.0, 4.0, 5.0, 6.0]), wall=scripted([0.0, 2.0, 2.0, 3.0]))
    result, first = sitting.measure(lambda: "done")
    assert result == "done"
    assert first == Load(cpu_s=3.0, wall_s=2.0, loop_before_s=0.05, loop_after_s=0.11, best_loop_s=0.05)
    _, second = sitting.measure(lambda: None)
    assert (second.loop_before_s, second.loop_after_s, second.best_loop_s) == (0.04, 0.05, 0.04)


@pytest.mark.parametrize(
    ("between_s", "after_first", "before_second"),
    [(FRESH_S, MAX_SLOWDOWN, MAX_SLOWDOWN), (FRESH_S, MAX_SLOWDOWN + 0.01, 1.1), (FRESH_S + 0.01, 1.0, 1.1)],
    ids=["quiet a moment ago", "busy a moment ago", "quiet long ago"],
)
def test_a_loop_that_found_the_machine_quiet_a_moment_ago_is_not_repeated(
    between_s, after_first, before_second, monkeypatch
):
    monkeypatch.setattr("repro.runs.sitting.time.monotonic", lambda: now)
    sitting = Sitting(loop=scripted([1.0] * WARM_UP + [after_first, 1.1, 1.1]))
    now = 0.0
    sitting.measure(lambda: None)
    now += between_s
    _, second = sitting.measure(lambda: None)
    assert (second.loop_before_s, second.loop_after_s) == (before_second, 1.1)


def test_the_loop_does_some_work():
    assert calibration_loop() > 0


def measured(tmp_path: Path, loops: Iterable[float]) -> StoredRun:
    cell = fake_cell(rate=1.0, executor="real", num_prompts=3)
    sitting = Sitting(loop=scripted(loops), cpu=scripted([0.0, 9.0]), wall=scripted([0.0, 9.0]))
    (outcome,) = Sweep([prepare(cell)], Store(tmp_path)).run(sitting=sitting)
    assert outcome.run is not None
    assert outcome.run.provenance["sitting"] == sitting.id
    return Store(tmp_path).load(prepare(cell))


def test_a_contended_run_is_valid_and_says_so(tmp_path):
    run = measured(tmp_path, [0.05] * WARM_UP + [0.1])
    assert run.validity.valid
    assert run.validity.warnings == ("contended: the calibration loop took 2.00 times the sitting's best",)
    assert run.obtained == "measured, contended"
    assert run.provenance["load"] == {
        "cpu_s": 9.0,
        "wall_s": 9.0,
        "loop_before_s": 0.05,
        "loop_after_s": 0.1,
        "best_loop_s": 0.05,
        "busy_s": pytest.approx(3.0),
    }


def test_a_run_that_begins_on_a_busy_machine_says_so(tmp_path):
    run = measured(tmp_path, [0.05] * (WARM_UP - 1) + [0.1, 0.1, 0.05])
    assert (run.validity.warnings, run.obtained) == (
        ("contended: the calibration loop took 2.00 times the sitting's best",),
        "measured, contended",
    )


def test_a_quiet_run_says_nothing(tmp_path):
    run = measured(tmp_path, [0.05] * (WARM_UP + 1))
    assert (run.validity.warnings, run.obtained) == ((), "measured")


def test_the_tests_find_every_machine_quiet(tmp_path, monkeypatch):
    """However long the loop takes, and however late requests go in, unless a test says so itself."""
    monkeypatch.setattr("repro.runs.sitting.calibration_loop", scripted(2.0**i for i in range(99)))

    def late(record: RunRecord) -> RunRecord:
        return record.with_columns("requests", submit_lag_s=[2.0] * len(record.requests["request_id"]))

    experiment = deployed(prepare(fake_cell(rate=1.0, executor="real", num_prompts=3)), after=late)
    quiet, busy = (
        Sweep([experiment], Store(tmp_path / name)).run(sitting=sitting)[0].run
        for name, sitting in (("quiet", None), ("busy", Sitting()))
    )
    assert quiet is not None
    assert busy is not None
    assert (quiet.obtained, quiet.validity.valid) == ("measured", True)
    assert (busy.obtained, busy.validity.valid) == ("measured, contended", False)


def test_a_simulated_run_has_no_session(tmp_path):
    (outcome,) = Sweep([prepare(fake_cell(num_prompts=3))], Store(tmp_path)).run(sitting=Sitting(loop=lambda: 1.0))
    assert outcome.run is not None
    assert not {"sitting", "load"} & outcome.run.provenance.keys()


def test_tables_and_captions_count_contended_runs():
    cell = a_cell(dataset="burst", rate=4.0)
    quiet = stored(cell, tok_s=10.0)
    busy = changed(quiet, provenance={**quiet.provenance, "load": load(slowdown=3.0)})
    assert validity_text([quiet]) == "yes"
    assert validity_text([quiet, busy]) == "yes, 1 of 2 contended"
    assert obtained_text([quiet, busy]) == "measured; measured, contended"
    note = "CONTENDED: 1 of 2 runs were made while the machine was busy with something else."
    assert contended_note([quiet, busy]) == [note]
    assert seeds_sentence([quiet, busy]) == f"Seed 0. {note}"
