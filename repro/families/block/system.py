"""A block-diffusion engine behind the harness: from a cell to a deployment and its requests.

A checkpoint gets the problems of a graded task, and the rows of a user's own workload, as texts. For other data sets we keep lengths and
arrivals, and draw random ids: we do not know how a block-diffusion tokenizer would encode their texts.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from engines.blockdiffusion.engine import BlockEngine
from engines.blockdiffusion.sequence import BlockRequest, BlockStepRecord, SharedTables
from engines.blockdiffusion.simulated import PoissonSure, SimulatedExecutor
from engines.cost.kernels import price_on
from engines.cost.roofline import Gpu, StepPrice, gpu
from engines.dllm.plan import Request
from engines.errors import require
from repro.families.block.settings import MAX_NUM_LOGITS, BlockKnobs, BlockSettings, resolve
from repro.families.cost import DENOISING, describe_calibration, load_calibration
from repro.families.dllm import record as dllm
from repro.runs.cell import Cell
from repro.runs.family import Family, column, family_in, late_submissions
from repro.runs.record import REQUESTS, Obtained, OnProgress, RunRecord, Table
from repro.runs.step_driver import RequestLog, VirtualClock, WallClock, drive_steps, in_arrival_order
from repro.tasks.registry import TaskOptions, task_of_cell
from repro.tasks.task import Task
from repro.workloads.draws import arrivals_of, derive_seed
from repro.workloads.knobs import MIN_PROMPT_LEN
from repro.workloads.served import Traced, trace_source
from repro.workloads.workload import (
    Workload,
    WorkloadConfig,
    WorkloadProvenance,
    build_workload,
    fixed_workload,
    traced_workload,
    whole_answer,
)

STEPS = "steps"


def tokens_per_forward(record: RunRecord) -> float | None:
    forwards = column(record, "num_denoised", STEPS).sum() + column(record, "num_committed", STEPS).sum()
    tokens = sum(length for length in record.requests["output_len"] if length is not None)
    return float(tokens / forwards) if forwards else None


def rows_per_step(record: RunRecord) -> float | None:
    rows = column(record, "num_rows", STEPS)
    return float(rows.mean()) if rows.size else None


def commit_share(record: RunRecord) -> float | None:
    committed = column(record, "num_committed", STEPS).sum()
    forwards = committed + column(record, "num_denoised", STEPS).sum()
    return float(committed / forwards) if forwards else None


def steps_in_turn(record: RunRecord) -> Iterator[str]:
    start, end = column(record, "start_s", STEPS), column(record, "end_s", STEPS)
    if (end < start).any() or (start[1:] < end[:-1]).any():
        yield "steps overlap"
    denoised = [value for value in record.requests["denoised"] if value is not None]
    if None not in record.requests["denoised"] and sum(denoised) != sum(record.tables[STEPS]["num_denoised"]):
        yield "requests and steps disagree on the forwards that denoised"


BLOCK = family_in(Path(__file__).parent, "block", vars(dllm) | globals(), checks=(steps_in_turn, late_submissions))


ON_TORCH = "repro.families.block.on_torch"
"""The module of measured runs, imported only for them, so that a simulation loads no torch."""


@dataclass(frozen=True, kw_only=True)
class BlockWorkload:
    requests: tuple[BlockRequest, ...]
    provenance: WorkloadProvenance


@dataclass(frozen=True, kw_only=True)
class BlockDeployment:
    settings: BlockSettings
    seed: int = 0
    """The seed of a simulation's draws."""
    task: Task | None = None
    """The task whose problems the workload asks; None if nothing is graded."""
    asks_texts: bool = False
    """Whether prompts are texts; a task's always are."""

    @property
    def obtained(self) -> Obtained:
        return self.settings.knobs.charged.obtained if self.settings.is_simulated else "measured"

    @property
    def basis(self) -> str:
        return self.settings.basis + ("" if self.task is None else f" {self.task.digest}")

    @property
    def device(self) -> str:
        return self.settings.knobs.device

    @property
    def facts(self) -> Mapping[str, Any]:
        settings, rule = self.settings, self.settings.rule
        drawn = {"tokens_per_forward": settings.knobs.tokens_per_forward} if settings.is_simulated else {}
        return {
            "family": settings.config.family,
            "block_length": settings.block,
            "rule": {"name": type(rule).__name__, **asdict(rule), "is_exact": rule.is_exact},
            "batching": settings.knobs.batching,
            "num_tokens": settings.num_tokens,
            "prompts": "texts" if self.asks_texts else "random ids",
            "system": BlockDiffusion.title,
            "model": settings.model,
            "platform": settings.platform.title,
            **drawn,
        }

    @property
    def context(self) -> str:
        """A phrase for the context against which a denoising forward computes its block."""
        stale = "" if self.settings.rule.is_exact else ", and what an earlier forward left of the block"
        return f"K/V of the final blocks of {self.settings.block} tokens{stale}"

    def check_machine(self) -> None:
        """Raise UserError if a measured run cannot run here. Any machine can simulate."""
        if not self.settings.is_simulated:
            import_module(ON_TORCH).check_machine(self.settings)

    @contextmanager
    def serving(self) -> Iterator[tuple[BlockEngine, Mapping[str, Any]]]:
        """Yield a ready engine, and facts about what it runs on."""
        if self.settings.is_simulated:
            yield engine_of(self.settings, derive_seed(self.seed, "sure")), {}
            return
        with import_module(ON_TORCH).serving(self.settings) as engine_and_facts:
            yield engine_and_facts

    def run(self, workload: BlockWorkload, on_progress: OnProgress | None = None) -> RunRecord:
        settings = self.settings
        with self.serving() as (engine, paths):
            ordered = in_arrival_order(workload.requests)
            log = BlockLog(engine, ordered)
            clock = VirtualClock() if settings.is_simulated else WallClock()
            started_s = time.process_time()
            drive_steps(engine, ordered, clock, log, on_progress=on_progress)
            spent_s = time.process_time() - started_s
        card = settings.platform.gpu
        charged = charged_text(settings, card) if settings.is_simulated else None
        facts: Mapping[str, Any] = {"processor_s": spent_s}
        if settings.is_simulated:
            facts = settings.knobs.charged.estimates(card, settings.shape, {(DENOISING, 1): 1.0})
        measured_on = {} if settings.is_simulated else {"device": self.device, "dtype": settings.knobs.dtype}
        record = RunRecord(
            tables={REQUESTS: log.table, STEPS: log.steps},
            manifest={
                "obtained": self.obtained,
                "dataset": asdict(workload.provenance),
                "max_num_batched_tokens": settings.knobs.max_num_batched_tokens,
                "calibration": charged,
                **measured_on,
                **self.facts,
                **paths,
                **({"facts": facts} if facts else {}),
            },
        )
        if self.task is None:
            return record
        from repro.families.block.text import answer_of, text_of

        text = text_of(self.settings)
        return dllm.graded(record, self.task, {i: answer_of(ids, text).text for i, ids in log.answers.items()})


