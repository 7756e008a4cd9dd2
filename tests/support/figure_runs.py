"""Made-up runs of any figure of the project, wide apart and with repeats: what its drawing is tested on."""

import hashlib
from dataclasses import asdict
from typing import Any

from support.prefill import prefill_run
from support.session_runs import planner_run, session_run
from support.stored_runs import calibration_of, changed, charged, run_of, stored

from engines.dllm.memory import divide_memory
from paper_figures.dllm_serve.layout import shape_of
from repro.families.block.system import BLOCK
from repro.families.cluster.ampd import PLANNER_SYSTEM
from repro.families.platforms import DllmPart, platform
from repro.reports.claims import Finding
from repro.reports.figures import Figure, View
from repro.runs.cell import Cell
from repro.runs.record import RunRecord
from repro.runs.store import StoredRun
from repro.runs.system import SYSTEMS

NUM_PROBLEMS = 40


def by_claim(found: list[Finding]) -> dict[str, Finding]:
    """Each claim is answered once."""
    assert len({each.claim for each in found}) == len(found)
    return {each.claim: each for each in found}


def figure_runs(figure: Figure, view: View) -> list[StoredRun]:
    return [_made_up(view.applied(cell), view) for cell in figure.cells(view)]


def _made_up(cell: Cell, view: View) -> StoredRun:
    family = SYSTEMS.get(cell.system).family.name
    if family == "prefill":
        high = _share(cell.system, cell.rate, cell.knobs)
        return prefill_run(cell, rps=20 + 200 * high, ttft_s=0.02 + 4 * _share(cell.key), late=_share(cell.key, "late"))
    if family == "block":
        return block_run(cell, tok_s=throughput(cell))
    return _run(cell, view) if family == "dllm" else _cluster_run(cell, view)


def block_run(cell: Cell, *, tok_s: float) -> StoredRun:
    """Eight requests of 64 tokens, the first of them out after a quarter of the time, 4 tokens a forward."""
    end, n, tokens = 8 * 64 / tok_s, 8, 64
    requests: dict[str, list[Any]] = {column.name: [None] * n for column in BLOCK.columns["requests"]}
    requests |= {
        "request_id": list(range(n)),
        "arrival_s": [0.0] * n,
        "submit_lag_s": [0.0] * n,
        "admitted_s": [0.0] * n,
        "first_output_s": [end / 4] * n,
        "finished_s": [end] * n,
        "prompt_len": [9] * n,
        "output_len": [tokens] * n,
        "status": ["ok"] * n,
        "denoised": [16] * n,
    }
    steps: dict[str, list[Any]] = {column.name: [0] for column in BLOCK.columns["steps"]}
    steps |= {"duration_s": [end], "end_s": [end], "num_denoised": [16 * n]}
    facts = {"obtained": charged(cell), "calibration": calibration_of(cell), "dataset": {"source": "embedded"}}
    record = RunRecord(tables={"requests": requests, "steps": steps}, manifest=facts)
    return run_of(cell, record, BLOCK.summarize(record), columns=BLOCK.columns["requests"])


def _cluster_run(cell: Cell, view: View) -> StoredRun:
    if cell.system == PLANNER_SYSTEM:
        return planner_run(cell, seconds=_share(cell.key))
    return session_run(
        cell, 0.05 + 0.9 * _share(cell.system, cell.dataset, cell.rate, cell.knobs), e2el_s=40 * _share(cell.key)
    )


def throughput(cell: Cell) -> float:
    """Follows the load up to a limit between 20 and 2000 tok/s that the system, data set and knobs decide; repeats
    differ by up to 20 %."""
    limit = 20 * 100 ** _share(cell.system, cell.dataset, cell.knobs)
    load = limit if cell.rate is None else cell.rate * 64
    return min(load, limit) * (0.9 + 0.2 * _share(cell.key))


def _share(*parts: object) -> float:
    return int(hashlib.sha256(repr(parts).encode()).hexdigest()[:8], 16) / 2**32


def _run(cell: Cell, view: View) -> StoredRun:
    is_graded = "selection" in cell.knob_values and cell.rate is None
    run = stored(cell, tok_s=throughput(cell), n=NUM_PROBLEMS if is_graded else 4, stretch=0.75)
    where = platform(cell.platform)  # a figure of another family has one of its own
    plan = divide_memory(
        shape_of(where),
        where.part(DllmPart).memory_bytes,
        where.part(DllmPart).engine,
        logit_rows=cell.knob_values.get("logit_rows", "decomposed"),
    )
    manifest: dict[str, Any] = {"facts": {**run.facts, "memory_plan": asdict(plan)}}
    if view.is_simulated:
        manifest["calibration"] = f"{where.gpu}, fitted on one cell of a long name; another cell of a long name"
    else:
        manifest["facts"]["processor_s"] = 1 + _share(cell.key, "processor")
    record = run.record
    if is_graded:
        solved = round(NUM_PROBLEMS * _share(cell.knobs))
        verdicts = [i < solved for i in range(NUM_PROBLEMS)]
        record = record.with_columns("requests", correct=verdicts, correct_strict=verdicts)
        manifest["dataset"] = {**record.manifest["dataset"], "checksum": f"{cell.dataset}-{cell.seed}"}
    return changed(run, record=record.with_manifest(**manifest))
