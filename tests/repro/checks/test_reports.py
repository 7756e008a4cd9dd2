"""What is committed has to be what would be made today: calibration reports and claims."""

import csv
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.stored_runs import stored

from engines.cost.roofline import Calibration
from repro import paths
from repro.checks import answers
from repro.checks.answers import check_claims, check_reports
from repro.checks.results import Checked, Today
from repro.reports import claims_file
from repro.reports.claims import Answer, Finding, Role, judge_all
from repro.reports.evidence import sources
from repro.reports.figures import DLLM_SERVE, PAPERS
from repro.reports.fitting import FITTED, PROTOCOLS
from repro.reports.paper import load_claims
from repro.reports.predictions import medians, report, report_path, write_report
from repro.reports.stamp import save_claims
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.seal import sealed
from repro.systems.calibration import load_calibration, save_calibration
from repro.systems.dllm import requests

FITTED_CELL = PROTOCOLS["l40s"].cell(PROTOCOLS["l40s"].targets[0])
"""As reports have it, by the roofline that is fitted."""
CELL = replace(FITTED_CELL, knobs=())
"""As claims have it: nothing is fitted there."""
TARGET = PROTOCOLS["l40s"].targets[0].claim


@pytest.fixture(autouse=True, scope="module")
def _prompts_are_encoded_once() -> Iterator[None]:
    """All of the graded cells of the claims ask the same problems."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(requests, "encode_prompts", cache(requests.encode_prompts))
        yield


def answer(
    cell: Cell, code: str | None = None, claim: str = TARGET, value: float = 90.0, role: Role = "fitted"
) -> Answer:
    experiment = prepare(cell)
    run = replace(
        stored(cell, tok_s=90.0), cell=experiment.cell, provenance={"git": {"commit": "abc"}, "elapsed_s": 1.0}
    )
    run = replace(run, manifest={**run.manifest, "code": {"digest": code or experiment.code.digest}})
    finding = Finding(claim=claim, value=value, obtained="simulated", how="")
    return Answer(finding=finding, roles=(role,), runs=(run,))


def reported(*given: Answer) -> dict[str, Any]:
    """The report of the stored fit with these answers alone."""
    judged = [each for each in judge_all(load_claims("dllm-serve"), given) if each.answer is not None]
    return report(load_calibration("l40s"), judged)


def l40s(today: Today | None = None) -> Checked:
    (own,) = (each for each in check_reports(today) if each.path.name.startswith("l40s"))
    return own


def statuses(root: Path, given: Answer, today: Today | None = None) -> list[str]:
    save_claims(DLLM_SERVE, judge_all(load_claims("dllm-serve"), [given]), root / "claims-dllm-serve.csv")
    return [each.status for each in check_claims(root, today)]


def test_a_cell_is_prepared_once_whichever_figure_asks():
    today = Today()
    assert today.experiment(replace(CELL, figure="fig3")) is today.experiment(CELL)
    assert today.experiment(replace(CELL, seed=1)) is not today.experiment(CELL)
    codes = today.codes("dllm-serve", ("l40s",))
    assert codes[today.experiment(CELL).cell.key] == today.experiment(CELL).code.digest
    fitted = today.codes("dllm-serve", ("l40s",), charged=FITTED)
    assert fitted[today.experiment(FITTED_CELL).cell.key] == today.experiment(FITTED_CELL).code.digest
    assert fitted.keys().isdisjoint(codes)


@pytest.fixture(scope="module")
def today() -> Today:
    """Preparing the cells of all claims takes seconds."""
    return Today()


def test_claims_are_of_todays_runs(tmp_path, today, monkeypatch):
    assert check_claims(tmp_path) == []
    assert CELL.key in {cell.key for source in sources(DLLM_SERVE.entries, ("l40s",)) for cell in source.cells}
    assert statuses(tmp_path, answer(CELL, code="0123"), today) == ["other code"]
    assert statuses(tmp_path, answer(replace(CELL, rate=0.123)), today) == ["stale"]
    assert statuses(tmp_path, answer(CELL), today) == ["same"]
    monkeypatch.setattr(answers, "answered_by", lambda paper: "another")
    assert [each.status for each in check_claims(tmp_path, today)] == ["other code"]
    (tmp_path / "claims-dllm-serve.csv").write_text("claim,verdict\n", encoding="utf-8")
    assert [each.status for each in check_claims(tmp_path, today)] == ["stale"]
    (tmp_path / "claims-dllm-serve.json").unlink()
    assert [(each.status, each.is_fault) for each in check_claims(tmp_path, today)] == [("no stamp", True)]


COMPUTED = next(
    each
    for source in sources(DLLM_SERVE.entries, ("rtx4090",))
    if not source.cells
    for each in source.answers([])
    if each.finding.claim == "dllm-2x-requests"
)


CERTAIN = "by construction"


def flip(row: dict[str, str]) -> None:
    row["verdict"] = "reproduced" if row["verdict"] == "not reproduced" else "not reproduced"


@pytest.mark.parametrize("knows_the_stamp", [False, True])
@pytest.mark.parametrize(
    ("claim", "change", "reason"),
    [
        (TARGET, flip, "verdict is "),
        (TARGET, lambda row: row.update(ours="5000"), "verdict is |error_percent is |reason is "),
        (TARGET, lambda row: row.update(expected="1"), "expected is '1', where claims.yaml and its values give"),
        (TARGET, lambda row: row.update(tolerance="99"), "tolerance is '99'"),
        (TARGET, lambda row: row.update(role="prediction"), "role is 'prediction'"),
        (
            "dllm-2x-requests",
            lambda row: row.update(
                ours="2",
                error_percent="0",
                verdict="by construction",
                reason="no run can change it",
                role=CERTAIN,
                roles=CERTAIN,
            ),
            r"ours is 2, where it is computed to be 1\.79",
        ),
        ("dllm-2x-requests", lambda row: row.clear(), "its claims are not those of claims.yaml"),
    ],
)
def test_rows_changed_by_hand_are_found(tmp_path, today, claim, change, reason, knows_the_stamp):
    path = tmp_path / "claims-dllm-serve.csv"
    save_claims(DLLM_SERVE, judge_all(load_claims("dllm-serve"), [answer(CELL), COMPUTED]), path)
    rows = claims_file.read(path)
    (row,) = (row for row in rows if row["id"] == claim)
    change(row)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, claims_file.COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for row in rows if row)
    if knows_the_stamp:
        stamp = json.loads(path.with_suffix(".json").read_text())
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        del stamp["seal"]
        path.with_suffix(".json").write_text(json.dumps(sealed({**stamp, "files": {path.name: digest}})))
    (found,) = check_claims(tmp_path, today)
    assert (found.status, found.is_fault) == ("stale", True)
    assert re.search(reason if knows_the_stamp else "it is not as it was written", found.reason), found.reason


def test_a_number_changed_in_the_claims_is_found(tmp_path, today, monkeypatch):
    save_claims(DLLM_SERVE, judge_all(load_claims("dllm-serve"), [answer(CELL)]), tmp_path / "claims-dllm-serve.csv")
    changed = tmp_path / "claims.yaml"
    changed.write_text(DLLM_SERVE.claims.read_text().replace("value: 1.81", "value: 1.91", 1))
    other = {**PAPERS, "dllm-serve": replace(DLLM_SERVE, claims=changed)}
    monkeypatch.setattr(answers, "PAPERS", other)
    (found,) = check_claims(tmp_path, today)
    assert found.status == "stale"
    assert "expected is '1.81', where claims.yaml and its values give '1.91'" in found.reason


@pytest.mark.parametrize("knows_the_seal", [False, True])
@pytest.mark.parametrize(
    "change",
    [{"verdict": "not reproduced"}, {"ours": 91.0}, {"error_percent": 0.0}, {"role": "prediction"}, {"expected": 90.0}],
    ids=lambda change: next(iter(change)),
)
def test_a_falsified_report_is_found(tmp_path, today, monkeypatch, change, knows_the_seal):
    found = reported(answer(FITTED_CELL))
    monkeypatch.setattr(paths, "CALIBRATION", tmp_path)
    write_report(found)
    assert l40s(today).status == "same"
    value = json.loads(report_path("l40s").read_text())
    value["comparisons"][0].update(change)
    if knows_the_seal:
        value["medians"] = medians(value["comparisons"])
        del value["seal"]
        value = sealed(value)
    report_path("l40s").write_text(json.dumps(value))
    own = l40s(today)
    assert (own.status, own.is_fault) == ("stale", True)
    assert (own.reason == "it is not as it was written") is not knows_the_seal


@pytest.mark.parametrize(
    ("cell", "code", "status", "reason"),
    [
        (FITTED_CELL, None, "same", "1 runs"),
        (FITTED_CELL, "0123", "other code", "runs were made by other code: 0123"),
        (CELL, None, "stale", "1 of 1 runs are of other data, calibration or settings: "),
        (replace(FITTED_CELL, rate=0.123), None, "stale", "1 of 1 runs are of other data, calibration or settings: "),
    ],
    ids=["as fitted", "other code", "as claims", "other rate"],
)
def test_a_report_is_of_runs_by_the_roofline_that_is_fitted(tmp_path, today, monkeypatch, cell, code, status, reason):
    found = reported(answer(cell, code))
    monkeypatch.setattr(paths, "CALIBRATION", tmp_path)
    write_report(found)
    own = l40s(today)
    assert own.status == status
    assert own.reason.startswith(reason)


@pytest.mark.parametrize(("throughput", "speedup"), [(106.0, "reproduced"), (85.7, "not reproduced")])
def test_a_report_judges_what_follows_from_its_own_numbers(tmp_path, today, monkeypatch, throughput, speedup):
    """A speedup within its tolerance is not reproduced where a throughput that it is made of is not."""
    cell = replace(FITTED_CELL, dataset="burst")
    followed, following = "dllm-t4-burst-serve-tput", "dllm-t4-burst-serve-speedup"
    found = reported(
        answer(cell, claim=followed, value=throughput), answer(cell, claim=following, value=2.88, role="prediction")
    )
    monkeypatch.setattr(paths, "CALIBRATION", tmp_path)
    verdicts = {each["claim"]: each for each in found["comparisons"]}
    assert verdicts[followed]["verdict"] == verdicts[following]["verdict"] == speedup
    write_report(found)
    assert l40s(today).status == "same"
    verdicts[following]["verdict"] = "not reproduced" if speedup == "reproduced" else "reproduced"
    write_report(found)
    assert l40s(today).reason.startswith(f"{following}: verdict is ")


def test_another_fit_makes_reports_and_claims_stale(tmp_path, monkeypatch):
    found = reported(answer(FITTED_CELL))
    fits = {card: load_calibration(card) for card in PROTOCOLS}
    monkeypatch.setattr(paths, "CALIBRATION", tmp_path)
    monkeypatch.setattr("repro.systems.calibration.CALIBRATION", tmp_path)
    load_calibration.cache_clear()
    try:
        for card, fit in fits.items():
            save_calibration(fit, tmp_path / f"{card}.json")
            write_report(found if card == "l40s" else report(fit, []))
        assert statuses(tmp_path, answer(CELL)) == ["same"]
        assert {each.path.name: each.status for each in check_reports()} == {
            "rtx4090-report.json": "same",
            "l40s-report.json": "same",
        }
        before = answer(CELL)
        changed: Calibration = replace(fits["l40s"], matmul_efficiency=0.123)
        save_calibration(changed, tmp_path / "l40s.json")
        load_calibration.cache_clear()
        assert l40s().status == "stale"
        write_report({**found, "calibration": asdict(changed)})  # the constants agree, the runs are of the old ones
        own = l40s()
        assert own.status == "stale"
        assert "other data, calibration or settings" in own.reason
        assert statuses(tmp_path, before) == ["stale"]
    finally:
        load_calibration.cache_clear()


def test_medians_changed_by_hand_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "CALIBRATION", tmp_path)
    for card in PROTOCOLS:
        value = report(load_calibration(card), [])
        value["medians"] = {"throughputs": {"count": 9, "median_percent": 0.1}}
        write_report(value)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_report({**value, "medians": {"throughputs": {"count": 9, "median_percent": float("nan")}}})
    assert {each.reason for each in check_reports()} == {"the medians are not those of its comparisons"}
    assert asdict(load_calibration("l40s"))  # the stored constants were not touched
