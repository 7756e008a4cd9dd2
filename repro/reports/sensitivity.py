"""How far a card's predictions depend on what was assumed: lengths of the data sets, the batch rule, the step overhead.

With every request there from the start, the schedule does not depend on how long steps take. So each run is made once and
its steps are counted; under any other constants its time is a sum.
"""

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from engines.cost.roofline import Calibration, Roofline, StepWork, gpu
from engines.dllm.plan import DelegatingExecutor, StepOutcome, StepPlan
from engines.dllm.simulated import RooflineExecutor, copying
from repro.families.dllm import knobs
from repro.families.dllm.deployment import DllmDeployment
from repro.families.platforms import platform
from repro.files import replace_text
from repro.reports.fitting import FITTED, STEP_OVERHEAD_S, SYSTEM, CardProtocol, fit, stated_values
from repro.runs.cell import Cell, Scalar
from repro.runs.system import SYSTEMS
from repro.workloads.dataset import load_card
from repro.workloads.workload import Workload

NUM_REQUESTS = 500
"""Most requests counted of a data set; what is compared drains alike."""
OVERHEADS_S = (0.0, 0.001, 0.002, 0.005, 0.01)
LENGTH_SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
BATCH_RULES = tuple(rule for rule in knobs.BATCH_RULES if rule != "batch")
"""Rules by which all batches of a run have one size."""
DATASETS = ("livebench", "burst", "osc")
BASELINES = ("fast-dllm", "dllm-cache", "sparse-dllm")
ALONE = "sparse-dllm"
"""Its published code serves one request at a time, whatever the rule."""


@dataclass(frozen=True, kw_only=True)
class Tally:
    """A run's steps by what they ask of the hardware."""

    steps: Counter[StepWork]
    roofline: Roofline
    copied_bytes_per_logit: int
    num_tokens: int
    batch_size: int | None
    mean_prompt: float

    def throughput(self, calibration: Calibration) -> float:
        """Tokens per second."""
        roofline = Roofline(self.roofline.shape, self.roofline.gpu, calibration)
        copied = self.copied_bytes_per_logit
        return self.num_tokens / sum(
            count * roofline.step_time(copying(work, roofline.shape, copied)).total_s
            for work, count in self.steps.items()
        )


class _Counting(DelegatingExecutor):
    """Counts the steps that a simulated executor would price."""

    def __init__(self, executor: RooflineExecutor) -> None:
        super().__init__(executor)
        self.work, self.steps = executor.work, Counter[StepWork]()

    def execute(self, plan: StepPlan) -> StepOutcome:
        work = self.work(plan)
        self.steps[work] += 1
        return StepOutcome(
            committed=tuple([item.commit for item in plan.items]),
            query_rows=work.query_rows,
            logit_rows=work.logit_rows,
            forward_s=0.0,
            duration_s=0.0,
        )


def tally(card: str, system: str, dataset: str, **knobs: Scalar) -> Tally:
    """Counts the steps of the data set's requests, up to ``NUM_REQUESTS`` of them, all there from the start."""
    num_requests = min(NUM_REQUESTS, load_card(dataset).paper_run.num_requests or NUM_REQUESTS)
    cell = Cell(
        system=system,
        dataset=dataset,
        platform=card,
        executor="roofline",
        rate=None,
        seed=0,
        knobs=(*FITTED, *{"num_prompts": num_requests, **knobs}.items()),
    )
    deployment, workload = SYSTEMS.get(system).prepare(cell)
    assert isinstance(deployment, DllmDeployment)
    assert isinstance(workload, Workload)
    name = platform(card).gpu
    assert name is not None
    # Prices are none of a tally's business: a stored calibration that cannot be read does not matter.
    roofline = Roofline(deployment.settings.shape, gpu(name))
    with replace(deployment, calibration=roofline.calibration).serving() as (engine, measured):
        priced = engine.executor
        assert isinstance(priced, RooflineExecutor)
        counting = engine.executor = _Counting(priced)
        for request in workload.requests:
            engine.submit(request)
        engine.run()
    prompts = [request.prompt_len for request in workload.requests]
    return Tally(
        steps=counting.steps,
        roofline=roofline,
        copied_bytes_per_logit=priced.copied_bytes_per_logit,
        num_tokens=sum(request.generation.gen_length for request in workload.requests),
        batch_size=measured.batch_size,
        mean_prompt=sum(prompts) / len(prompts),
    )


class SensitivityRow(NamedTuple):
    """One line of the CSV."""

    table: str
    item: str
    setting: str
    value: float
    unit: str


def save(found: Sequence[SensitivityRow], path: Path) -> Path:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(SensitivityRow._fields)
    writer.writerows(row._replace(value=f"{row.value:.6g}") for row in found)  # type: ignore[arg-type]
    return replace_text(path, text.getvalue())


def num_runs(protocol: CardProtocol) -> int:
    """Calls of ``on_run``."""
    stated = {cell.dataset for cell in protocol.targets}
    return len(stated) * (len(LENGTH_SCALES) - 1) + len(DATASETS) * (2 + 2 * len(BATCH_RULES))


