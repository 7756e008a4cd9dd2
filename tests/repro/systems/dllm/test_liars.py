"""A scheduler of one's own is judged by what was executed: what it says of itself decides nothing."""

import re

import pytest
from support.cells import a_cell

from engines.errors import RunError, UserError
from repro.runs.experiment import prepare
from repro.runs.record import RunRecord
from repro.systems.dllm.record import DLLM


def ran(name: str) -> RunRecord:
    knobs = {"num_prompts": 6, "max_num_seqs": 2, "gen_length": 64, "steps": 8, "scheduler": f"support.liars:{name}"}
    knobs["max_num_batched_tokens"] = 1000
    return prepare(a_cell(platform="rtx4090", executor="roofline", **knobs)).run()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Twice", "scheduler Twice runs a request twice in one step"),
        ("Empty", "scheduler Empty plans a step without requests"),
        ("Shortens", "scheduler Shortens runs request 0 with total_len="),
        ("Hurries", "scheduler Hurries runs request 0 with commit=32, where 8 is due"),
        ("NeverRefreshes", "with phase=<Phase.REUSE: 'reuse'>, where <Phase.FULL: 'full'> is due"),
        ("Stranger", "scheduler Stranger runs request 1000, which has ended or was never submitted"),
        ("Pads", "scheduler Pads pads a batch to 1 tokens, fewer than a member has"),
        ("AdmitsAll", "scheduler AdmitsAll reports requests 0, 1, 2, 3, 4, 5 as admitted, 0, 1 began"),
        ("Crowds", "scheduler Crowds runs 4 requests at once, max_num_seqs=2"),
        ("Overlaps", "scheduler Overlaps gives request 1 K/V rows that another request holds"),
        ("OtherPool", "K/V rows, the pool has"),
        ("Early", "scheduler Early reports first_block=0, 1 of a step with first_block=none"),
        ("Crashes", "policy Crashes.schedule fails (KeyError: 'nothing'): correct it"),
        ("Wanders", "scheduler Wanders plans no StepPlan"),
        ("Listed", "scheduler Listed plans no StepPlan with a whole number of scheduled_tokens and a tuple of items"),
        ("Floats", "scheduler Floats plans a step with an item whose fields are of another kind than PlanItem's"),
        ("Leaves", "policy Leaves.schedule fails (GeneratorExit: ): correct it"),
        ("Subclassed", "scheduler Subclassed plans no StepPlan"),
    ],
)
def test_a_plan_that_is_not_what_requests_need_ends_the_run_with_a_sentence(name, said):
    with pytest.raises(RunError, match=re.escape(said)):
        ran(name)


def test_a_scheduler_that_changes_what_it_is_made_with_is_refused():
    for name in ("OwnPool", "Unmade"):
        with pytest.raises(UserError, match=rf"scheduler='support\.liars:{name}' replaces the config, pool, rule"):
            ran(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Cheap", r"\d+ steps compute up to \d+ query tokens, max_num_batched_tokens=1000"),
        ("Drops", "1 of 6 requests did not finish"),
    ],
)
def test_a_budget_that_was_exceeded_and_a_request_that_was_dropped_are_in_the_verdict(name, said):
    (reason,) = DLLM.assess(ran(name)).reasons
    assert re.fullmatch(said, reason)


def test_one_that_starves_is_told_by_the_longest_wait_beside_the_mean():
    record = ran("Starves")
    assert DLLM.assess(record).valid
    waits = [
        admitted - arrival
        for admitted, arrival in zip(record.requests["admitted_s"], record.requests["arrival_s"], strict=True)
    ]
    assert record.facts["wait_s"] == {"mean": pytest.approx(sum(waits) / 6), "longest": max(waits)}
    assert waits.index(max(waits)) == 1
    assert record.facts["latency_s"]["longest"] == DLLM.summarize(record)["e2el_s"]["max"]
