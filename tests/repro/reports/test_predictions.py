"""Medians over predictions, and the places that quote them."""

from __future__ import annotations

import csv
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from engines.errors import UserError
from repro import paths
from repro.paths import REPO, RESULTS
from repro.reports.fitting import PROTOCOLS
from repro.reports.predictions import medians, medians_sentence, read_report, report_path

README = (REPO / "README.md").read_text(encoding="utf-8")


def comparison(error: float | None, unit: str = "tok/s", **other: Any) -> dict[str, Any]:
    own = {"role": "prediction", "kind": "stated", "unit": unit, "expected": 100.0, "error_percent": error}
    return {**own, "ours": None if error is None else 100 + error, **other}


def test_medians_are_of_predictions_alone() -> None:
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
def test_the_readme_quotes_the_reports(card: str) -> None:
    report = read_report(card)
    assert report is not None
    assert report["medians"] == medians(report["comparisons"])
    assert medians_sentence(report["medians"]) in README


@pytest.mark.parametrize("card", PROTOCOLS)
def test_stored_reports_call_no_target_a_prediction(card: str) -> None:
    report = read_report(card)
    assert report is not None
    roles = {each["claim"]: each["role"] for each in report["comparisons"]}
    assert {claim for claim, role in roles.items() if role == "fitted"} == {
        target.claim for target in PROTOCOLS[card].targets
    }


@pytest.mark.parametrize("card", PROTOCOLS)
def test_no_stored_prediction_is_a_closed_form_of_fitted_numbers(card: str) -> None:
    """Of the committed values themselves, to their last digits: throughputs, requests served, and their ratios."""
    report = read_report(card)
    assert report is not None
    fitted = [each["ours"] for each in report["comparisons"] if each["role"] == "fitted"]
    forms = [*fitted, *(value / 256 for value in fitted), *(a / b for a in fitted for b in fitted)]
    systems = [claim.removesuffix("-tput") for claim in sorted(target.claim for target in PROTOCOLS[card].targets)]
    assert fitted
    for each in report["comparisons"]:
        values = each["ours"] if isinstance(each["ours"], list) else [each["ours"]]
        if each["role"] == "prediction" and each["unit"] != "rank":
            found = [value for value in values if any(math.isclose(value, form, rel_tol=1e-9) for form in forms)]
            assert not found, f"{each['claim']}: {found} follow from what was fitted"
            # (N / 2) (256 / throughput - 1 / rate)
            assert each["claim"].removesuffix("-lat") not in systems


def test_a_report_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "CALIBRATION", tmp_path)
    assert read_report("l40s") is None
    for text in ('{"held": []}', "{", json.dumps({"schema_version": 2})):
        report_path("l40s").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=r"l40s-report\.json cannot be used .*run 'repro calibrate' again"):
            read_report("l40s")


def stored_table(card: str, name: str) -> list[dict[str, str]]:
    with (RESULTS / card / f"{name}-{card}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize(
    "setting",
    ["published, for the workload", "efficient, for the workload", "policy, packed"],
    ids=lambda name: name[:6],
)
def test_the_readme_quotes_the_readings(setting: str, place: int) -> None:
    """Throughput over the best baseline, card by card; ``place`` is 1 as published and 2 with one refresh."""
    reading = setting.partition(",")[0]
    (row,) = (line for line in README.splitlines() if line.startswith(f"| `{reading}` | ") and " / " in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    for card, quoted in (("l40s", cells[place]), ("rtx4090", cells[place + 2])):
        speed: dict[tuple[str, str], dict[str, float]] = {}
        for each in stored_table(card, "readings"):
            speed.setdefault((each["dataset"], each["setting"]), {})[each["system"]] = float(each["throughput_tok_s"])
        engine = ("dLLM-Serve, two refreshes per block (as published)", "dLLM-Serve, one refresh per block")[place - 1]
        gains = [
            speed[dataset, engine]["dllm-serve"] / max(speed[dataset, setting].values())
            for dataset in ("livebench", "burst", "osc")
        ]
        assert quoted == " / ".join(f"{gain:.2f}" for gain in gains)


def test_the_readme_quotes_the_ladders() -> None:
    """The engine's share of the paper's three steps in logarithms, and what the other two add; least to most of the data sets."""
    ladders: dict[str, list[list[float]]] = {}
    for card in ("l40s", "rtx4090"):
        rungs: dict[str, list[float]] = {}
        for each in stored_table(card, "fig8"):
            rungs.setdefault(each["dataset"], []).append(float(each["throughput_tok_s"]))
        ladders[card] = list(rungs.values())

    def percent(values: list[float]) -> str:
        return " to ".join(dict.fromkeys(f"{100 * end:.0f}" for end in (min(values), max(values)))) + " %"

    def engine(card: str) -> str:
        return percent(
            [math.log(engine / base) / math.log(whole / base) for base, engine, _, whole, *_ in ladders[card]]
        )

    def added(step: int, *cards: str) -> str:
        return percent([ladder[step] / ladder[step - 1] - 1 for card in cards for ladder in ladders[card]])

    prose = " ".join(README.split())
    assert f"{engine('l40s')} of it on the L40S and {engine('rtx4090')} on the RTX 4090" in prose
    assert f"The scheduler adds {added(2, 'l40s')} and {added(2, 'rtx4090')} to throughput" in prose
    assert f"logit-aware budgeting {added(3, 'l40s', 'rtx4090')}" in prose


def test_prose_quotes_the_measured_throughputs() -> None:
    rows = [row for row in stored_table("cpu-tiny", "fig3") if row["obtained"] != "paper"]
    highest = max(float(row["rate_req_s"]) for row in rows)

    def mean(dataset: str, system: str) -> float:
        return statistics.mean(
            float(row["throughput_tok_s"])
            for row in rows
            if (row["dataset"], row["system"], float(row["rate_req_s"])) == (dataset, system, highest)
        )

    osc, livebench, burst = (
        f"{mean(dataset, 'dllm-serve'):.0f} and {mean(dataset, 'fast-dllm'):.0f}"
        for dataset in ("osc", "livebench", "burst")
    )
    prose = " ".join(README.split())
    assert f"make {osc} tok/s on OSC, {livebench} on LiveBench, {burst} on Burst" in prose
