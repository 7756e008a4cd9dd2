"""Conditions: each cell moves one thing, and README names the conditions of its headlines."""

import pytest
from support.cells import H200
from support.stored_runs import runs_of

from paper_figures.common.runs import Runs
from paper_figures.dllm_serve import conditions
from paper_figures.dllm_serve.conditions import CONDITIONS, FAST_DLLM, PACE, SHOWN, faster
from repro.checks.documents import TABLES
from repro.files import read_yaml
from repro.paths import REPO
from repro.reports.figures import View
from repro.runs.experiment import prepare

VIEW = View(platform=H200, reading="policy", num_runs=2)
BALANCED = next(policy for policy in SHOWN if policy.preset == "balanced")
HARDWARE = ("CPU", "H200", "H20", "L40S", "RTX 4090")
SAME = ("as above", "the same", "of finding")


def test_a_condition_moves_one_thing():
    usual = CONDITIONS[4].cell(VIEW, BALANCED).knob_values
    assert usual["num_prompts"] == 64
    for each in CONDITIONS:
        own = each.cell(VIEW, BALANCED).knob_values
        moved = {name for name in {**usual, **own} if own.get(name) != usual.get(name)} - {"replay_drawn"}
        assert len(moved) <= 1, each


def test_a_prompt_has_the_tokens_that_are_asked_for():
    (long,) = (each for each in CONDITIONS if each.value == "3000")
    assert {request.prompt_len for request in prepare(long.cell(VIEW, FAST_DLLM)).workload.requests} == {3000}


def test_a_ratio_is_over_fast_dllm_and_a_threshold_is_told_in_tokens(unsaved):
    def speed(cell):
        return (1 + cell.seed) * (3.0 if dict(cell.knobs).get("preset") == "balanced" else 2.0)

    runs = Runs(runs_of(conditions.FIGURE.cells(VIEW), speed), VIEW)
    assert faster(runs, CONDITIONS[0], BALANCED, FAST_DLLM).mean == pytest.approx(1.5)
    names = conditions.named(runs, [each for each in CONDITIONS if each.axis == PACE])
    assert names[:-1] == ["1", "2", "2.9", "4"]
    assert float(names[-1]) >= 0


def test_every_headline_names_its_hardware():
    rows = read_yaml(REPO / TABLES / "README.yaml")["headlines"]["rows"]
    for row in rows:
        _, _, said = row.split(" | ")
        assert any(word in said for word in (*HARDWARE, *SAME)), row
        if "throughput" in row and "above" not in said and "same" not in said:
            assert any(word in row for word in ("request", "req/s", "7 and 8B")), row
