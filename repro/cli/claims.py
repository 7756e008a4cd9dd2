"""``repro claims``: every claim of a paper, what our runs say, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repro.cli import options as opt
from repro.cli.output import print_json, print_table

if TYPE_CHECKING:
    from repro.reports.claims import Finding, Judged
    from repro.reports.figures import FigureEntry


def claims(
    paper: Annotated[str, typer.Option(help="dllm-serve, ampd or laps.")] = "dllm-serve",
    result_dir: Annotated[Path | None, typer.Option(help="Where run folders are [default: results/local].")] = None,
    out_dir: Annotated[Path | None, typer.Option(help="Where the CSV goes [default: results/figures].")] = None,
    json: opt.Json = False,
) -> None:
    """Hold stored runs against every claim of a paper; runs nothing ('repro reproduce' does)."""
    from repro.folders import readable_folder, writable_folder
    from repro.paths import FIGURES as FIGURES_DIR
    from repro.paths import LOCAL
    from repro.reports.claims import count, judge_all
    from repro.reports.figures import FIGURES
    from repro.reports.paper import load_claims

    stated = load_claims(paper)
    root = readable_folder("result_dir", result_dir or LOCAL)
    out = writable_folder("out_dir", out_dir or FIGURES_DIR)
    entries = [entry for entry in FIGURES.values() if any(alias.startswith(f"{paper}/") for alias in entry.aliases)]
    findings = [finding for entry in entries for finding in _findings(entry, root)]
    judged = judge_all(stated, findings)
    path = _save(out / f"claims-{paper}.csv", judged)
    if json:
        print_json({"paper": paper, "verdicts": count(judged), "claims": [_as_dict(each) for each in judged]})
        return
    shown = [each for each in judged if each.claim.kind != "inconsistency"]
    print_table(
        f"Claims of {paper}",
        ("claim", "section", "states", "ours", "error", "obtained", "verdict"),
        [
            (
                each.claim.id,
                each.claim.section,
                _value(each.claim.expected.value, each.claim.expected.unit),
                _ours(each),
                "-" if each.error_percent is None else f"{each.error_percent:+.1f} %",
                "-" if each.finding is None else each.finding.obtained,
                each.verdict,
            )
            for each in shown
        ],
    )
    print_table(
        "The paper's own inconsistencies",
        ("claim", "what does not agree", "recomputed"),
        [
            (each.claim.id, each.claim.statement, each.claim.recomputed.verdict if each.claim.recomputed else "-")
            for each in judged
            if each.claim.kind == "inconsistency"
        ],
    )
    print("; ".join(f"{verdict}: {number}" for verdict, number in count(judged).items()))
    print(f"file: {path}")
    if any(each.verdict == "not run" for each in judged):
        print("claims that were not run become answerable with 'make reproduce-all'")


def _findings(entry: FigureEntry, root: Path) -> Sequence[Finding]:
    """Of every platform and in the usual reading, where all runs behind the figure are stored."""
    from repro.cli.sweep import prepare_all
    from repro.reports.figures import View, default_reading
    from repro.runs.store import Store
    from repro.systems.platforms import platform as platform_of

    module, store = entry.load(), Store(root)
    found: list[Finding] = []
    for name in module.PLATFORMS:
        where = platform_of(name)
        view = View(platform=where, reading=default_reading(where))
        experiments = prepare_all(module.cells(view))
        if all(store.is_done(experiment.cell) for experiment in experiments):
            found += module.findings(
                [store.load(experiment.cell, with_steps=False) for experiment in experiments], view
            )
    return found


def _as_dict(each: Judged) -> dict[str, Any]:
    claim, finding = each.claim, each.finding
    return {
        "claim": claim.id,
        "kind": claim.kind,
        "section": claim.section,
        "statement": claim.statement,
        "expected": claim.expected.value,
        "unit": claim.expected.unit,
        "direction": claim.direction,
        "tolerance": claim.tolerance.value,
        "tolerance_type": claim.tolerance.type,
        "figure": claim.figure,
        "ours": None if finding is None else finding.value,
        "holds": None if finding is None else finding.holds,
        "obtained": None if finding is None else finding.obtained,
        "how": None if finding is None else finding.how,
        "error_percent": each.error_percent,
        "verdict": each.verdict,
        "recomputed": None if claim.recomputed is None else claim.recomputed.verdict,
    }


def _save(path: Path, judged: Sequence[Judged]) -> Path:
    import csv
    import io

    from repro.files import replace_text

    rows = [_as_dict(each) for each in judged]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _flat(value) for key, value in row.items()})
    return replace_text(path, text.getvalue())


def _flat(value: object) -> object:
    return " ".join(f"{part:g}" for part in value) if isinstance(value, tuple) else value


def _ours(each: Judged) -> str:
    if each.finding is None:
        return "-"
    if each.claim.expected.value is None and each.finding.holds is not None:
        return "holds" if each.finding.holds else "does not hold"
    return _value(each.finding.value, each.claim.expected.unit)


def _value(value: float | tuple[float, ...] | None, unit: str | None) -> str:
    if value is None:
        return "ordering"
    numbers = " to ".join(f"{v:.4g}" for v in value) if isinstance(value, tuple) else f"{value:.4g}"
    return f"{numbers} {unit or ''}".strip()
