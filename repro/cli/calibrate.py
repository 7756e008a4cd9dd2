"""``repro calibrate``: fit a card's constant and say what it predicts."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repro.cli import options as opt
from repro.cli.output import number, print_json, print_table

if TYPE_CHECKING:
    from repro.reports.claims import Judged
    from repro.reports.fitting import CardProtocol


def calibrate(
    platform: Annotated[str, typer.Option(help="rtx4090 or l40s.")] = "rtx4090",
    dry_run: Annotated[bool, typer.Option(help="Show the fit without storing it.")] = False,
    keep: Annotated[bool, typer.Option(help="Keep the stored constants, write the report again.")] = False,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Instead: how far predictions depend on lengths, batch rule and step overhead; a minute or two.",
        ),
    ] = False,
    json: opt.Json = False,
) -> None:
    """Fit a card's constant on its named cells, and compare every other stated number with its prediction."""
    from engines.errors import UserError, require
    from engines.hardware.roofline import Calibration
    from repro.files import replace_text
    from repro.paths import CALIBRATION
    from repro.reports.fitting import protocol_of
    from repro.systems.calibration import load_calibration

    protocol = protocol_of(platform)
    if sensitivity:
        for name, given in (("dry_run", dry_run), ("keep", keep)):
            require(not given, f"{name} has no effect with sensitivity, which fits nothing that is kept: leave it out")
        _print_sensitivity(protocol, json=json)
        return
    if dry_run and keep:
        raise UserError("dry_run and keep: nothing would be done, give one of them")
    calibration = Calibration.load(CALIBRATION / f"{platform}.json") if keep else _fit(protocol)
    report: dict[str, Any] = {"schema_version": 2, "card": platform, "calibration": asdict(calibration)}
    if not dry_run:
        calibration.save(CALIBRATION / f"{platform}.json")
        load_calibration.cache_clear()
        report |= _report(_judged(platform), protocol)
        replace_text(CALIBRATION / f"{platform}-report.json", jsonlib.dumps(report, indent=2, allow_nan=False) + "\n")
    if json:
        print_json(report)
        return
    print(f"{platform}: matmul = attention share of peak {calibration.matmul_efficiency:.4f}; {calibration.note}")
    print(f"fitted on {'; '.join(calibration.fitted_on)}")
    if dry_run:
        return
    print_table(
        "Stated numbers and their simulated prediction",
        ("claim", "what", "stated", "predicted", "error", "role", "verdict"),
        [
            (
                c["claim"],
                c["what"],
                _text(c["stated"]),
                _text(c["predicted"]),
                "-" if c["error_percent"] is None else f"{c['error_percent']:+.1f} %",
                c["role"],
                c["verdict"],
            )
            for c in report["comparisons"]
        ],
    )
    print(
        f"median absolute error over {report['held_out_count']} throughputs and latencies it was not fitted on: "
        f"{number(report['held_out_median_percent'])} %"
    )


def _fit(protocol: CardProtocol) -> Any:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from repro.reports.fitting import fit

    columns = (SpinnerColumn(), TextColumn("fitting {task.fields[card]}: {task.completed} runs"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", card=protocol.card)
        return fit(protocol, on_run=lambda: progress.advance(task))


def _print_sensitivity(protocol: CardProtocol, *, json: bool) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from repro.paths import CALIBRATION
    from repro.reports.sensitivity import num_runs, save, sensitivity

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"sensitivity of {protocol.card}", total=num_runs(protocol))
        found = sensitivity(protocol, on_run=lambda: progress.advance(task))
    path = save(found, CALIBRATION / f"{protocol.card}-sensitivity.csv")
    if json:
        print_json([asdict(row) for row in found.rows])
        return
    for table in found.tables:
        print_table(table.title, table.columns, table.rows)
        print(table.note, end="\n\n")
    print(f"simulated, {protocol.card}, all requests at once; file: {path}")


def _judged(platform: str) -> list[Judged]:
    """Every simulated finding about the paper on this card; the runs behind it are made where they are missing."""
    from repro.cli.sweep import run_sweep, sweep_of
    from repro.paths import LOCAL
    from repro.reports.claims import judge_all
    from repro.reports.figures import FIGURES, View, default_reading
    from repro.reports.paper import load_claims
    from repro.runs.store import Store
    from repro.systems.platforms import platform as platform_of

    where = platform_of(platform)
    view = View(platform=where, reading=default_reading(where))
    modules = [module for entry in FIGURES.values() if platform in (module := entry.load()).PLATFORMS]
    grids = [module.cells(view) for module in modules]
    sweep = sweep_of([cell for grid in grids for cell in grid], Store(LOCAL))
    run_sweep(sweep)
    findings = [
        finding
        for module, runs in zip(modules, sweep.by_grid(grids), strict=True)
        for finding in module.findings(runs or [], view)
    ]
    simulated = [finding for finding in findings if finding.obtained == "simulated"]
    return [each for each in judge_all(load_claims("dllm-serve"), simulated) if each.finding is not None]


def _report(judged: Sequence[Judged], protocol: CardProtocol) -> dict[str, Any]:
    comparisons: list[dict[str, Any]] = []
    for each in judged:
        assert each.finding is not None
        comparisons.append(
            {
                "claim": each.claim.id,
                "what": each.claim.statement,
                "metric": each.claim.metric,
                "stated": each.claim.expected.value,
                "unit": each.claim.expected.unit,
                "predicted": each.finding.value,
                "error_percent": each.error_percent,
                "role": "fitted" if each.claim.id in protocol.claims else "held out",
                "verdict": each.verdict,
                "how": each.finding.how,
                "obtained": each.finding.obtained,
            }
        )
    errors = [abs(c["error_percent"]) for c in comparisons if _counts(c)]
    return {
        "comparisons": comparisons,
        "held_out_count": len(errors),
        "held_out_median_percent": median(errors) if errors else None,
    }


def _counts(comparison: dict[str, Any]) -> bool:
    """A throughput in tok/s or a latency in s that the constants were not fitted on."""
    is_held_out = comparison["role"] == "held out" and comparison["error_percent"] is not None
    return is_held_out and comparison["unit"] in ("tok/s", "s")


def _text(value: float | tuple[float, ...] | None) -> str:
    if isinstance(value, tuple):
        return " to ".join(f"{v:.4g}" for v in value)
    return "-" if value is None else f"{value:.4g}"