class BlockLog(RequestLog):
    def __init__(self, engine: BlockEngine, ordered: list[BlockRequest]) -> None:
        super().__init__(ordered, BLOCK.request_columns)
        self.table["gen_length"] = [request.gen_length for request in ordered]
        self.steps: Table = {column.name: [] for column in BLOCK.tables[STEPS]}
        self.answers: dict[int, tuple[int, ...]] = {}
        self._engine = engine
        self._admitted: set[int] = set()

    def stamp(self, step: BlockStepRecord, start: float, end: float) -> None:
        row = (
            *(step.step, start, end, step.duration_s, step.num_rows, step.denoised, step.committed, step.prefilled),
            *(step.taken, len(step.preempted), step.num_running, step.num_waiting),
        )
        for values, value in zip(self.steps.values(), row, strict=True):
            values.append(value)
        for request_id in step.admitted:
            if request_id not in self._admitted:  # else it had been preempted
                self._admitted.add(request_id)
                self.set_once("admitted_s", request_id, start)
        for request_id in step.begun:
            self.set_once("first_output_s", request_id, end)
        for request_id in step.finished:
            answer = self._engine.take(request_id)
            self.answers[request_id] = answer.ids
            counts = {"denoised": answer.denoised, "committed": answer.committed, "prefilled": answer.prefilled}
            self.close(request_id, "ok", finished_s=end, output_len=len(answer.ids), **counts)


