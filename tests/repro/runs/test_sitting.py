"""How a measured run says that the machine was busy; every clock is scripted."""

import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.cells import a_cell
from support.fake_system import deployed, fake_cell
from support.stored_runs import changed, stored

from paper_figures.common.caption import contended_note, obtained_text, seeds_sentence, validity_text
from repro.runs.cell import COMPARISON, Cell
from repro.runs.experiment import Experiment, prepare
from repro.runs.provenance import MAX_SLOWDOWN, MIN_CPU_SHARE, Load, contention
from repro.runs.record import RunRecord
from repro.runs.sitting import FRESH_S, WARM_UP, Sitting, calibration_loop, interleaved, unit_of
from repro.runs.store import Store, StoredRun
from repro.runs.sweep import CellOutcome, Sweep


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


SLOW = ("contended: the calibration loop took 2.00 times the sitting's best",)


@pytest.mark.parametrize(
    ("loops", "warnings"),
    [([0.05] * WARM_UP + [0.1], SLOW), ([0.05] * (WARM_UP - 1) + [0.1, 0.1, 0.05], SLOW), ([0.05] * (WARM_UP + 1), ())],
    ids=["busy at its end", "busy at its begin", "quiet"],
)
def test_a_contended_run_is_valid_and_says_so(loops, warnings, tmp_path):
    run = measured(tmp_path, loops)
    assert (run.validity.valid, run.validity.warnings) == (True, warnings)
    assert run.obtained == ("measured, contended" if warnings else "measured")


def test_a_measured_run_says_what_the_machine_did(tmp_path):
    assert measured(tmp_path, [0.05] * WARM_UP + [0.1]).provenance["load"] == {
        "cpu_s": 9.0,
        "wall_s": 9.0,
        "loop_before_s": 0.05,
        "loop_after_s": 0.1,
        "best_loop_s": 0.05,
        "busy_s": pytest.approx(3.0),
    }


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


# -- units: cells that are compared are made in one sitting, taking turns ---------------------------------

SYSTEMS = ("support.fake_system:FAKE", "support.fake_system:OTHER")
RATES, SEEDS = (1.0, 2.0), range(3)


def grid(comparison: str | None = "rates", *, executor: str = "real", seeds: Sequence[int] = SEEDS) -> list[Cell]:
    """In the order of a figure: system, then rate, then seed."""
    knobs = {} if comparison is None else {COMPARISON: comparison}
    return [
        fake_cell(rate=rate, seed=seed, system=system, executor=executor, num_prompts=3, **knobs)
        for system in SYSTEMS
        for rate in RATES
        for seed in seeds
    ]


class Made:
    """What was run, in order."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []

    def sweep(self, store: Store, cells: Sequence[Cell], *, breaks_at: int | None = None, **how: Any) -> Sweep:
        experiments = [prepare(cell) for cell in cells]
        order = {each.cell.key: i for i, each in enumerate(interleaved(experiments))}

        def before(experiment: Experiment) -> None:
            if order[experiment.cell.key] == breaks_at:
                signal.raise_signal(signal.SIGINT)
            self.cells.append(experiment.cell)

        return Sweep([deployed(each, before=partial(before, each)) for each in experiments], store, **how)


def quiet() -> Sitting:
    return Sitting(loop=lambda: 0.05)


def run(store: Store, cells: Sequence[Cell], **how: Any) -> tuple[list[Cell], list[CellOutcome]]:
    made = Made()
    return made.cells, made.sweep(store, cells, **how).run(sitting=quiet(), jobs=1)


def test_systems_take_turns_and_another_begins_in_every_repeat(store):
    made, _ = run(store, grid())
    names = {SYSTEMS[0]: "A", SYSTEMS[1]: "B"}
    assert [(cell.seed, cell.rate, names[cell.system]) for cell in made] == [
        *((0, rate, name) for rate in RATES for name in "AB"),
        *((1, rate, name) for rate in RATES for name in "BA"),
        *((2, rate, name) for rate in RATES for name in "AB"),
    ]


def test_a_whole_unit_is_reused(store):
    _, outcomes = run(store, grid())
    sittings = {outcome.run.provenance["sitting"] for outcome in outcomes if outcome.run is not None}
    assert len(sittings) == 1
    made, outcomes = run(store, grid())
    assert made == []
    assert {outcome.status for outcome in outcomes} == {"reused"}


def test_what_is_missing_of_a_unit_is_made_again_with_the_rest_of_it(store):
    run(store, grid())
    gone = prepare(grid(seeds=[1])[0])
    store.file(gone.cell).unlink()
    made, outcomes = run(store, grid())
    assert {cell.seed for cell in made} == {1}
    assert len(made) == len(SYSTEMS) * len(RATES)
    reasons = {outcome.reason for outcome in outcomes if outcome.status == "ran"}
    assert reasons == {"not stored", "made again with the other runs of its comparison, of which 1 are missing"}


def test_runs_of_two_sessions_are_made_again_together(store):
    half = [cell for cell in grid(seeds=[0]) if cell.system == SYSTEMS[0]]
    other = [cell for cell in grid(seeds=[0]) if cell.system == SYSTEMS[1]]
    run(store, half)
    run(store, other)
    sweep = Made().sweep(store, grid(seeds=[0]))
    assert len(sweep.missing) == 4, "a figure is not drawn from them either"
    assert sweep.why(sweep.missing[0]) == "made again with the other runs of its comparison: they are of 2 sittings"
    made, _ = run(store, grid(seeds=[0]))
    assert len(made) == 4
    assert run(store, grid(seeds=[0]))[0] == []


def test_another_repeat_leaves_those_that_are_there(store):
    run(store, grid(seeds=[0, 1]))
    made, _ = run(store, grid(seeds=[0, 1, 2]))
    assert {cell.seed for cell in made} == {2}


@pytest.mark.parametrize("stopped_at", [0, 3, 5, 8, 11])
def test_an_interrupted_sweep_makes_only_unfinished_units_again(store, stopped_at):
    with pytest.raises(KeyboardInterrupt):
        run(store, grid(), breaks_at=stopped_at)
    made, outcomes = run(store, grid())
    per_unit = len(SYSTEMS) * len(RATES)
    assert {cell.seed for cell in made} == set(range(stopped_at // per_unit, len(SEEDS)))
    assert len(made) == per_unit * (len(SEEDS) - stopped_at // per_unit)
    assert len(outcomes) == len(grid())


def test_comparisons_do_not_share_runs(store):
    run(store, grid("rates"))
    made, _ = run(store, grid("ladder"))
    assert len(made) == len(grid())
    assert run(store, grid("rates"))[0] == []


def test_simulated_runs_and_single_ones_have_no_unit(store):
    for cells in (grid(executor="virtual"), grid(None)):
        assert {unit_of(prepare(cell)) for cell in cells} == {None}
        run(store, cells[:-1])
        made, _ = run(store, cells)
        assert [cell.key for cell in made] == [prepare(cells[-1]).cell.key]


def test_the_comparison_is_part_of_the_key_and_no_system_sees_it():
    alone, compared = (prepare(fake_cell(executor="real", **knobs)) for knobs in ({}, {COMPARISON: "rates"}))
    assert alone.cell.key != compared.cell.key
    assert compared.cell.comparison == "rates"
    assert alone.deployment == compared.deployment
    assert replace(compared.cell, knobs=alone.cell.knobs).key == alone.cell.key
