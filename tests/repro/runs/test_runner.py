"""Which process makes which run. What the runs leave behind is in ``test_sweep``."""

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_system import deployed, die_until, fake_cell
from support.fake_workers import PACKING

from repro.runs.experiment import Experiment, prepare
from repro.runs.pool import Assignment, Hooks, group_repeats, local_process, run_by_workers

EXPERIMENTS = [prepare(fake_cell(seed=seed, num_prompts=2)) for seed in range(12)]


def taken(assignment: Assignment, workers: Iterable[int]) -> list[tuple[int, int]]:
    """(process, seed) in the order in which the processes ask."""
    found = [(worker, assignment.take(worker)) for worker in workers]
    return [(worker, each.cell.seed) for worker, each in found if each is not None]


def groups(*sizes: int) -> list[list[Experiment]]:
    left = iter(EXPERIMENTS)
    return [[next(left) for _ in range(size)] for size in sizes]


def test_repeats_of_a_cell_stay_with_the_process_that_began_them():
    """Two cells, three repeats each; the first process is twice as fast, and helps in the end."""
    assignment = Assignment(groups(3, 3))
    assert taken(assignment, [0, 0, 1, 0, 0, 1, 1]) == [(0, 0), (0, 1), (1, 3), (0, 2), (0, 4), (1, 5)]


def test_process_with_nothing_left_joins_where_most_is_left_to_do():
    assignment = Assignment(groups(2, 8))
    assert taken(assignment, [0, 1, 2, 0]) == [(0, 0), (1, 2), (2, 3), (0, 1)]
    assert taken(assignment, [0, 2, 0, 2, 2, 1]) == [(0, 4), (2, 5), (0, 6), (2, 7), (2, 8), (1, 9)]


def test_what_a_lost_process_shared_stays_with_the_others():
    assignment = Assignment(groups(4))
    assert taken(assignment, [0, 1]) == [(0, 0), (1, 1)]
    assert not assignment.lost(0, EXPERIMENTS[0])
    assert taken(assignment, [1, 2, 2, 1, 0]) == [(1, 2), (2, 0), (2, 3)]


def test_cells_without_repeats_go_to_whoever_is_free():
    assert taken(Assignment(groups(1, 1, 1, 1)), [0, 0, 0, 1]) == [(0, 0), (0, 1), (0, 2), (1, 3)]


@given(st.lists(st.integers(1, 4), max_size=3), st.lists(st.integers(0, 2), min_size=40, max_size=40))
def test_every_run_is_made_once(sizes, workers):
    assignment = Assignment(groups(*sizes))
    assert sorted(seed for _, seed in taken(assignment, [*workers, 0, 1, 2, 0, 1, 2])) == list(range(sum(sizes)))
    assert assignment.take(0) is None
    assert not assignment.is_left


def test_repeats_differ_in_their_seed_alone():
    asked = [
        prepare(replace(fake_cell(seed=0), **changes))
        for changes in ({}, {"seed": 3, "figure": "another"}, {"rate": 0.25}, {"knobs": (("num_prompts", 3),)})
    ]
    assert list(map(len, group_repeats(asked))) == [2, 1, 1]


@pytest.mark.skipif(sys.platform == "win32", reason="a process is killed by a signal")
@pytest.mark.parametrize("num_deaths", [1, 2])
def test_run_that_kills_its_process_is_tried_once_more(num_deaths, tmp_path, monkeypatch):
    """And costs no other."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    experiments = [prepare(fake_cell(seed=seed, num_prompts=2)) for seed in range(4)]
    experiments[1] = deployed(experiments[1], before=partial(die_until, tmp_path, num_deaths))
    done: list[int] = []
    failed: list[tuple[int, str]] = []

    def on_error(experiment: Experiment, error: Exception) -> None:
        failed.append((experiment.cell.seed, str(error)))

    hooks = Hooks(on_start=lambda _: None, on_done=lambda each, _: done.append(each.cell.seed), on_error=on_error)
    run_by_workers(Assignment([experiments]), [partial(local_process, PACKING)], hooks)
    assert [seed for seed, _ in failed] == [1] * (num_deaths == 2)
    assert all("a process of this machine ended" in said and "tried 2 times" in said for _, said in failed)
    assert sorted([*done, *(seed for seed, _ in failed)]) == list(range(4))
