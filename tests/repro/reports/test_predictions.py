"""Medians over predictions, and the places that quote them."""

import json
import math
from typing import Any

import pytest

from engines.errors import UserError
from repro import paths
from repro.reports.fitting import PROTOCOLS, medians, medians_sentence, read_report, report_path

NUM_REQUESTS = {"livebench": 128, "burst": 2000, "osc": 2000}
QUEUED = 0.2
"""A queue's latency is its throughput's to within this, the tolerance of the latencies that a paper prints."""
LATENCY_OF = {
    "dllm-4090-burst-peak": "dllm-4090-burst-serve-lat",
    **{f"dllm-t4-{dataset}-serve-tput": f"dllm-t4-{dataset}-serve-lat" for dataset in NUM_REQUESTS},
}
"""Claim of a target's throughput -> that of its latency."""


def comparison(error: float | None, unit: str = "tok/s", **other: Any) -> dict[str, Any]:
    own = {"role": "prediction", "kind": "stated", "unit": unit, "expected": 100.0, "error_percent": error}
    return {**own, "ours": None if error is None else 100 + error, **other}


def test_medians_have_two_digits():
    found = medians([comparison(error) for error in (1.234, 2.3456, -99.0)])
    assert found == {"throughputs": {"count": 3, "median_percent": 2.35}}


def test_medians_are_of_predictions_alone():
    found = medians(
        [
            comparison(5.0),
            comparison(-10.0),
            comparison(90.0, role="fitted"),
            comparison(91.0, role="implied by the fit"),
            comparison(0.0, role="by construction"),
            comparison(92.0, kind="derived"),
            comparison(None),
            comparison(30.0, "x"),
            comparison(30.0, "x"),  # the same number, stated again
            comparison(30.0, "%"),
            comparison(-40.0, "s"),
            comparison(80.0, "GB"),
        ]
    )
    assert found == {
        "throughputs": {"count": 2, "median_percent": 7.5},
        "ratios": {"count": 2, "median_percent": 30.0},
        "latencies": {"count": 1, "median_percent": 40.0},
    }
    assert medians_sentence(found) == "7.5 % over 2 throughputs, 30.0 % over 2 ratios, 40.0 % over 1 latency"
    assert medians([]) == {}
    assert medians_sentence({}) == "no prediction to compare with"


@pytest.mark.parametrize("card", PROTOCOLS)
def test_stored_reports_call_no_target_a_prediction(card):
    report = read_report(card)
    assert report is not None
    roles = {each["claim"]: each["role"] for each in report["comparisons"]}
    assert {claim for claim, role in roles.items() if role == "fitted"} == PROTOCOLS[card].targets.keys()


@pytest.mark.parametrize("card", PROTOCOLS)
def test_no_stored_prediction_is_a_closed_form_of_fitted_numbers(card):
    """No formula gives the committed values themselves, to their last digits: throughputs, requests served, and their ratios."""
    report = read_report(card)
    assert report is not None
    fitted = [each["ours"] for each in report["comparisons"] if each["role"] == "fitted"]
    forms = [*fitted, *(value / 256 for value in fitted), *(a / b for a in fitted for b in fitted)]
    assert fitted
    for each in report["comparisons"]:
        values = each["ours"] if isinstance(each["ours"], list) else [each["ours"]]
        if each["role"] == "prediction" and each["unit"] != "rank":
            found = [value for value in values if any(math.isclose(value, form, rel_tol=1e-9) for form in forms)]
            assert not found, f"{each['claim']}: {found} follow from what was fitted"


@pytest.mark.parametrize("card", PROTOCOLS)
def test_a_stored_latency_of_a_target_is_a_prediction_where_no_queue_gives_it(card):
    """Of LiveBench's 128 requests the L40S holds most at once."""
    report, protocol = read_report(card), PROTOCOLS[card]
    assert report is not None
    rows = {each["claim"]: each for each in report["comparisons"]}
    for claim, dataset in protocol.targets.items():
        throughput, latency = rows[claim], rows[LATENCY_OF[claim]]
        queue = NUM_REQUESTS[dataset] / 2 * (256 / throughput["ours"] - 1 / protocol.rate)
        is_given = abs(queue / latency["ours"] - 1) <= QUEUED
        assert is_given is (dataset != "livebench")
        assert latency["role"] == ("implied by the fit" if is_given else "prediction")


def test_a_report_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "CALIBRATION", tmp_path)
    assert read_report("l40s") is None
    for text in ('{"held": []}', "{", json.dumps({"schema_version": 2})):
        report_path("l40s").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=r"l40s-report\.json cannot be used .*run 'repro calibrate' again"):
            read_report("l40s")
