from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from repro.cli.main import app
from repro.reports.claims import Finding, Judged, count, judge, judge_all
from repro.reports.paper import Claim, load_claims

CLAIMS = {claim.id: claim for claim in load_claims("dllm-serve")}


def verdict(claim: str | Claim, value: float | tuple[float, ...], **more: object) -> str:
    stated = CLAIMS[claim] if isinstance(claim, str) else claim
    return judge(stated, Finding(claim=stated.id, value=value, obtained="simulated", how="", **more)).verdict  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("claim", "value", "expected"),
    [
        ("dllm-4090-burst-peak", 76.6 * 1.149, "reproduced"),
        ("dllm-4090-burst-peak", 76.6 * 1.151, "not reproduced"),  # equal: no trend to fall back on
        ("dllm-4090-burst-ratio", 1.81 * 1.119, "reproduced"),
        ("dllm-4090-burst-ratio", 3.0, "partly (trend holds)"),
        ("dllm-4090-burst-ratio", 0.99, "not reproduced"),
        ("dllm-abs-tput-4090", (1.7, 1.9), "reproduced"),
        ("dllm-abs-tput-4090", (1.7, 2.9), "partly (trend holds)"),
        ("dllm-abs-tput-4090", (0.9, 1.81), "not reproduced"),
        ("dllm-linear-04", 0.31, "reproduced"),
        ("dllm-linear-04", 0.45, "reproduced"),
        ("dllm-linear-04", 0.29, "not reproduced"),
        ("dllm-4090-burst-base-lat", 4001.0, "reproduced"),
        ("dllm-4090-burst-base-lat", 3999.0, "not reproduced"),
        ("dllm-jitter-sd", 45.0, "reproduced"),
        ("dllm-jitter-sd", 5.0, "partly (trend holds)"),
        ("dllm-jitter-sd", -5.0, "not reproduced"),
        ("dllm-serve-best-tput", 1.0, "reproduced"),
        ("dllm-serve-best-tput", 2.0, "not reproduced"),
    ],
)
def test_verdicts(claim: str, value: float | tuple[float, ...], expected: str) -> None:
    assert verdict(claim, value) == expected


def test_orderings_need_to_be_told() -> None:
    assert verdict("dllm-in-trend", -0.1, holds=True) == "reproduced"
    assert verdict("dllm-in-trend", 0.1, holds=False) == "not reproduced"
    with pytest.raises(ValueError, match="must say whether it holds"):
        verdict("dllm-in-trend", -0.1)


def test_another_model_is_not_comparable() -> None:
    assert verdict("dllm-gsm-head", 75.1, comparable=False) == "not comparable"


def test_counts_of_values_must_agree() -> None:
    with pytest.raises(ValueError, match="states one value"):
        verdict("dllm-4090-burst-peak", (1.0, 2.0))
    with pytest.raises(ValueError, match="states 3 values"):
        verdict("dllm-n-requests", (2000.0, 2000.0))


def test_errors_are_relative_and_only_of_single_numbers() -> None:
    def error(claim: str, value: float | tuple[float, ...]) -> float | None:
        return judge(CLAIMS[claim], Finding(claim=claim, value=value, obtained="simulated", how="")).error_percent

    assert error("dllm-4090-burst-fast", 21.2) == pytest.approx(-50)
    assert error("dllm-abs-tput-4090", (1.6, 1.8)) is None
    assert error("dllm-4090-burst-base-lat", 5000.0) is None


def test_every_claim_gets_a_verdict_and_comparable_findings_win() -> None:
    claims = load_claims("dllm-serve")
    findings = [
        Finding(claim="dllm-gsm-head", value=90.0, obtained="measured", how="tiny", comparable=False),
        Finding(claim="dllm-gsm-head", value=75.0, obtained="measured", how="8B"),
        Finding(claim="dllm-gsm-head", value=10.0, obtained="measured", how="later"),
    ]
    judged = judge_all(claims, findings)
    assert [each.claim for each in judged] == list(claims)
    counts = count(judged)
    assert counts["reproduced"] == 1
    assert counts["paper's inconsistency"] == sum(claim.kind == "inconsistency" for claim in claims)
    assert sum(counts.values()) == len(claims)
    with pytest.raises(ValueError, match="unknown claim 'nosuch'"):
        judge_all(claims, [replace(findings[0], claim="nosuch")])


def test_not_run_without_a_finding() -> None:
    assert judge(CLAIMS["dllm-gsm-head"], None) == Judged(
        claim=CLAIMS["dllm-gsm-head"], finding=None, verdict="not run", error_percent=None
    )


def test_command_without_runs(tmp_path: Path) -> None:
    where = ["--result-dir", str(tmp_path / "runs"), "--out-dir", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["claims", *where, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert {each["claim"] for each in report["claims"]} == set(CLAIMS)
    assert report["verdicts"]["not run"] > 40
    with (tmp_path / "out" / "claims-dllm-serve.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["claim"] for row in rows] == list(CLAIMS)
    table = CliRunner().invoke(app, ["claims", *where])
    assert "The paper's own inconsistencies" in table.stdout
    assert "not run" in table.stdout
