"""Committed verdicts and calibration reports: would the claims of today, the code of today and the same runs give them?"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.errors import UserError
from repro.checks.held import Held, read_held
from repro.checks.results import Checked, Status, Today, is_alike
from repro.reports import claims_file
from repro.reports.claims import Answer, Finding, Judged, judge_all
from repro.reports.figures import DLLM_SERVE, PAPERS
from repro.reports.fitting import FITTED, PROTOCOLS
from repro.reports.flipped import flips_path, read_flips
from repro.reports.flips import SIZES, changes, sized
from repro.reports.paper import Claim, load_claims, read_claims
from repro.reports.predictions import medians, read_report, report_path
from repro.reports.stamp import answered_by, changed_files, flipped_by, read_stamp
from repro.runs.seal import is_whole
from repro.systems.calibration import load_calibration

OF_RUNS = ("obtained", "code", "commit", "runs", "command", "minutes")
"""Columns of claims that only runs can tell."""


def check_claims(root: Path, today: Today | None = None) -> list[Checked]:
    """Every ``claims-PAPER.csv`` below ``root``: whole, of the claims as they are stated, judged as they would be today, of
    runs that would be made today by today's code."""
    today, found = today or Today(held=read_held(root)), []
    for paper in PAPERS:
        path = root / f"claims-{paper}.csv"
        if path.is_file():
            try:
                status, reason = _claims(paper, path, today)
            except (UserError, AttributeError, LookupError, TypeError, ValueError) as error:
                status, reason = "stale", str(error)
            command = f"repro claims --paper {paper} --out-dir {shlex.quote(os.path.relpath(root))}"
            found.append(_checked("claims", path, status, reason, command))
    return found


def check_flips(root: Path, held: Held | None = None) -> list[Checked]:
    """Every ``flips-PAPER.csv`` below ``root``: as it was written, of the choices that there are today, in today's size."""
    found = []
    for paper in PAPERS:
        path = flips_path(paper, root)
        if path.is_file():
            try:
                status, reason = _flips(paper, path, read_held(root) if held is None else held)
            except (UserError, AttributeError, LookupError, TypeError, ValueError) as error:
                status, reason = "stale", str(error)
            command = f"python -m repro.reports.flips {paper} results/local {shlex.quote(os.path.relpath(root))}"
            found.append(_checked("flips", path, status, reason, command))
    return found


def check_reports(today: Today | None = None) -> list[Checked]:
    """The report of every calibrated card: whole, of the stored constants, of runs that would be made today, its verdicts
    and medians those of its own values."""
    today, found = today or Today(), []
    for card in PROTOCOLS:
        try:
            status, reason = _report(card, today)
        except (UserError, AttributeError, LookupError, TypeError, ValueError) as error:
            status, reason = "stale", str(error)
        found.append(
            _checked("calibration", report_path(card), status, reason, f"repro calibrate --platform {card} --keep")
        )
    return found


def _checked(figure: str, path: Path, status: Status, reason: str, command: str) -> Checked:
    return Checked(figure=figure, path=path, status=status, is_measured=False, reason=reason, command=command)


def _claims(paper: str, path: Path, today: Today) -> tuple[Status, str]:
    if not path.with_suffix(".json").is_file():
        return "no stamp", "nothing says what it was made from: run 'repro claims' again"
    stamp = read_stamp(path.with_suffix(".json"))
    if changed_files(stamp, path.parent) or path.name not in stamp["files"]:
        return "stale", "it is not as it was written"
    rows, claims = claims_file.read(path), read_claims(PAPERS[paper].claims, paper)
    if [row["id"] for row in rows] != [claim.id for claim in claims]:
        return "stale", "its claims are not those of claims.yaml"
    judged = claims_file.judged_again(claims, rows, read_flips(paper, path.parent))
    if faults := [fault for row, each in zip(rows, judged, strict=True) if (fault := misjudged(row, each))]:
        return "stale", f"{faults[0]}{f', and {len(faults) - 1} more' if len(faults) > 1 else ''}"
    if fault := _miscomputed(paper, today, rows):
        return "stale", fault
    runs = {key: row for row in rows for key in row["runs"].split()}
    codes = today.codes(paper)
    if unknown := sorted(runs.keys() - codes.keys() - today.whole(paper)):
        claim = runs[unknown[0]]["id"]
        what = "runs are of other data, calibration or settings"
        return "stale", f"{len(unknown)} of {len(runs)} {what}: {unknown[0]} of {claim}"
    made_by = {
        code for row in rows if row["obtained"].startswith(("simulated", "composed")) for code in row["code"].split()
    }
    if others := today.held.others(made_by, codes.values()):
        return "other code", f"runs were made by other code: {sorted(others)[0]}"
    if not today.held.is_same(stamp["drawn_by"], answered_by(PAPERS[paper])):
        return "other code", "runs were held against the claims by other code"
    return "same", f"{len(rows)} claims, {len(runs)} runs"


