"""Runs of prefill instances as the store returns them, made up: what LAPS's figures are tested on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.stored_runs import calibration_of, charged, told_of

from repro.runs.cell import Cell
from repro.runs.record import REQUEST_COLUMNS, RunRecord, empty_table
from repro.runs.store import StoredRun
from repro.systems.cluster.laps_record import BUCKETS, PREFILL


def prefill_run(
    cell: Cell, *, rps: float = 50.0, ttft_s: float = 0.1, late: float = 0.1, end_s: float = 60.0, valid: bool = True
) -> StoredRun:
    """Mean TTFT is ``ttft_s``, P90 twice and the longest ten times that; long turns take three times as long."""

    def times(scale: float = 1.0) -> dict[str, float]:
        mean = scale * ttft_s
        return {"n": 99, "mean": mean, "p50": mean, "p90": 2 * mean, "p95": 3 * mean, "p99": 5 * mean, "max": 10 * mean}

    summary: dict[str, Any] = {
        "rps": rps,
        "tokens_s": 270 * rps,
        "end_s": end_s,
        "ttft_all_s": times(),
        "ttft_short_s": times(),
        "ttft_long_s": times(3.0),
        "by_length": {name: {"violations": late, **times(1 + place)} for place, (name, _, _) in enumerate(BUCKETS)},
        "slo_violations": late,
        "slo_violations_short": late / 2,
        "slo_violations_long": min(1.0, 2 * late),
        "in_system": rps * ttft_s,
        "requests_per_step": 4.0,
        "mixed_steps": 0.2,
        "graph_share": 0.3,
        "mode_shares": {"eager": 0.7, "fallback": 0.0, "graph": 0.3, "rung": 0.0},
        "padding": 0.1,
        "busy_share": 0.8,
        "moves_per_minute": 0.5,
    }
    facts = {"calibration": calibration_of(cell), "facts": {"num_instances": 1}}
    manifest: dict[str, Any] = {
        "obtained": charged(cell),
        "validity": {"valid": valid, "reasons": [] if valid else ["made up"]},
        "facts": {"obtained": charged(cell), **facts},
    }
    record = RunRecord(
        tables={name: empty_table(own) for name, own in PREFILL.columns.items()}, manifest=manifest["facts"]
    )
    manifest["requests"] = told_of(record, REQUEST_COLUMNS)
    stored = replace(cell, knobs=(*cell.knobs, ("basis", "abc")))
    run = StoredRun(cell=stored, file=Path("nowhere"), manifest=manifest, provenance={})
    run.__dict__["summary"] = summary
    run.__dict__["record"] = record
    return run


def prefill_runs(cells: Sequence[Cell], shape: Callable[[Cell], dict[str, float]]) -> list[StoredRun]:
    return [prefill_run(cell, **shape(cell)) for cell in cells]
