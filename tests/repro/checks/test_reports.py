"""What is committed has to be what would be made today: calibration reports and claims."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
from support.stored_runs import stored

from engines.hardware.roofline import Calibration
from repro import paths
from repro.checks.results import Today, check_claims, check_reports
from repro.reports import claims_file
from repro.reports.claims import Answer, Finding, judge_all
from repro.reports.evidence import sources
from repro.reports.figures import DLLM_SERVE
from repro.reports.fitting import PROTOCOLS
from repro.reports.paper import load_claims
from repro.reports.predictions import report, report_path, write_report
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.systems.calibration import load_calibration
from repro.systems.dllm import graded

CELL = PROTOCOLS["l40s"].cell(PROTOCOLS["l40s"].targets[0])


@pytest.fixture(autouse=True, scope="module")
def _prompts_are_encoded_once() -> Iterator[None]:
    """All of the graded cells of the claims ask the same problems."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(graded, "encode_prompts", cache(graded.encode_prompts))
        yield


def answer(cell: Cell, code: str | None = None) -> Answer:
    experiment = prepare(cell)
    run = replace(
        stored(cell, tok_s=90.0), cell=experiment.cell, provenance={"git": {"commit": "abc"}, "elapsed_s": 1.0}
    )
    run = replace(run, manifest={**run.manifest, "code": {"digest": code or experiment.code.digest}})
    finding = Finding(claim=PROTOCOLS["l40s"].targets[0].claim, value=90.0, obtained="simulated", how="")
    return Answer(finding=finding, roles=("fitted",), runs=(run,))


def statuses(root: Path, given: Answer) -> list[str]:
    claims_file.save(root / "claims-dllm-serve.csv", judge_all(load_claims("dllm-serve"), [given]))
    return [each.status for each in check_claims(root)]


def test_a_cell_is_prepared_once_whichever_figure_asks() -> None:
    today = Today()
    assert today.experiment(replace(CELL, figure="fig3")) is today.experiment(CELL)
    assert today.experiment(replace(CELL, seed=1)) is not today.experiment(CELL)
    codes = today.codes("dllm-serve", ("l40s",))
    assert codes[today.experiment(CELL).cell.key] == today.experiment(CELL).code.digest


def test_claims_are_of_todays_runs(tmp_path: Path) -> None:
    assert check_claims(tmp_path) == []
    assert CELL.key in {cell.key for source in sources(DLLM_SERVE.entries, ("l40s",)) for cell in source.cells}
    assert statuses(tmp_path, answer(CELL)) == ["same"]
    assert statuses(tmp_path, answer(CELL, code="0123")) == ["other code"]
    assert statuses(tmp_path, answer(replace(CELL, rate=0.123))) == ["stale"]
    (tmp_path / "claims-dllm-serve.csv").write_text("claim,verdict\n", encoding="utf-8")
    assert [each.status for each in check_claims(tmp_path)] == ["stale"]


def test_another_fit_makes_reports_and_claims_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = [each for each in judge_all(load_claims("dllm-serve"), [answer(CELL)]) if each.answer is not None]
    fits = {card: load_calibration(card) for card in PROTOCOLS}
    monkeypatch.setattr(paths, "CALIBRATION", tmp_path)
    monkeypatch.setattr("repro.systems.calibration.CALIBRATION", tmp_path)
    load_calibration.cache_clear()
    try:
        for card, fit in fits.items():
            fit.save(tmp_path / f"{card}.json")
            write_report(report(fit, judged if card == "l40s" else []))
        assert statuses(tmp_path, answer(CELL)) == ["same"]
        assert {each.path.name: each.status for each in check_reports()} == {
            "rtx4090-report.json": "same",
            "l40s-report.json": "same",
        }
        before = answer(CELL)
        changed: Calibration = replace(fits["l40s"], matmul_efficiency=0.123)
        changed.save(tmp_path / "l40s.json")
        load_calibration.cache_clear()
        assert [each.status for each in check_reports() if each.path.name.startswith("l40s")] == ["stale"]
        write_report(report(changed, judged))  # the constants agree, the runs are of the old ones
        (own,) = (each for each in check_reports() if each.path.name.startswith("l40s"))
        assert own.status == "stale"
        assert "other data, calibration or settings" in own.reason
        assert statuses(tmp_path, before) == ["stale"]
    finally:
        load_calibration.cache_clear()


def test_medians_changed_by_hand_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "CALIBRATION", tmp_path)
    for card in PROTOCOLS:
        value = report(load_calibration(card), [])
        value["medians"] = {"throughputs": {"count": 9, "median_percent": 0.1}}
        report_path(card).write_text(json.dumps(value), encoding="utf-8")
    assert {each.reason for each in check_reports()} == {"the medians are not those of its comparisons"}
    assert asdict(load_calibration("l40s"))  # the stored constants were not touched
