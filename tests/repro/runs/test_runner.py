"""Which process makes which run. What the runs leave behind is in ``test_sweep``."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_system import deployed, die_until, fake_cell
from support.fake_workers import PACKING

from repro.runs.experiment import Experiment, prepare
from repro.runs.pool import local_process
from repro.runs.runner import Hooks, run_in_pool
from repro.runs.turns import KinTurns, repeated


def taken(turns: KinTurns, workers: list[int]) -> list[tuple[int, int]]:
    """(process, place) in the order in which the processes ask."""
    found = [(worker, turns.take(worker)) for worker in workers]
    return [(worker, number) for worker, number in found if number is not None]


def test_repeats_of_a_cell_stay_with_the_process_that_began_them() -> None:
    """Two cells, three repeats each, all of one seed first; the first process is twice as fast."""
    turns = KinTurns("ab" * 3, 2)
    assert taken(turns, [0, 0, 1, 0, 1, 1, 0]) == [(0, 0), (0, 2), (1, 1), (0, 4), (1, 3), (1, 5)]


def test_process_with_nothing_left_takes_over_what_has_most_left_to_do() -> None:
    turns = KinTurns("abcabcbc", 2)
    assert taken(turns, [0, 0, 1]) == [(0, 0), (0, 1), (1, 2)]
    assert taken(turns, [0, 0, 0, 0]) == [(0, 3), (0, 4), (0, 6), (0, 5)]
    assert taken(turns, [1, 0]) == [(1, 7)]


def test_cells_without_repeats_go_to_whoever_is_free() -> None:
    assert taken(KinTurns("abcd", 2), [0, 0, 0, 1]) == [(0, 0), (0, 1), (0, 2), (1, 3)]


@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 2), min_size=40, max_size=40))
def test_every_run_is_made_once(kins: list[int], workers: list[int]) -> None:
    turns = KinTurns(kins, 3)
    assert sorted(number for _, number in taken(turns, workers)) == list(range(len(kins)))
    assert turns.take(0) is None


def test_repeats_differ_in_their_seed_alone() -> None:
    def kin(**changes: object) -> object:
        return repeated(prepare(replace(fake_cell(seed=0), **changes)))  # type: ignore[arg-type]

    assert kin(seed=3, figure="another") == kin()
    assert kin(rate=0.25) != kin()
    assert kin(knobs=(("num_prompts", 3),)) != kin()


@pytest.mark.skipif(sys.platform == "win32", reason="a process is killed by a signal")
@pytest.mark.parametrize("num_deaths", [2, 3])
def test_run_that_kills_its_process_is_tried_once_more(
    num_deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And costs no other: not the next either, which had been handed to the same process. Of the two it might have been either
    when the first process died."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    experiments = [prepare(fake_cell(seed=seed, num_prompts=2)) for seed in range(4)]
    experiments[1] = deployed(experiments[1], before=partial(die_until, tmp_path, num_deaths))
    done: list[int] = []
    failed: list[tuple[int, str]] = []

    def on_error(experiment: Experiment, error: Exception) -> bool:
        failed.append((experiment.cell.seed, str(error)))
        return True

    hooks = Hooks(on_start=lambda _: None, on_done=lambda each, _: done.append(each.cell.seed), on_error=on_error)
    run_in_pool(experiments, KinTurns(map(repeated, experiments), 1), [partial(local_process, PACKING)], hooks)
    assert [seed for seed, _ in failed] == [1] * (num_deaths == 3)
    assert all("a process of this machine ended" in said and "tried alone 2 times" in said for _, said in failed)
    assert sorted([*done, *(seed for seed, _ in failed)]) == list(range(4))
