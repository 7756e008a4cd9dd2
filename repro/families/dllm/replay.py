"""Measured runs that a simulation follows: their requests, and what their steps did. Also timed steps of a user's card, from such a run
or from a CSV. Each of its rows says what a step computed and how long it took."""

import csv
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from engines.cluster.record import rows_of
from engines.cost.fit import TimedStep
from engines.cost.roofline import L40S, Calibration, Roofline, StepWork
from engines.data import read_text
from engines.dllm.config import GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.plan import DelegatingExecutor, Request, StepOutcome, StepPlan
from engines.dllm.simulated import LETTERS, BlockSteps, Replayed, ReplayingExecutor, RooflineExecutor, StepNotes, redraw
from engines.dllm.simulated import Path as Steps
from engines.errors import UserError, require
from engines.models.checkpoint import PUBLISHED_CONFIGS, config_of
from engines.models.shape import ModelShape, model_shape
from repro.families.dllm.record import BLOCKS, DLLM, STEPS
from repro.families.dllm.settings import DllmSettings
from repro.families.dllm.system import dllm_system
from repro.files import file_cache
from repro.paths import COMMITTED
from repro.runs.cell import BASIS, COMPARISON, Cell
from repro.runs.record import REQUESTS
from repro.runs.store import UNREADABLE, StoredRun, StoreError, read_run
from repro.workloads.card import Origin
from repro.workloads.workload import Workload, workload_of

# -- recorded runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recorded:
    run: StoredRun
    file: str
    digest: str

    @property
    def cell(self) -> Cell:
        """The run's cell as its user asked for it."""
        return self.run.cell.without(BASIS).without(COMPARISON)

    @cached_property
    def paths(self) -> Mapping[int, Steps]:
        requests, blocks = self.run.table(REQUESTS), self.run.table(BLOCKS)
        rows = rows_of(requests, "request_id", "status", "output_len", "gen_length")
        ends = {request_id: end for request_id, *end in rows}
        paths: dict[int, list[BlockSteps]] = {}
        for request_id, phases, committed in rows_of(blocks, "request_id", "phases", "committed"):
            block = BlockSteps(tuple(LETTERS[letter] for letter in phases), tuple(map(int, committed.split())))
            paths.setdefault(request_id, []).append(block)
        for request_id, path in paths.items():
            status, length, gen_len = ends[request_id]
            generated = sum(sum(block.committed) for block in path)
            if status == "ok" and (length < generated or generated < gen_len):
                num_before = generated - sum(path[-1].committed)
                path[-1] = path[-1]._replace(stop=length - num_before - 1)
        return {request_id: tuple(path) for request_id, path in paths.items() if ends[request_id][0] == "ok"}

    def workload(self, cell: Cell, generation: GenerationConfig) -> Workload:
        """The run's requests, at its own arrival times or stretched to another rate."""
        run_cell, table = self.run.cell, self.run.table(REQUESTS)
        for name in ("dataset", "seed"):
            requested, recorded_value = getattr(cell, name), getattr(run_cell, name)
            require(
                requested == recorded_value,
                f"{name}={requested!r} is not that of replay={self.file!r}: ask for {recorded_value!r}, or add --replay-drawn",
            )
        require(
            cell.rate == run_cell.rate or run_cell.rate is not None,
            f"rate={cell.rate}: replay={self.file!r} was asked all at once, which has no times to stretch: use --request-rate inf",
        )
        if cell.rate == run_cell.rate:
            factor = 1.0
        else:
            factor = 0.0 if cell.rate is None or run_cell.rate is None else run_cell.rate / cell.rate
        num = cell.knob_values.get("num_prompts")
        total = len(table["request_id"])
        require(
            num is None or int(num) <= total,
            f"num_prompts={num}: replay={self.file!r} has {total} requests, ask for no more",
        )
        rows = sorted(rows_of(table, "request_id", "arrival_s", "prompt_len", "gen_length"))
        rows = rows[: total if num is None else int(num)]
        requests = tuple(
            Request(
                request_id=request_id,
                arrival_s=arrival_s * factor,
                prompt_len=prompt_len,
                generation=replace(
                    generation, gen_length=gen_length, steps=max(generation.steps, generation.num_blocks)
                ),
            )
            for request_id, arrival_s, prompt_len, gen_length in rows
        )
        dataset = self.run.manifest["facts"]["dataset"]
        origin = Origin(**{field.name: dataset[field.name] for field in fields(Origin)})
        left = total - len(requests)
        text = dataset["description"] + (f"; the first {len(requests)} of these {total} requests" if left else "")
        return workload_of(
            run_cell.dataset,
            requests,
            origin,
            f"{text}; as in a measured run ({self.digest})",
            num_clipped=min(dataset["num_clipped"], len(requests)),
            num_repeated=max(0, dataset["num_repeated"] - left),
            length_scale=dataset["length_scale"],
            seed=dataset["seed"],
        )

    def replayed(self, requests: Sequence[Request], seed: int, *, is_drawn: bool) -> Replayed:
        if is_drawn:
            return redraw(list(self.paths.values()), requests, seed)
        replay = Replayed(paths=self.paths)
        for request in requests:
            replay.check(request)
        return replay


