"""How far a card's predictions depend on what was assumed: lengths of the data sets, the batch rule, the step overhead.

With every request there from the start, the schedule does not depend on how long steps take. So each run is made once and
its steps are counted; under any other constants its time is a sum.
"""

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from engines.cost.roofline import Calibration, Roofline, StepWork, gpu
from engines.dllm.plan import StepOutcome, StepPlan
from engines.dllm.simulated import RooflineExecutor, copying
from repro.files import replace_text
from repro.reports.fitting import FITTED, STEP_OVERHEAD_S, SYSTEM, CardProtocol, fit, stated_values
from repro.runs.cell import Cell, Scalar
from repro.runs.system import SYSTEMS
from repro.systems.dllm import knobs
from repro.systems.dllm.deployment import DllmDeployment
from repro.systems.platforms import platform
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


class _Counting:
    """Passes everything on to a simulated executor and counts the steps it prices."""

    def __init__(self, executor: RooflineExecutor) -> None:
        self.executor, self.steps = executor, Counter[StepWork]()
        self.validate, self.release = executor.validate, executor.release
        self.wait, self.times, self.close = executor.wait, executor.times, executor.close

    def execute(self, plan: StepPlan) -> StepOutcome:
        work = self.executor.work(plan)
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


@dataclass(frozen=True, kw_only=True)
class SensitivityRow:
    """One line of the CSV: a table's, with its columns as they are there."""

    table: str
    item: str
    setting: str
    value: float
    unit: str


@dataclass(frozen=True, kw_only=True)
class SensitivityTable:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    tables: tuple[SensitivityTable, ...]
    rows: tuple[SensitivityRow, ...]


def save(found: Sensitivity, path: Path) -> Path:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(SensitivityRow)])
    writer.writerows([row.table, row.item, row.setting, f"{row.value:.6g}", row.unit] for row in found.rows)
    return replace_text(path, text.getvalue())


def num_runs(protocol: CardProtocol) -> int:
    """Calls of ``on_run``."""
    stated = {cell.dataset for cell in protocol.targets}
    return len(stated) * (len(LENGTH_SCALES) - 1) + len(DATASETS) * (2 + 2 * len(BATCH_RULES))


def sensitivity(protocol: CardProtocol, on_run: Callable[[], object] = lambda: None) -> Sensitivity:
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
    parts = (
        _of_lengths(scaled, stated, assumed),
        _of_rules(own, baselines, stated, assumed),
        _of_overheads(own, baselines, stated, fits),
    )
    return Sensitivity(tables=tuple(table for table, _ in parts), rows=tuple(row for _, rows in parts for row in rows))


Stated = dict[tuple[str, str], float]
"""(system, data set) -> tok/s."""


def _row(table: str, item: str, setting: str, value: float, unit: str) -> SensitivityRow:
    return SensitivityRow(table=table, item=item, setting=setting, value=value, unit=unit)