def sensitivity(protocol: CardProtocol, on_run: Callable[[], object] = lambda: None) -> list[SensitivityRow]:
    """``on_run`` is called after each run."""
    stated = stated_values(protocol)

    def counted(system: str, dataset: str, **knobs: Scalar) -> Tally:
        found = tally(protocol.card, system, dataset, **knobs)
        on_run()
        return found

    own = {dataset: counted(SYSTEM, dataset) for dataset in DATASETS}
    baselines: dict[tuple[str, str, str], Tally] = {}
    for dataset in DATASETS:
        alone = counted(ALONE, dataset, reading="published")
        baselines |= {(ALONE, dataset, rule): alone for rule in BATCH_RULES}
        for system in BASELINES:
            if system != ALONE:
                for rule in BATCH_RULES:
                    baselines[system, dataset, rule] = counted(system, dataset, reading="published", batch_rule=rule)
    scaled = {
        cell.dataset: {
            scale: own[cell.dataset] if scale == 1 else counted(SYSTEM, cell.dataset, length_scale=scale)
            for scale in LENGTH_SCALES
        }
        for cell in protocol.targets
    }
    fits = {
        seconds: fit(
            protocol,
            simulate=lambda cell, calibration: own[cell.dataset].throughput(calibration),
            step_overhead_s=seconds,
        )
        for seconds in OVERHEADS_S
    }
    assumed = fits[STEP_OVERHEAD_S]
    return [
        *_of_lengths(scaled, stated, assumed),
        *_of_rules(own, baselines, stated, assumed),
        *_of_overheads(own, baselines, stated, fits),
    ]


Stated = dict[tuple[str, str], float]
"""(system, data set) -> tok/s."""


def _of_lengths(
    scaled: dict[str, dict[float, Tally]], stated: Stated, calibration: Calibration
) -> Iterator[SensitivityRow]:
    """Throughputs by mean prompt, and the mean prompt that would give dLLM-Serve's stated one, every prompt scaled alike."""
    for dataset, tallies in scaled.items():
        points = [(each.mean_prompt, each.throughput(calibration)) for each in tallies.values()]
        for mean, value in points:
            yield SensitivityRow("lengths", dataset, f"mean prompt {mean:.0f}", value, "tok/s")
        needed = length_for(stated[SYSTEM, dataset], points)
        if needed is not None:
            yield SensitivityRow("lengths", dataset, "mean prompt for the paper's", needed, "tokens")


def length_for(value: float, points: Sequence[tuple[float, float]]) -> float | None:
    """The length at which a falling throughput is ``value``, linear between (length, throughput) points in both
    logarithms; None outside them."""
    ordered = sorted(points)
    for (short, fast), (long, slow) in pairwise(ordered):
        if slow <= value <= fast and slow < fast:
            part = math.log(fast / value) / math.log(fast / slow)
            return short * (long / short) ** part
    return None


def _of_rules(
    own: dict[str, Tally], baselines: dict[tuple[str, str, str], Tally], stated: Stated, calibration: Calibration
) -> Iterator[SensitivityRow]:
    """Throughputs of published baselines by their rule of batches, all predicted."""
    for dataset in DATASETS:
        yield SensitivityRow(
            "batch rule", f"{SYSTEM} {dataset}", "packed", own[dataset].throughput(calibration), "tok/s"
        )
        for system in BASELINES:
            for rule in BATCH_RULES:
                speed = baselines[system, dataset, rule].throughput(calibration)
                yield SensitivityRow("batch rule", f"{system} {dataset}", rule, speed, "tok/s")
    for rule in BATCH_RULES:
        error = _median_error(baselines, stated, calibration, rule)
        yield SensitivityRow("batch rule", "median error of baselines", rule, error, "%")


def _of_overheads(
    own: dict[str, Tally], baselines: dict[tuple[str, str, str], Tally], stated: Stated, fits: dict[float, Calibration]
) -> Iterator[SensitivityRow]:
    """The gain over the best baseline, the share of peak fitted again each time."""
    for seconds, calibration in fits.items():
        setting = f"{1e3 * seconds:g} ms"
        yield SensitivityRow("step overhead", "share of peak", setting, calibration.matmul_efficiency, "1")
        for rule in BATCH_RULES:
            for dataset in DATASETS:
                best = max(baselines[system, dataset, rule].throughput(calibration) for system in BASELINES)
                gain = own[dataset].throughput(calibration) / best
                yield SensitivityRow("step overhead", f"gain {dataset} {rule}", setting, gain, "x")
            error = _median_error(baselines, stated, calibration, rule)
            yield SensitivityRow("step overhead", f"median error of baselines {rule}", setting, error, "%")


def _median_error(
    baselines: dict[tuple[str, str, str], Tally], stated: Stated, calibration: Calibration, rule: str
) -> float:
    """Percent, over the stated throughputs of baselines."""
    return median(
        100 * abs(baselines[system, dataset, rule].throughput(calibration) / value - 1)
        for (system, dataset), value in stated.items()
        if system != SYSTEM
    )
