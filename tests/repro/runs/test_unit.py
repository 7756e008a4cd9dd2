"""Measured cells that are compared are made in one sitting, taking turns, and reused only together."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.fake_system import deployed, fake_cell

from repro.runs.cell import COMPARISON, Cell
from repro.runs.experiment import Experiment, prepare
from repro.runs.sitting import Sitting, interleaved, unit_of
from repro.runs.store import Store
from repro.runs.sweep import CellOutcome, Sweep

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


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


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
