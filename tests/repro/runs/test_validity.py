"""What is checked of every run, whatever its family records besides."""

from collections.abc import Iterator

import numpy as np
import pytest
from support.tables import data_beside

from repro.runs.family import Family, late_submissions
from repro.runs.record import RunRecord, Table

CASES = data_beside(__file__, "cases")

REQUESTS: Table = data_beside(__file__, "validity")["requests"]
ANY = Family(name="any")


def record(**changed: list[object]) -> RunRecord:
    made = RunRecord(tables={"requests": {**REQUESTS, **changed}})
    ANY.check_tables(made)
    return made


def test_a_good_run_is_valid():
    assert ANY.assess(record()).reasons == ()
    assert ANY.assess(record()).valid


@pytest.mark.parametrize(("changed", "said"), CASES["faults"])
def test_each_fault_is_the_only_reason(changed, said):
    validity = ANY.assess(record(**changed))
    assert not validity.valid
    assert validity.reasons == (said,)


def test_a_stamp_no_driver_saw_is_no_fault():
    assert ANY.assess(record(admitted_s=[None, None], first_output_s=[None, None])).valid


def test_a_submission_may_be_as_late_as_one_per_cent_of_the_mean_latency():
    # Latencies are 2 and 3 s: 25 ms.
    assert list(late_submissions(record(submit_lag_s=[0.0, 0.02]))) == []
    assert list(late_submissions(record(submit_lag_s=[0.0, 0.03]))) == [
        "1 of 2 requests were submitted more than 25 ms late by the harness (worst 30 ms)"
    ]


def test_lateness_counts_from_when_a_submission_was_possible():
    late = record(submit_lag_s=[0.0, 0.5])
    assert list(late_submissions(late, np.array([0.0, 1.5]))) == []
    assert len(list(late_submissions(late, np.array([0.0, 1.4])))) == 1


def test_what_was_never_submitted_is_not_late():
    assert list(late_submissions(record(submit_lag_s=[None, None]))) == []


def test_a_familys_own_checks_come_on_top():
    def odd(made: RunRecord) -> Iterator[str]:
        yield f"{len(made.requests['request_id'])} is odd enough"

    assert Family(name="odd", checks=(odd,)).assess(record(request_id=[0, 0])).reasons == (
        "1 request ids are repeated",
        "2 is odd enough",
    )