def _flips(paper: str, path: Path, held: Held) -> tuple[Status, str]:
    if not path.with_suffix(".json").is_file():
        return "no stamp", "nothing says what it was made from"
    stamp = read_stamp(path.with_suffix(".json"))
    if changed_files(stamp, path.parent) or path.name not in stamp["files"]:
        return "stale", "it is not as it was written"
    if stamp["size"] != json.loads(json.dumps(asdict(SIZES[paper]))):
        return "stale", "its runs are of another size"
    cells = [cell for source in sized(PAPERS[paper], SIZES[paper]) for cell in source.cells]
    now = {each.text for each in changes(cells)}
    if others := sorted(now ^ set(stamp["tried"])):
        return "stale", f"it has other choices than there are, such as {others[0]}"
    flips = [each for own in read_flips(paper, path.parent).values() for each in own]
    if strange := [each for each in flips if each.change not in now or each.claim not in stamp["judged"]]:
        return "stale", f"{strange[0].claim} under {strange[0].change} was not judged"
    if not held.is_same(stamp["drawn_by"], flipped_by(PAPERS[paper])):
        return "other code", "they were found by other code"
    return "same", f"{len(flips)} flips, {len(now)} choices"


def misjudged(row: Mapping[str, str], each: Judged) -> str | None:
    for name, given in claims_file.as_row(each).items():
        value = "" if given is None else str(claims_file.flat(given))  # as it is read back
        if name not in OF_RUNS and row[name] != value:
            return f"{row['id']}: {name} is {row[name]!r}, where claims.yaml and its values give {value!r}"
    return None


def _miscomputed(paper: str, today: Today, rows: Sequence[Mapping[str, str]]) -> str | None:
    """What needs no run is computed again."""
    by_id = {row["id"]: row for row in rows if row["obtained"] == "computed"}
    for source in today.sources(paper):
        for answer in [] if source.cells else source.answers([]):
            finding, row = answer.finding, by_id.get(answer.finding.claim)
            if row is not None and not is_alike(row["ours"], values := str(claims_file.flat(finding.value))):
                return f"{finding.claim}: ours is {row['ours']}, where it is computed to be {values}"
    return None


def _report(card: str, today: Today) -> tuple[Status, str]:
    report = read_report(card)
    if report is None:
        return "stale", "no report is stored"
    if not is_whole(report):
        return "stale", "it is not as it was written"
    if report["calibration"] != json.loads(json.dumps(asdict(load_calibration(card)))):
        return "stale", "the constants are not the stored ones"
    comparisons = report["comparisons"]
    if report["medians"] != medians(comparisons):
        return "stale", "the medians are not those of its comparisons"
    claims = {claim.id: claim for claim in load_claims(DLLM_SERVE.name)}
    # All at once: what follows from a number that is not reproduced is not either.
    judged = judge_all([*claims.values()], [_reported(each, claims[each["claim"]]) for each in comparisons])
    again = {each.claim.id: each for each in judged}
    if faults := [fault for each in comparisons if (fault := _misreported(each, again[each["claim"]]))]:
        return "stale", faults[0]
    runs = {key for each in comparisons for key in each["runs"]}
    codes = today.codes(DLLM_SERVE.name, (card,), charged=FITTED)
    if unknown := sorted(runs - codes.keys()):
        what = "runs are of other data, calibration or settings"
        return "stale", f"{len(unknown)} of {len(runs)} {what}: {unknown[0]}"
    if others := today.held.others({code for each in comparisons for code in each["code"]}, codes.values()):
        return "other code", f"runs were made by other code: {sorted(others)[0]}"
    return "same", f"{len(runs)} runs"


def _reported(each: Mapping[str, Any], claim: Claim) -> Answer:
    values = each["ours"]
    finding = Finding(
        claim=claim.id,
        value=tuple(values) if isinstance(values, list) else values,
        obtained="simulated",
        how=each["how"],
        of=tuple(each["of"]),
        # An ordering's own mark is not in the report.
        holds=each["verdict"] != "not reproduced" if claim.expected.value is None else None,
    )
    return Answer(finding=finding, roles=tuple(each["roles"]))


def _misreported(each: Mapping[str, Any], again: Judged) -> str | None:
    expected = json.loads(json.dumps(again.claim.expected.value))
    for name, value in (
        ("expected", expected),
        ("verdict", again.verdict),
        ("role", again.role),
        ("error_percent", again.error_percent),
    ):
        if each[name] != value:
            return f"{again.claim.id}: {name} is {each[name]!r}, where claims.yaml and its values give {value!r}"
    return None
