"""Records of diffusion-LLM runs from a few values a row."""

from typing import Any

from repro.families.dllm.record import DLLM, STEP_COLUMNS
from repro.runs.record import RunRecord, Table, empty_table

RequestRow = tuple[float, float | None, float | None, float | None, int, str]
"""(arrival, admitted, first block, finished, gen_length, status)."""


def requests_table(*rows: RequestRow) -> Table:
    table = empty_table(DLLM.columns["requests"])
    for i, (arrival, admitted, first, finished, length, status) in enumerate(rows):
        row = {
            "request_id": i,
            "arrival_s": arrival,
            "submit_lag_s": 0.0,
            "admitted_s": admitted,
            "first_output_s": first,
            "finished_s": finished,
            "prompt_len": 10,
            "gen_length": length,
            "output_len": length if status == "ok" else None,
            "status": status,
            "error": "it broke" if status == "failed" else None,
            "correct": None,
            "correct_strict": None,
        }
        for name, column in table.items():
            column.append(row[name])
    return table


def steps_table(*rows: dict[str, Any]) -> Table:
    table = empty_table(STEP_COLUMNS)
    for i, row in enumerate(rows):
        for column in STEP_COLUMNS:
            unset = None if column.nullable and column.name != "forward_s" else 0
            table[column.name].append(row.get(column.name, i if column.name == "step" else unset))
    return table


def record_of(requests: Table | None = None, steps: Table | None = None, **manifest: Any) -> RunRecord:
    tables = {"requests": requests or requests_table(), "steps": steps or steps_table()}
    return RunRecord(tables=tables, manifest=manifest)


def stats(n: int, mean: Any, std: Any, least: float | None, most: float | None, p50: float | None) -> dict[str, Any]:
    """A distribution of too few values for a percentile above the median."""
    span = None if least is None or most is None else most - least
    few = dict.fromkeys(("p90", "p95", "p99"))
    return {"n": n, "mean": mean, "std": std, "min": least, "max": most, "span": span, "p50": p50, **few}
