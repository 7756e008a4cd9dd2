"""Timed steps of a user's card, in a CSV: a row a step, with what it computed and how long it took."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from engines.cost.fit import TimedStep
from engines.cost.roofline import L40S, Calibration, Roofline, StepWork
from engines.data import read_text
from engines.dllm.engine import Engine
from engines.dllm.plan import DelegatingExecutor, StepOutcome, StepPlan
from engines.dllm.simulated import ReplayingExecutor, RooflineExecutor, StepNotes
from engines.errors import UserError, require
from engines.models.checkpoint import PUBLISHED_CONFIGS, config_of
from engines.models.shape import ModelShape, model_shape
from repro.families.dllm.record import STEPS
from repro.families.dllm.replay import Recorded, measured_run
from repro.families.dllm.system import dllm_system

SECONDS, MODEL, NAME = "seconds", "model", "name"
TOTALS = ("query_rows", "attention_pairs", "logit_rows", "kv_read_rows", "kv_written_rows", "num_sequences")
"""Columns that the cost of every step rests on."""
WORK = (
    *TOTALS,
    *("logit_chunks", "extra_linear_flops", "extra_weight_bytes", "extra_attention_flops", "extra_cache_bytes"),
    *("new_layout", "builds"),
)
REQUIRED = (*TOTALS, SECONDS)
COLUMNS = (*WORK, SECONDS, MODEL, NAME)
RUN_SUFFIX = ".jsonl.gz"
MOST_ROWS = 100
"""Each is left out once, and all others are fitted again."""


def read_steps(path: Path, model: str) -> list[TimedStep]:
    """Those in a CSV, or of a stored run. ``model`` is that of rows which name none."""
    if path.name.endswith(RUN_SUFFIX):
        return steps_of_run(path, MOST_ROWS)
    reader = csv.DictReader(io.StringIO(read_text("measured", path)), strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        raise UserError(f"measured={str(path)!r} cannot be read as CSV ({error}): correct it") from None
    require(bool(rows), f"measured={str(path)!r} has no rows: write a line of column names, and one a step")
    require(
        len(rows) <= MOST_ROWS,
        f"measured={str(path)!r} has {len(rows)} rows and {MOST_ROWS} are the most that are taken: give fewer",
    )
    given = list(reader.fieldnames or ())
    for name in given:
        require(given.count(name) == 1, f"measured={str(path)!r} has two columns {name!r}: keep one")
        require(name in COLUMNS, f"measured={str(path)!r} has a column {name!r}: use {', '.join(COLUMNS)}")
    for name in REQUIRED:
        require(name in given, f"measured={str(path)!r} has no column {name!r}: add it")
    steps = []
    for number, row in enumerate(rows, start=1):
        try:
            steps.append(_step(row, number, model))
        except UserError as error:
            raise UserError(f"measured={str(path)!r}, row {number}: {error}") from None
    return steps


def shape_of(model: str) -> ModelShape:
    """Weights of 16 bits."""
    if model in PUBLISHED_CONFIGS:
        return ModelShape.from_config(config_of(model), name=model, dtype_bytes=2)
    return model_shape(model)


def _step(row: Mapping[str, str | None], number: int, model: str) -> TimedStep:
    require(None not in row, "it has more values than there are columns: correct it")  # type: ignore[comparison-overlap]
    told = {name: value.strip() for name, value in row.items() if value is not None and value.strip()}
    for name in REQUIRED:
        require(name in told, f"{name} has no value: give one")
    counts: dict[str, Any] = {name: _count(name, told[name]) for name in WORK if name in told}
    work = StepWork(**counts)
    require(work.query_rows > 0, "query_rows=0: a step has rows")
    require(not work.logit_rows or work.logit_chunks > 0, "logit_chunks=0 give no logit_rows: give at least 1")
    seconds = _seconds(told[SECONDS])
    return TimedStep(
        name=told.get(NAME, f"row {number}"), shape=shape_of(told.get(MODEL, model)), work=work, seconds=seconds
    )


def _count(name: str, text: str) -> int:
    require(text.isascii() and text.isdigit() and len(text) <= 18, f"{name}={text!r} must be a whole number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = math.nan if "_" in text else float(text)
    except ValueError:
        seconds = math.nan
    require(0 < seconds < math.inf, f"{SECONDS}={text!r} must be a number above 0")
    return seconds


class _Counting(DelegatingExecutor):
    """Notes what each step computes; what it is charged is of no account."""

    def __init__(self, executor: RooflineExecutor) -> None:
        super().__init__(executor)
        self.counted, self._meter, self._notes = list[StepWork](), executor, StepNotes()

    def execute(self, plan: StepPlan) -> StepOutcome:
        work = self._meter.work(plan)
        self.counted.append(self._notes.noted(plan, work))
        return self._meter.charged(plan, work)


def steps_of_run(path: Path, most: int) -> list[TimedStep]:
    """The run's schedule is gone through again, by the policies that made it. Steps that computed the same are one, with the median of
    their times; of more than ``most`` kinds those that lie evenly among all, by their rows."""
    recorded = measured_run(str(path))
    run = recorded.run
    system = dllm_system(run.cell.system)
    settings = system.settings(recorded.cell)
    works = _works(recorded)
    table = run.table(STEPS)
    require(
        [work.query_rows for work in works] == table["query_tokens"],
        f"measured={str(path)!r} ran other steps than its requests make where nothing takes time: give a run whose requests came all "
        f"at once (--request-rate inf), in packed steps",
    )
    seconds: dict[StepWork, list[float]] = {}
    for work, taken in zip(works, table["duration_s"], strict=True):
        seconds.setdefault(work, []).append(taken)
    kinds = sorted(seconds)
    chosen = kinds if len(kinds) <= most else [kinds[place * (len(kinds) - 1) // (most - 1)] for place in range(most)]
    return [
        TimedStep(
            name=f"{work.query_rows} rows x {len(seconds[work])}",
            shape=settings.shape,
            work=work,
            seconds=median(seconds[work]),
        )
        for work in chosen
    ]


def _works(recorded: Recorded) -> Sequence[StepWork]:
    run = recorded.run
    system, cell = dllm_system(run.cell.system), recorded.cell
    settings = system.settings(cell)
    requests = recorded.workload(cell, settings.generation).requests
    deployment = system.deployment(settings, [request.total_len for request in requests])
    require(
        deployment.batching.kind == "packed",
        f"measured={recorded.file!r} ran static batches: give a run of packed steps",
    )
    facts = run.facts
    deployment = replace(deployment, kv_rows=int(facts.get("kv_rows", deployment.kv_rows)))
    counting = _Counting(
        deployment.method.packed_roofline(
            Roofline(settings.shape, L40S, Calibration.datasheet(L40S)), deployment.config, deployment.sampler
        )
    )
    scheduler = deployment.scheduler()
    engine = Engine(scheduler, counting)
    if any(map(engine.is_open_ended, requests)):
        replayed = recorded.replayed(requests, cell.seed, is_drawn=False)
        deployment = deployment.following(replayed)
        engine = Engine(deployment.scheduler(), ReplayingExecutor(counting, replayed))
    for request in requests:
        engine.submit(request)
    engine.run()
    return counting.counted
