"""The steps of a measured run as a card's constants are fitted to them: what each computed, and how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from engines.cost.cards import L40S
from engines.cost.fit import TimedStep
from engines.cost.roofline import Calibration, Roofline, StepWork
from engines.dllm.engine import Engine
from engines.dllm.executor.replay import ReplayingExecutor
from engines.dllm.executor.roofline import RooflineExecutor, StepNotes
from engines.dllm.plan import DelegatingExecutor, StepOutcome, StepPlan
from engines.errors import require
from repro.systems.dllm.record import STEPS
from repro.systems.dllm.replay import Recorded, measured_run
from repro.systems.dllm.system import dllm_system


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