@file_cache(maxsize=4)
def recorded(file: str) -> Recorded:
    """The run of a file, if a simulation can follow it. Raises UserError if the run does not record how a model decided its steps."""
    run = measured_run(file, "replay")
    try:
        is_open = bool(run.paths)
    except StoreError:
        is_open = False
    require(
        is_open,
        f"replay={file!r} says nothing of its steps, which its settings fix beforehand, or which an older version did not note: "
        f"simulate it as it is, or measure it again",
    )
    return run


@file_cache(maxsize=4)
def measured_run(file: str, purpose: str = "measured") -> Recorded:
    """The run of a file. If the path does not exist, we look for it below the committed results."""
    path = Path(file) if Path(file).exists() else COMMITTED / file
    try:
        run = read_run(path, purpose)
    except UserError:
        raise
    except (*UNREADABLE, StoreError) as error:
        raise UserError(f"{purpose}={file!r} is no stored run ({error}): give the file of a measured run") from error
    require(
        run.family is DLLM and run.machine is not None,
        f"{purpose}={file!r} is no measured run of a diffusion LLM: give the file of one",
    )
    return Recorded(run=run, file=file, digest=hashlib.sha256(run.content).hexdigest()[:12])


# -- timed steps ------------------------------------------------------------------------------------------

SECONDS, MODEL, NAME = "seconds", "model", "name"
TOTALS = ("query_rows", "attention_pairs", "logit_rows", "kv_read_rows", "kv_written_rows", "num_sequences")
"""Columns that every row needs, because the cost of each step depends on them."""
WORK = (
    *TOTALS,
    *("logit_chunks", "extra_linear_flops", "extra_weight_bytes", "extra_attention_flops", "extra_cache_bytes"),
    *("new_layout", "builds"),
)
REQUIRED = (*TOTALS, SECONDS)
COLUMNS = (*WORK, SECONDS, MODEL, NAME)
RUN_SUFFIX = ".jsonl.gz"
MOST_ROWS = 100
"""The most steps that we take. Calibration leaves each out once and fits all others again, which takes time."""


def read_steps(path: Path, model: str) -> list[TimedStep]:
    """The timed steps of a CSV or a stored run. ``model`` is for rows that name none."""
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
    columns = list(reader.fieldnames or ())
    for name in columns:
        require(columns.count(name) == 1, f"measured={str(path)!r} has two columns {name!r}: keep one")
        require(name in COLUMNS, f"measured={str(path)!r} has a column {name!r}: use {', '.join(COLUMNS)}")
    for name in REQUIRED:
        require(name in columns, f"measured={str(path)!r} has no column {name!r}: add it")
    steps = []
    for number, row in enumerate(rows, start=1):
        try:
            steps.append(_timed_step(row, number, model))
        except UserError as error:
            raise UserError(f"measured={str(path)!r}, row {number}: {error}") from None
    return steps


