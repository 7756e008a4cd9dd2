"""Stored runs: how they are made, found and compared."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from support.driven import drive
from support.fake_system import fake_cell

from repro.families.dllm.record import DLLM, STEP_COLUMNS
from repro.reports.figures import Rendered
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.family import Validity
from repro.runs.provenance import GitState, collect
from repro.runs.record import REQUEST_COLUMNS, REQUESTS, Column, Obtained, RunRecord
from repro.runs.store import PROVENANCE, SUFFIX, StoredRun, part_of, parts_of

CPU = "A Processor 9000"
CALIBRATION = "rtx4090, fitted on one cell; another cell"
VALID = Validity(valid=True, reasons=())
MADE_UP = Validity(valid=False, reasons=("made up",))
FAILED = Validity(valid=False, reasons=("1 of 4 requests failed, the first with: x",))


def charged(cell: Cell) -> Obtained:
    """As what a simulated cell's numbers come out, on a card whose kernels are known."""
    return "simulated" if cell.knob_values.get("cost") == "roofline" else "composed"


def calibration_of(cell: Cell) -> str:
    """What its steps are charged by, in words."""
    card = cell.platform.removesuffix("x32")
    if charged(cell) == "composed":
        return f"measured kernels of {card}, made up"
    return f"{card}, uncalibrated: constants physical (assumed), made up"


def stored(
    cell: Cell, *, tok_s: float, gen_length: int = 64, n: int = 4, stretch: float = 0.0, validity: Validity = VALID
) -> StoredRun:
    """A run of ``n`` requests, all due at 0. The last finishes when the throughput is ``tok_s``, the first
    ``stretch`` of that time earlier."""
    end = n * gen_length / tok_s
    requests: dict[str, list[Any]] = {column.name: [None] * n for column in DLLM.columns["requests"]}
    requests |= {
        "request_id": list(range(n)),
        "arrival_s": [0.0] * n,
        "prompt_len": [9] * n,
        "gen_length": [gen_length] * n,
        "output_len": [gen_length] * n,
        "finished_s": [end * (1 - stretch * (n - 1 - i) / (n - 1)) for i in range(n)],
        "status": ["ok"] * n,
    }
    steps: dict[str, list[Any]] = {column.name: [None if column.nullable else 0] for column in STEP_COLUMNS}
    simulated = cell.executor == "roofline"
    steps |= {"duration_s": [end], "end_s": [end], "forward_s": [end if simulated else 0.75 * end]}
    record = RunRecord(
        tables={"requests": requests, "steps": steps},
        manifest={
            "obtained": charged(cell) if simulated else "measured",
            "calibration": CALIBRATION if simulated else None,
            "dataset": {"source": "embedded", "location": "datasets/x.yaml", "length_scale": 1.0},
            "facts": {"batch_size": 3} if cell.system != "dllm-serve" else {},
        },
    )
    provenance = {"cpu": {"model": CPU, "count": 4, "usable": 2}, "gpu": None}
    return run_of(cell, record, DLLM.summarize(record), validity, provenance, DLLM.columns[REQUESTS])


def told_of(record: RunRecord, columns: Sequence[Column]) -> dict[str, Any]:
    """What a stored run keeps of its table of requests."""
    given = {
        column.name: [each for each in record.requests[column.name] if each is not None]
        for column in columns
        if column.kind == "int"
    }
    return {
        "num": len(record.requests["request_id"]),
        "sums": {name: [len(each), sum(each)] for name, each in given.items()},
    }


def run_of(
    cell: Cell,
    record: RunRecord,
    summary: Mapping[str, Any],
    validity: Validity = VALID,
    provenance: Mapping[str, Any] | None = None,
    columns: Sequence[Column] = REQUEST_COLUMNS,
) -> StoredRun:
    """As the store returns a run of the cell."""
    manifest = {
        "obtained": record.obtained,
        "validity": {"valid": validity.valid, "reasons": list(validity.reasons)},
        "requests": told_of(record, columns),
        "facts": dict(record.manifest),
    }
    if "basis" not in cell.knob_values:
        cell = replace(cell, knobs=(*cell.knobs, ("basis", "abc")))
    run = StoredRun(cell=cell, file=Path("nowhere"), manifest=manifest, provenance=provenance or {})
    # What would be read of its file when it is asked for.
    run.__dict__["record"], run.__dict__["summary"] = record, summary
    return run


def changed(run: StoredRun, **parts: Any) -> StoredRun:
    """With another ``record``, ``summary``, ``validity`` or ``provenance``."""
    kept = {name: getattr(run, name) for name in ("record", "summary", "validity", "provenance")}
    return run_of(run.cell, **{**kept, **parts}, columns=DLLM.columns[REQUESTS])


def runs_of(cells: Sequence[Cell], throughput: Callable[[Cell], float], **shape: Any) -> list[StoredRun]:
    return [stored(cell, tok_s=throughput(cell), **shape) for cell in cells]


def read_csv(rendered: Rendered) -> list[dict[str, str]]:
    (path,) = (file for file in rendered.files if file.suffix == ".csv")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def panel(figure: Figure, title: str) -> Axes:
    (axes,) = (axes for axes in figure.axes if axes.get_title() == title)
    return axes


def drawn_lines(axes: Axes) -> dict[str, Any]:
    """Lines by their label; an errorbar's line goes by the label of its container."""
    found = {str(line.get_label()): line for line in axes.get_lines() if not str(line.get_label()).startswith("_")}
    found |= {str(container.get_label()): container[0] for container in axes.containers if len(container) == 3}
    return found


def text_of(figure: Figure) -> str:
    """Title and what of the caption stands under the panels, as one line."""
    return " ".join(" ".join(text.get_text() for text in (figure._suptitle, figure._supxlabel)).split())


def caption_of(rendered: Rendered) -> str:
    """Title and whole caption, as one line."""
    (path,) = (file for file in rendered.files if file.suffix == ".txt")
    return " ".join(path.read_text(encoding="utf-8").split())


def parts(file: Path) -> dict[str, Any]:
    """By name."""
    found = parts_of(file.read_bytes())
    return {name: part_of(found, name) for name in found}


def lines(file: Path) -> dict[str, bytes]:
    """All but those of its times and machine."""
    return {name: line for name, line in parts_of(file.read_bytes()).items() if name != PROVENANCE}


def contents(root: Path) -> dict[str, dict[str, bytes]]:
    """All that is stored, but for times and machines."""
    return {str(path.relative_to(root)): lines(path) for path in root.rglob("*") if path.name.endswith(SUFFIX)}


EXPERIMENT = prepare(fake_cell(rate=1.0, num_prompts=4, executor="real"))
"""Measured: every table of its run is kept."""
CELL = EXPERIMENT.cell


def make_record(service_s: float = 0.75) -> RunRecord:
    record = drive([0.0, 0.5, 1.0, 4.0], service_s)
    return record.with_manifest(
        obtained="measured", calibration="cal-1", dataset={"name": "poisson"}, max_num_batched_tokens=4
    )


def make_provenance(finished: str = "2025-01-02T03:04:05Z") -> dict[str, object]:
    git, times = GitState(commit="abc", dirty=False), {"started_utc": "2025-01-02T03:04:00Z", "finished_utc": finished}
    return {**collect(obtained="simulated", elapsed_s=5.0, git=git, argv=["repro", "run"]), **times}


def whole_record(run: StoredRun) -> RunRecord:
    """With every table, as it was stored."""
    tables = {name: run.table(name) for name in run.family.columns}
    return RunRecord(tables=tables, manifest=run.manifest["facts"])