class BlockDiffusion:
    name = "block-diffusion"
    title = "Block diffusion"
    family: ClassVar[Family] = BLOCK
    knobs: ClassVar[tuple[type, ...]] = (BlockKnobs,)

    def prepare(self, cell: Cell) -> tuple[BlockDeployment, BlockWorkload]:
        """Raises every UserError that a user can cause; loads nothing heavy."""
        settings, asks_texts, stop_ids = resolve(cell), False, frozenset[int]()
        file = trace_source(cell.dataset, settings.knobs, cell.requested)
        task = _task_of(cell, settings) if file is None else None
        if file is not None:
            workload, asks_texts = _trace_workload(cell, settings, file)
        elif task is not None:
            from repro.families.block.text import text_of

            asks_texts, stop_ids = True, text_of(settings).end_ids
            workload = _task_workload(cell, settings, task)
        else:
            workload = _dataset_workload(cell, settings)
        shared, shortest = settings.knobs.shared_len, min(request.prompt_len for request in workload.requests)
        require(
            shared == 0 or shared < shortest,
            f"shared_len={shared} leaves nothing of its own to a prompt of {shortest} tokens, the shortest: lower it",
        )
        requests = tuple(_engine_request(request, settings, cell.seed, stop_ids) for request in workload.requests)
        deployment = BlockDeployment(settings=settings, seed=cell.seed, task=task, asks_texts=asks_texts)
        return deployment, BlockWorkload(requests=requests, provenance=workload.provenance)

    def check_device(self, cell: Cell) -> None:
        settings = resolve(cell)
        if not settings.is_simulated and (settings.knobs.device, settings.knobs.quantization) != ("cpu", "none"):
            import_module(ON_TORCH).check_machine(settings)


def _task_of(cell: Cell, settings: BlockSettings) -> Task | None:
    """The task whose problems the cell asks; None for a workload that is only served."""
    obstacle = None
    if settings.is_simulated:
        obstacle = "a simulated executor"
    elif settings.directory is None:
        obstacle = "random weights"
    num_problems = settings.knobs.num_prompts if "num_prompts" in cell.requested else None
    return task_of_cell(cell, TaskOptions(num_problems=num_problems, seed=cell.seed), obstacle)


def _task_workload(cell: Cell, settings: BlockSettings, task: Task) -> Workload:
    """One request per problem, in problem order. Raises UserError for a prompt that does not fit."""
    from repro.families.block.text import text_of

    knobs, text = settings.knobs, text_of(settings)
    workload = fixed_workload(
        task.name,
        [text.encode(prompt) for prompt in task.prompts()],
        whole_answer(knobs.gen_length),
        arrivals=arrivals_of(cell.rate, knobs),
        seed=cell.seed,
        origin=task.origin,
        description=task.description,
    )
    longest, room = max(workload.requests, key=lambda each: each.prompt_len), room_for_prompt(settings)
    require(
        longest.prompt_len <= room,
        f"problem {task.problems[longest.request_id].problem_id} has {longest.prompt_len} prompt tokens and there is room for "
        f"{room}: lower gen_length, or raise max_model_len",
    )
    return workload


def _trace_workload(cell: Cell, settings: BlockSettings, file: Traced) -> tuple[Workload, bool]:
    """One request per row, and whether prompts are texts. An answer is as long as the row's: its last block is cut."""
    knobs, text = settings.knobs, None
    if not settings.is_simulated:
        from repro.families.block.text import find_text

        text = find_text(settings)
    require(
        text is None or "shared_len" not in cell.requested,
        f"shared_len={cell.requested.get('shared_len')!r} has no effect with workload={file.where!r}, whose rows have their own: "
        "leave it out",
    )
    workload = traced_workload(
        file,
        arrivals_of(cell.rate, knobs),
        cell.seed,
        whole_answer,
        most=settings.most_tokens,
        num=knobs.num_prompts if "num_prompts" in cell.requested else None,
        length_scale=knobs.length_scale if "length_scale" in cell.requested else 1.0,
        fixed_prompt_len=knobs.input_len,
        encode=None if text is None else lambda prompt: list(text.encode(prompt)),
    )
    return workload, text is not None


