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
    from repro.runs.store import Store


def claims(
    paper: Annotated[str, typer.Option(help="dllm-serve, ampd or laps, or module:NAME.")] = "dllm-serve",
    result_dir: opt.ResultDir = None,
    accept_other_code: opt.OtherCode = False,
    out_dir: Annotated[Path | None, typer.Option(help="Where the CSV goes [default: results/figures].")] = None,
    json: opt.Json = False,
) -> None:
    """Hold stored runs against every claim of a paper; runs nothing ('repro reproduce' does)."""
    from repro.files import readable_folder, writable_folder
    from repro.paths import LOCAL, LOCAL_FIGURES
    from repro.reports.claims import count, judge_all
    from repro.reports.figures import paper as paper_of
    from repro.reports.paper import read_claims
    from repro.runs.store import Store

    chosen = paper_of(paper)
    stated = read_claims(chosen.claims, chosen.name)
    root = readable_folder("result_dir", result_dir or LOCAL)
    out = writable_folder("out_dir", out_dir or LOCAL_FIGURES)
    findings = _findings(chosen.entries, Store(root, accept_other_code=accept_other_code))
    judged = judge_all(stated, findings)
    path = _save(out / f"claims-{chosen.name}.csv", judged)
    if json:
        print_json({"paper": chosen.name, "verdicts": count(judged), "claims": [_as_dict(each) for each in judged]})
        return
    shown = [each for each in judged if each.claim.kind != "inconsistency"]
    print_table(
        f"Claims of {chosen.name}",
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


def _findings(entries: Sequence[FigureEntry], store: Store) -> list[Finding]:
    """Findings on every platform in its usual reading, where all runs behind a figure are stored."""
    from repro.cli.sweep import sweep_of
    from repro.reports.figures import View, default_reading
    from repro.systems.platforms import platform as platform_of

    modules = [entry.load() for entry in entries]
    places = [(module, platform_of(name)) for module in modules for name in module.PLATFORMS]
    views = [(module, View(platform=where, reading=default_reading(where))) for module, where in places]
    grids = [module.cells(view) for module, view in views]
    sweep = sweep_of([cell for grid in grids for cell in grid], store)
    return [
        finding
        for (module, view), runs in zip(views, sweep.by_grid(grids), strict=True)
        if runs is not None
        for finding in module.findings(runs, view)
    ]


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
