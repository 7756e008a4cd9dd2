"""A block-diffusion engine behind the harness: from a cell to a deployment and its requests.

Prompts have the lengths and arrivals of a data set, and random ids: what a block-diffusion tokenizer would make of its texts is not
known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from engines.blockdiffusion.engine import BlockEngine
from engines.blockdiffusion.plan import StepRecord
from engines.blockdiffusion.request import BlockRequest
from engines.dllm.config import GenerationConfig
from repro.runs.cell import Cell
from repro.runs.drivers.steps import OnProgress, RequestLog, VirtualClock, WallClock, drive_steps, in_arrival_order
from repro.runs.family import Family
from repro.runs.record import REQUESTS, Obtained, RunRecord, Table
from repro.systems.block.family import BLOCK, REQUEST_COLUMNS, STEP_COLUMNS, STEPS
from repro.systems.block.settings import BlockKnobs, Settings, resolve
from repro.workloads.draws import arrivals_asked, derive_seed
from repro.workloads.knobs import MIN_PROMPT_LEN
from repro.workloads.workload import WorkloadConfig, WorkloadProvenance, build_workload

ON_TORCH = "repro.systems.block.on_torch"
SIMULATED = "repro.systems.block.simulated"
"""What serves: a simulation loads no torch, nor depends on its code."""


@dataclass(frozen=True, kw_only=True)
class BlockWorkload:
    requests: tuple[BlockRequest, ...]
    provenance: WorkloadProvenance


@dataclass(frozen=True, kw_only=True)
class Deployment:
    settings: Settings
    seed: int = 0
    """Decides what a simulation draws."""

    @property
    def obtained(self) -> Obtained:
        return self.settings.knobs.charged.obtained if self.settings.is_simulated else "measured"

    @property
    def modules(self) -> tuple[str, ...]:
        return __name__, "repro.systems.block.platforms", SIMULATED if self.settings.is_simulated else ON_TORCH

    @property
    def basis(self) -> str:
        return self.settings.basis

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
            "prompts": "random ids",
            **drawn,
        }

    def check_machine(self) -> None:
        """Any machine simulates."""
        if not self.settings.is_simulated:
            import_module(ON_TORCH).check_machine(self.settings)

    @contextmanager
    def serving(self) -> Iterator[tuple[BlockEngine, Mapping[str, Any]]]:
        """In its body there is an engine, and what it runs on."""
        if self.settings.is_simulated:
            yield import_module(SIMULATED).engine_of(self.settings, derive_seed(self.seed, "sure")), {}
            return
        with import_module(ON_TORCH).serving(self.settings) as found:
            yield found

    def run(self, workload: BlockWorkload, on_progress: OnProgress | None = None) -> RunRecord:
        settings = self.settings
        with self.serving() as (engine, paths):
            ordered = in_arrival_order(workload.requests)
            log = BlockLog(engine, ordered)
            clock = VirtualClock() if settings.is_simulated else WallClock()
            drive_steps(engine, ordered, clock, log, on_progress=on_progress)
        charged = (
            import_module(SIMULATED).charged_text(settings, settings.platform.gpu) if settings.is_simulated else None
        )
        measured_on = {} if settings.is_simulated else {"device": self.device, "dtype": settings.knobs.dtype}
        return RunRecord(
            tables={REQUESTS: log.table, STEPS: log.steps},
            manifest={
                "obtained": self.obtained,
                "dataset": asdict(workload.provenance),
                "max_num_batched_tokens": settings.knobs.max_num_batched_tokens,
                "platform": settings.platform.title,
                "model": settings.knobs.model,
                "system": BlockDiffusion.title,
                "calibration": charged,
                **measured_on,
                **self.facts,
                **paths,
            },
        )


class BlockLog(RequestLog):
    def __init__(self, engine: BlockEngine, ordered: list[BlockRequest]) -> None:
        super().__init__(ordered, REQUEST_COLUMNS)
        self.table["gen_length"] = [request.gen_length for request in ordered]
        self.steps: Table = {column.name: [] for column in STEP_COLUMNS}
        self._engine = engine
        self._admitted: set[int] = set()

    def stamp(self, step: StepRecord, start: float, end: float) -> None:
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
            counts = {"denoised": answer.denoised, "committed": answer.committed, "prefilled": answer.prefilled}
            self.close(request_id, "ok", finished_s=end, output_len=len(answer.ids), **counts)


class BlockDiffusion:
    name = "block-diffusion"
    title = "Block diffusion"
    family: ClassVar[Family] = BLOCK
    knobs: ClassVar[tuple[type, ...]] = (BlockKnobs,)

    def prepare(self, cell: Cell) -> tuple[Deployment, BlockWorkload]:
        """Every refusal a user can cause is raised here; nothing heavy is loaded."""
        settings = resolve(cell)
        return Deployment(settings=settings, seed=cell.seed), _requests(cell, settings)

    def check_device(self, cell: Cell) -> None:
        settings = resolve(cell)
        if not settings.is_simulated and settings.knobs.device != "cpu":
            import_module(ON_TORCH).check_machine(settings)


def _requests(cell: Cell, settings: Settings) -> BlockWorkload:
    knobs = settings.knobs
    room = knobs.max_model_len - knobs.gen_length - settings.block
    config = WorkloadConfig(
        dataset=cell.dataset,
        num_requests=knobs.num_prompts,
        seed=cell.seed,
        arrivals=arrivals_asked(cell.rate, knobs),
        length_scale=1.0 if knobs.input_len is not None else knobs.length_scale,
        max_prompt_len=max(room, MIN_PROMPT_LEN),
        min_prompt_len=MIN_PROMPT_LEN,
        fixed_prompt_len=knobs.input_len,
    )
    asked = GenerationConfig(gen_length=knobs.gen_length, block_length=knobs.gen_length, steps=knobs.gen_length)
    found = build_workload(config, asked)
    requests = tuple(
        BlockRequest(
            request_id=each.request_id,
            prompt_ids=_prompt(settings, each.prompt_len, cell.seed, each.request_id),
            gen_length=knobs.gen_length,
            rule=settings.rule,
            sampling=settings.sampling(derive_seed(cell.seed, "sampling", each.request_id)),
            arrival_s=each.arrival_s,
        )
        for each in found.requests
    )
    return BlockWorkload(requests=requests, provenance=found.provenance)


def _prompt(settings: Settings, tokens: int, seed: int, request_id: int) -> tuple[int, ...]:
    """Random ids, the first ``shared_len`` of them those of every request."""
    shared = min(settings.knobs.shared_len, tokens)
    own = _random_ids(settings, tokens - shared, (seed, request_id))
    return _random_ids(settings, shared, (seed,)) + own


def _random_ids(settings: Settings, tokens: int, seed: tuple[int, ...]) -> tuple[int, ...]:
    random = np.random.default_rng(seed)
    return tuple(random.integers(settings.config.vocab_size, size=tokens).tolist())


BLOCK_DIFFUSION = BlockDiffusion()
