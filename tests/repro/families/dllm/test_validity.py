from typing import Any

import pytest
from support.records import requests_table, steps_table
from support.tables import data_beside

from repro.families.dllm.record import BLOCK_COLUMNS, BLOCKS, DLLM, STEP_COLUMNS
from repro.runs.record import RunRecord, Table, empty_table

REQUESTS: Table = {
    **requests_table((0.0, 0.0, 2.0, 2.0, 4, "ok"), (1.0, 2.0, 4.0, 4.0, 4, "ok")),
    "submit_lag_s": [0.0, 1.0],
    "prompt_len": [8, 8],
}
WORK = {"query_tokens": 12, "scheduled_tokens": 12, "logit_rows": 4, "committed_tokens": 4, "kv_rows_used": 12}
ONE = dict.fromkeys(("num_refresh", "num_running", "num_admitted", "num_first_block", "num_finished"), 1)


def step(start_s: float, forward_s: float) -> dict[str, Any]:
    times = {"start_s": start_s, "end_s": start_s + 2.0, "duration_s": 2.0, "forward_s": forward_s}
    return {**times, **WORK, **ONE, "kv_rows_total": 64}


STEPS: Table = steps_table(step(0.0, 1.0), step(2.0, 2.0))


def record(**changed: list[Any]) -> RunRecord:
    unknown = set(changed) - set(REQUESTS) - set(STEPS)
    assert not unknown
    return record_of(
        {name: changed.get(name, values) for name, values in REQUESTS.items()},
        {name: changed.get(name, values) for name, values in STEPS.items()},
    )


def record_of(requests: Table, steps: Table) -> RunRecord:
    made = RunRecord(tables={"requests": requests, "steps": steps, BLOCKS: empty_table(BLOCK_COLUMNS)})
    DLLM.check_tables(made)
    return made


def test_a_good_run_is_valid():
    assert DLLM.assess(record()).reasons == ()
    assert DLLM.assess(record()).valid


@pytest.mark.parametrize(("changed", "said"), data_beside(__file__, "faults"))
def test_each_fault_is_the_only_reason(changed, said):
    validity = DLLM.assess(record(**changed))
    assert not validity.valid
    assert validity.reasons == (said,)


def test_a_device_may_lag_behind_the_steps():
    assert DLLM.assess(record(forward_s=[3.0, 1.0])).valid
    assert DLLM.assess(record(forward_s=[None, 2.0])).valid


def test_no_requests():
    empty = record_of(empty_table(DLLM.columns["requests"]), empty_table(STEP_COLUMNS))
    assert DLLM.assess(empty).reasons == ("there are no requests",)


def test_a_stamp_no_driver_saw_is_no_fault():
    assert DLLM.assess(record(admitted_s=[None, None], first_output_s=[None, None])).valid


def test_a_run_without_steps_is_judged_by_its_requests():
    without = record_of({**REQUESTS, "submit_lag_s": [0.0, 0.0]}, empty_table(STEP_COLUMNS))
    assert DLLM.assess(without).valid


def test_over_budget_steps():
    assert DLLM.assess(record().with_manifest(max_num_batched_tokens=12)).valid
    assert DLLM.assess(record().with_manifest(max_num_batched_tokens=11)).reasons == (
        "2 steps compute up to 12 query tokens, max_num_batched_tokens=11",
    )


def test_waiting_for_a_running_step_is_not_late_but_waiting_longer_is():
    # The request due at 1 s may be submitted when the step that was running ends at 2 s. Mean latency is 2.5 s,
    # so 25 ms more are allowed.
    late = {"start_s": [0.0, 2.5], "admitted_s": [0.0, 2.5], "forward_s": [1.0, 1.5]}
    assert DLLM.assess(record(**late, submit_lag_s=[0.0, 1.02])).valid
    assert DLLM.assess(record(**late, submit_lag_s=[0.0, 1.03])).reasons == (
        "1 of 2 requests were submitted more than 25 ms late by the harness (worst 30 ms)",
    )


def test_one_late_submission_in_a_hundred_is_allowed():
    n = 100
    table = requests_table(*((float(i), None, None, i + 0.5, 4, "ok") for i in range(n)))
    for num_late, valid in ((1, True), (2, False)):
        lags = [0.011] * num_late + [0.0] * (n - num_late)
        run = record_of({**table, "submit_lag_s": lags}, empty_table(STEP_COLUMNS))
        assert DLLM.assess(run).valid is valid
