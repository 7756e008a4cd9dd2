"""Rivals: asked the same, paired with every row, and the fastest chosen among those that lose nothing outside noise."""

import pytest
from support.cells import CPU_TINY, H200
from support.stored_runs import FAILED, changed, runs_of, stored

from paper_figures.common.runs import Runs
from paper_figures.dllm_serve import rivals
from paper_figures.dllm_serve.rivals import COMMITS, EVERY_ROW, FAST_DLLM, POLICIES, TASKS, cell_of
from repro.reports.figures import View
from repro.runs.experiment import prepare

CPU, CARD = (View(platform=where, reading="policy", num_runs=2) for where in (CPU_TINY, H200))
CHAIN = TASKS[0]
BALANCED, TRIMMED, DPAD = (next(each for each in POLICIES if each.name.startswith(n)) for n in ("bal", "tri", "DPad"))


@pytest.mark.parametrize("view", [CPU, CARD], ids=lambda view: view.platform.name)
def test_rivals_are_asked_the_same_but_for_their_own_knobs(view):
    own = {name for policy in POLICIES for name, _ in policy.knobs} | {
        "threshold",
        "factor",
        "anchor_threshold",
        "steps",
    }
    for task in TASKS if view is CARD else [CHAIN]:
        found = [cell_of(view, *each) for each in rivals.asked(view.platform) if each[0] is task]
        assert len({tuple(knob for knob in cell.knobs if knob[0] not in own) for cell in found}) == 1
        assert len({cell.knob_values["steps"] for cell in found}) == 1 or view is CPU
        for cell in found:
            prepare(cell)


def graded(cell, lost, won, n=40):
    """Of the first half, which every row solves, it loses some, and of the others it wins some."""
    correct = [lost <= i < n // 2 or n // 2 <= i < n // 2 + won for i in range(n)]
    run = stored(cell, tok_s=100.0, n=n)
    return changed(run, record=run.record.with_columns("requests", correct=correct))


def test_points_are_of_pairs_with_every_row_of_valid_seeds():
    cells = [[cell_of(CPU, CHAIN, each).with_seed(seed) for seed in (0, 1)] for each in (EVERY_ROW, BALANCED)]
    runs = [graded(cell, 0, 0) for cell in cells[0]] + [graded(cell, 3, 1) for cell in cells[1]]
    _, ours = rivals.answered(Runs(runs, CPU))
    assert rivals.apart(ours.pair)[:3] == (6, 2, pytest.approx(-100 * 4 / 80))
    for broken in (0, -1):  # on either side
        left = [*runs]
        left[broken] = changed(runs[broken], validity=FAILED)
        _, ours = rivals.answered(Runs(left, CPU))
        assert rivals.apart(ours.pair)[:2] == (3, 1)


def test_the_fastest_of_each_side_loses_nothing_outside_noise(monkeypatch):
    speed = {FAST_DLLM.name: 1.0, BALANCED.name: 3.0, TRIMMED.name: 9.0, DPAD.name: 2.0, EVERY_ROW.name: 0.5}
    high = {FAST_DLLM.name: "0", BALANCED.name: "0.1", TRIMMED.name: "-0.1", DPAD.name: "1", EVERY_ROW.name: "0"}
    rows = {
        (CHAIN.name, name): {"points_high": value, "n": "500", "solved": "9", "low": "0", "high": "1"}
        for name, value in high.items()
    }
    monkeypatch.setattr(rivals, "committed", lambda platform: rows)
    name_of = {policy.name: policy for policy in POLICIES}
    cells = [cell_of(CARD, CHAIN, name_of[name]).with_seed(seed) for name in speed for seed in (0, 1)]
    asked = dict(zip([cell.key for cell in cells], [v for v in speed.values() for _ in (0, 1)], strict=True))
    runs = Runs(runs_of(cells, lambda cell: asked[cell.key] * (1 + cell.seed)), CARD)
    (said,) = rivals.best(rivals.speeds(runs))
    assert "balanced is 1.50 [1.50, 1.50] times as fast as DPad, dual cache" in said


def test_points_are_of_pairs_with_every_row_by_the_same_commits():
    cells = [cell_of(CPU, CHAIN, each, commit).with_seed(0) for each in (EVERY_ROW, BALANCED) for commit in COMMITS]
    lost = dict(zip([cell.key for cell in cells], (0, 5, 9, 1, 5, 12), strict=True))
    found = rivals.answered(Runs([graded(cell, lost[cell.key], 0) for cell in cells], CPU))
    apart = {each.commit: rivals.apart(each.pair)[:2] for each in found if each.policy is BALANCED}
    assert apart == {"threshold 0.9": (1, 0), "LocalLeap 0.9": (0, 0), "factor 1": (3, 0)}


def test_a_card_looks_up_the_answers_of_its_own_task(monkeypatch):
    rows = {(task.name, BALANCED.name): {"solved": "1", "n": "2", "low": "0", "high": "1"} for task in TASKS[1:]}
    monkeypatch.setattr(rivals, "committed", lambda platform: rows)
    runs = Runs(runs_of([cell_of(CARD, task, BALANCED).with_seed(0) for task in TASKS], lambda _: 1.0), CARD)
    assert [each.accuracy is None for each in rivals.speeds(runs)] == [True, False, False]