def _of_lengths(
    scaled: dict[str, dict[float, Tally]], stated: Stated, calibration: Calibration
) -> tuple[SensitivityTable, list[SensitivityRow]]:
    shown, rows = [], []
    for dataset, tallies in scaled.items():
        points = [(each.mean_prompt, each.throughput(calibration)) for each in tallies.values()]
        rows += [_row("lengths", dataset, f"mean prompt {mean:.0f}", value, "tok/s") for mean, value in points]
        paper, public = stated[SYSTEM, dataset], tallies[1.0]
        needed = length_for(paper, points)
        if needed is not None:
            rows.append(_row("lengths", dataset, "mean prompt for the paper's", needed, "tokens"))
        texts = (f"{public.mean_prompt:.0f}", f"{public.throughput(calibration):.1f}", f"{paper:.1f}")
        shown.append((load_card(dataset).title, *texts, "none" if needed is None else f"{needed:.0f}"))
    table = SensitivityTable(
        title="Lengths: mean prompts that would give dLLM-Serve's stated throughputs",
        columns=("data set", "mean prompt", "tok/s", "paper", "needed"),
        rows=tuple(shown),
        note="Mean prompt: tokens in the card's distribution. Needed: every prompt scaled alike, at the fitted share.",
    )
    return table, rows


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
) -> tuple[SensitivityTable, list[SensitivityRow]]:
    shown, rows, ours = [], [], []
    for dataset in DATASETS:
        title, reached = load_card(dataset).title, own[dataset].throughput(calibration)
        ours.append(f"{title} {reached:.1f} (paper {_stated_text(stated, SYSTEM, dataset)})")
        rows.append(_row("batch rule", f"{SYSTEM} {dataset}", "packed", reached, "tok/s"))
        for system in BASELINES:
            found = {rule: baselines[system, dataset, rule] for rule in BATCH_RULES}
            speeds = {rule: each.throughput(calibration) for rule, each in found.items()}
            rows += [_row("batch rule", f"{system} {dataset}", rule, speeds[rule], "tok/s") for rule in BATCH_RULES]
            cells = (f"{speeds[rule]:.1f} ({found[rule].batch_size})" for rule in BATCH_RULES)
            shown.append((title, system, _stated_text(stated, system, dataset), *cells))
    errors = {rule: _median_error(baselines, stated, calibration, rule) for rule in BATCH_RULES}
    rows += [_row("batch rule", "median error of baselines", rule, error, "%") for rule, error in errors.items()]
    table = SensitivityTable(
        title="Batch rule: tok/s of published baselines (and their batch), all predicted",
        columns=("data set", "system", "paper", *BATCH_RULES),
        rows=tuple(shown),
        note=f"Median absolute error over {_num_stated(stated)} stated throughputs of baselines: "
        + ", ".join(f"{rule} {error:.1f} %" for rule, error in errors.items())
        + f". dLLM-Serve, which is fitted: {', '.join(ours)}.",
    )
    return table, rows


def _of_overheads(
    own: dict[str, Tally], baselines: dict[tuple[str, str, str], Tally], stated: Stated, fits: dict[float, Calibration]
) -> tuple[SensitivityTable, list[SensitivityRow]]:
    def gain(dataset: str, rule: str, calibration: Calibration) -> float:
        best = max(baselines[system, dataset, rule].throughput(calibration) for system in BASELINES)
        return own[dataset].throughput(calibration) / best

    shown, rows = [], []
    for seconds, calibration in fits.items():
        setting, share = f"{1e3 * seconds:g} ms", calibration.matmul_efficiency
        rows.append(_row("step overhead", "share of peak", setting, share, "1"))
        cells = []
        for rule in BATCH_RULES:
            gains = {dataset: gain(dataset, rule, calibration) for dataset in DATASETS}
            error = _median_error(baselines, stated, calibration, rule)
            cells.append(f"{min(gains.values()):.2f}-{max(gains.values()):.2f} ({error:.0f} %)")
            rows += [_row("step overhead", f"gain {name} {rule}", setting, value, "x") for name, value in gains.items()]
            rows.append(_row("step overhead", f"median error of baselines {rule}", setting, error, "%"))
        shown.append((setting, f"{share:.3f}", *cells))
    table = SensitivityTable(
        title="Step overhead: gain of dLLM-Serve over the best baseline (error of baselines)",
        columns=("overhead", "share", *BATCH_RULES),
        rows=tuple(shown),
        note=f"Share of peak fitted again each time; the error is the median over {_num_stated(stated)} throughputs.",
    )
    return table, rows


def _stated_text(stated: Stated, system: str, dataset: str) -> str:
    value = stated.get((system, dataset))
    return "-" if value is None else f"{value:.1f}"


def _num_stated(stated: Stated) -> int:
    return sum(system != SYSTEM for system, _ in stated)


def _median_error(
    baselines: dict[tuple[str, str, str], Tally], stated: Stated, calibration: Calibration, rule: str
) -> float:
    """Percent, over the stated throughputs of baselines."""
    return median(
        100 * abs(baselines[system, dataset, rule].throughput(calibration) / value - 1)
        for (system, dataset), value in stated.items()
        if system != SYSTEM
    )
