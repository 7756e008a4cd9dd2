"""A scheduler of one's own is judged by what was executed: what it says of itself decides nothing."""

import re

import pytest
from support.cells import a_cell
from support.tables import data_beside

from engines.errors import RunError, UserError
from repro.families.dllm.record import DLLM
from repro.runs.experiment import prepare
from repro.runs.record import RunRecord


def ran(name: str) -> RunRecord:
    knobs = {"num_prompts": 6, "max_num_seqs": 2, "gen_length": 64, "steps": 8, "scheduler": f"support.liars:{name}"}
    knobs["max_num_batched_tokens"] = 1000
    return prepare(a_cell(platform="rtx4090", executor="roofline", **knobs)).run()


@pytest.mark.parametrize(("name", "said"), data_beside(__file__, "liars").items())
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