def room_for_prompt(settings: BlockSettings) -> int:
    """The most prompt tokens of a request, if its last block is whole."""
    return settings.max_model_len - settings.knobs.gen_length - settings.block


def _engine_request(request: Request, settings: BlockSettings, seed: int, stop_ids: frozenset[int]) -> BlockRequest:
    """The engine's request for a workload's. It gets random ids if the workload gives only a length."""
    ids = request.prompt_ids
    return BlockRequest(
        request_id=request.request_id,
        prompt_ids=_prompt(settings, request.prompt_len, seed, request.request_id) if ids is None else tuple(ids),
        gen_length=request.generation.gen_length,
        rule=settings.rule,
        sampling=settings.sampling(derive_seed(seed, "sampling", request.request_id)),
        stop_ids=stop_ids,
        arrival_s=request.arrival_s,
    )


def _dataset_workload(cell: Cell, settings: BlockSettings) -> Workload:
    knobs = settings.knobs
    config = WorkloadConfig(
        dataset=cell.dataset,
        num_requests=knobs.num_prompts,
        seed=cell.seed,
        arrivals=arrivals_of(cell.rate, knobs),
        length_scale=1.0 if knobs.input_len is not None else knobs.length_scale,
        max_prompt_len=max(room_for_prompt(settings), MIN_PROMPT_LEN),
        min_prompt_len=MIN_PROMPT_LEN,
        fixed_prompt_len=knobs.input_len,
    )
    return build_workload(config, whole_answer(knobs.gen_length))


def _prompt(settings: BlockSettings, tokens: int, seed: int, request_id: int) -> tuple[int, ...]:
    """Random ids. The first ``shared_len`` are the same for every request."""
    shared, vocabulary = settings.knobs.shared_len, settings.config.vocab_size
    prefix = np.random.default_rng((seed,)).integers(vocabulary, size=shared)
    suffix = np.random.default_rng((seed, request_id)).integers(vocabulary, size=tokens - shared)
    return (*prefix.tolist(), *suffix.tolist())


def engine_of(settings: BlockSettings, seed: int) -> BlockEngine:
    knobs, block = settings.knobs, settings.block
    size = settings.pool_block
    tables = SharedTables(
        num_slots=knobs.max_num_seqs,
        num_blocks=-(-settings.num_tokens // size),
        block_size=size,
        max_len=settings.max_model_len,
        diffusion_block=1 if settings.is_of_canvases else block,
        caches=knobs.prefix_cache,
    )
    assert settings.platform.gpu is not None, "settings refuse a platform without a card"
    executor = SimulatedExecutor(
        cost_on(settings, settings.platform.gpu),
        PoissonSure(knobs.tokens_per_forward or 1.0, seed),
        block=block,
        shifts=settings.shifts,
        tables=tables,
        host=knobs.host,
        # SGLang computes logits for all rows that it denoises.
        head_rows="wanted" if knobs.batching == "mixed" or settings.is_of_canvases else "all",
        max_num_logits=MAX_NUM_LOGITS,
        makes_canvases=settings.is_of_canvases,
    )
    return BlockEngine(executor, settings.engine)


def cost_on(settings: BlockSettings, card: str | Gpu) -> StepPrice:
    return price_on(settings.shape, gpu(card), settings.knobs.charged.framework, load_calibration(card))


def charged_text(settings: BlockSettings, card: str | Gpu) -> str:
    """One sentence on how steps are charged."""
    knobs, calibration = settings.knobs, load_calibration(card)
    if knobs.charged.framework is None:
        return describe_calibration(calibration)
    host = knobs.host
    overheads = [f"{1e3 * (calibration.step_overhead_s + host.step_overhead_s):g} ms a step"]
    if host.request_overhead_s:
        overheads.append(f"{1e3 * host.request_overhead_s:g} ms a request of it")
    if host.prefix_overhead_s:
        overheads.append(f"{1e3 * host.prefix_overhead_s:g} ms a 1,000 tokens before its rows")
    return knobs.charged.describe(card, f"{', '.join(overheads)} assumed", settings.shape)


BLOCK_DIFFUSION = BlockDiffusion()