def shape_of(model: str) -> ModelShape:
    """The shape of a model with 16-bit weights."""
    if model in PUBLISHED_CONFIGS:
        return ModelShape.from_config(config_of(model), name=model, dtype_bytes=2)
    return model_shape(model)


def _timed_step(row: Mapping[str, str | None], number: int, model: str) -> TimedStep:
    require(None not in row, "it has more values than there are columns: correct it")  # type: ignore[comparison-overlap]
    cells = {name: value.strip() for name, value in row.items() if value is not None and value.strip()}
    for name in REQUIRED:
        require(name in cells, f"{name} has no value: give one")
    counts: dict[str, Any] = {name: _count(name, cells[name]) for name in WORK if name in cells}
    work = StepWork(**counts)
    require(work.query_rows > 0, "query_rows=0: a step has rows")
    require(not work.logit_rows or work.logit_chunks > 0, "logit_chunks=0 give no logit_rows: give at least 1")
    seconds = _seconds(cells[SECONDS])
    return TimedStep(
        name=cells.get(NAME, f"row {number}"), shape=shape_of(cells.get(MODEL, model)), work=work, seconds=seconds
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
    """Records the work of each step. The time that it charges does not matter."""

    def __init__(self, executor: RooflineExecutor) -> None:
        super().__init__(executor)
        self.counted, self._meter, self._notes = list[StepWork](), executor, StepNotes()

    def execute(self, plan: StepPlan) -> StepOutcome:
        work = self._meter.work(plan)
        self.counted.append(self._notes.with_notes(plan, work))
        return self._meter.charged(plan, work)


def steps_of_run(path: Path, most: int) -> list[TimedStep]:
    """The timed steps of a stored run. We run its schedule again with the policies that made it, to know the work of each step. Steps
    with the same work become one, with their median time. From more than ``most`` of these we pick evenly, by rows."""
    recorded = measured_run(str(path))
    settings = dllm_system(recorded.cell.system).settings(recorded.cell)
    works = _step_works(recorded, settings)
    table = recorded.run.table(STEPS)
    require(
        [work.query_rows for work in works] == table["query_tokens"],
        f"measured={str(path)!r} ran other steps than its requests make where nothing takes time: give a run whose requests came all "
        f"at once (--request-rate inf), in packed steps",
    )
    seconds: dict[StepWork, list[float]] = {}
    for work, duration_s in zip(works, table["duration_s"], strict=True):
        seconds.setdefault(work, []).append(duration_s)
    kinds = sorted(seconds)
    chosen = kinds if len(kinds) <= most else [kinds[index * (len(kinds) - 1) // (most - 1)] for index in range(most)]
    return [
        TimedStep(
            name=f"{work.query_rows} rows x {len(seconds[work])}",
            shape=settings.shape,
            work=work,
            seconds=median(seconds[work]),
        )
        for work in chosen
    ]


def _step_works(recorded: Recorded, settings: DllmSettings) -> Sequence[StepWork]:
    requests = recorded.workload(recorded.cell, settings.generation).requests
    system = dllm_system(recorded.cell.system)
    deployment = system.deployment(settings, [request.total_len for request in requests])
    require(deployment.is_packed, f"measured={recorded.file!r} ran static batches: give a run of packed steps")
    deployment = replace(deployment, kv_rows=int(recorded.run.facts.get("kv_rows", deployment.kv_rows)))
    roofline = Roofline(settings.shape, L40S, Calibration.datasheet(L40S))
    counting = _Counting(deployment.charged_to(roofline, is_upstream=False))
    engine = Engine(deployment.scheduler(), counting)
    if any(map(engine.is_open_ended, requests)):
        replayed = recorded.replayed(requests, recorded.cell.seed, is_drawn=False)
        deployment = deployment.following(replayed)
        engine = Engine(deployment.scheduler(), ReplayingExecutor(counting, replayed))
    for request in requests:
        engine.submit(request)
    engine.run()
    return counting.counted
