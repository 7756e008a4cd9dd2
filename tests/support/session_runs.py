"""Runs of the simulated cluster as the store returns them, made up: what AMPD's figures are tested on."""

from collections.abc import Callable, Sequence
from typing import Any

from support.stored_runs import MADE_UP, VALID, calibration_of, charged, run_of

from engines.cluster.record import READINGS
from repro.families.cluster.ampd_record import AR
from repro.runs.cell import Cell
from repro.runs.record import REQUEST_COLUMNS, REQUESTS, RunRecord, empty_table
from repro.runs.store import StoredRun


def session_run(cell: Cell, share: float, *, e2el_s: float = 4.0, local: float = 0.2, valid: bool = True) -> StoredRun:
    """A run that attains ``share`` in every reading."""
    times = {"mean": e2el_s / 4, "p50": e2el_s / 5}
    summary: dict[str, Any] = {
        "slo_attainment": share,
        "attainment_by_reading": {str(reading): share for reading in READINGS},
        "ttft_initial_s": times,
        "ttft_incremental_s": times,
        "ttft_rounds_s": {**times, "p99": e2el_s / 2},
        "ttft_longest_s": e2el_s,
        "itl_s": {"mean": 0.02, "p50": 0.02},
        "e2el_s": {"mean": e2el_s, "p50": e2el_s},
        "local_share": local,
        "prefill_load": 1.1,
        "most_postponed": 3,
    }
    facts = {
        "calibration": calibration_of(cell),
        "facts": {"deployment": "P:TP8x1 D:TP8x1", "overload_reason": "made up"},
    }
    tables = {name: empty_table(columns) for name, columns in AR.columns.items()}
    tables["requests"]["request_id"] = list(range(99))
    record = RunRecord(tables=tables, manifest={"obtained": charged(cell), **facts})
    return run_of(cell, record, summary, VALID if valid else MADE_UP)


def planner_run(
    cell: Cell, *, seconds: float = 0.1, plans: Sequence[str] = ("P:TP8x1 D:TP8x1", "P:TP4x2 D:TP8x1")
) -> StoredRun:
    """A run that ranks ``plans``, the first best."""
    is_timed = bool(cell.knob_values.get("timed"))
    took = {"coefficients_s": seconds, "solve_s": 0.01, "routing_s": 1e-5, "ordering_s": 5e-6}
    summary: dict[str, Any] = {
        "plans": [{"deployment": plan, "worst_of_slo": 0.2 + 0.1 * place} for place, plan in enumerate(plans)],
        **(took if is_timed else dict.fromkeys(took)),
    }
    facts = {"calibration": calibration_of(cell), "facts": {"method": "direct", "solver": "enumeration"}}
    tables = {REQUESTS: empty_table(REQUEST_COLUMNS)}
    record = RunRecord(tables=tables, manifest={"obtained": "measured" if is_timed else charged(cell), **facts})
    return run_of(cell, record, summary)


def session_runs(cells: Sequence[Cell], share: Callable[[Cell], float], **shape: Any) -> list[StoredRun]:
    return [session_run(cell, share(cell), **shape) for cell in cells]
