"""Calibration of the card, fitted to its own measured steps, and its predictions of everything else that was measured.

Two constants are fitted: the share of the matrix peak (attention gets the same), and the overhead of a step. They are fitted to four rows
of repro/bench/step.py: Refresh and Reuse steps of the smallest and of the largest batch, which lie at the two ends of the roofline. The
share of bandwidth is that of the copy timed by repro/bench/peaks.py. The other rows of the step benchmark, and the throughput of every
system, are predictions.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from engines.cost.roofline import Calibration, Gpu, Roofline, StepWork, gpu, gpu_of_device
from engines.errors import UserError, require
from engines.models.shape import ModelShape
from repro.families.platforms import DllmPart, platform
from repro.files import SEAL, is_whole, replace_text, sealed
from repro.gpu_suite.suite import Suite, json_text, simulated, title_of
from repro.reports import fitting
from repro.runs.cell import Cell
from repro.runs.family import served_per_second
from repro.runs.store import StoredRun

CALIBRATION = "calibration.json"
FITTED_KINDS = ("refresh", "reuse")
ASSUMED_BANDWIDTH = 0.8
"""Assumed share of the datasheet's bandwidth until the copy is timed; the same as for cards that were not measured."""
LEAST_SHARE, MOST_SHARE = 1e-3, 0.999
SAME = 1e-6
"""A smaller difference of summed squared relative errors is not significant."""
GRID, ZOOMS = 64, 5
"""How many shares each grid has around the best one so far, and how many grids there are."""
SERVED_STAGES = ("throughput", "small-card", "shapes", "paper-length", "burst")
KINDS = {"tok/s": "throughputs", "ms": "steps"}
"""Unit of a measured number -> name of its median."""

Role = Literal["fitted", "prediction"]


@dataclass(frozen=True, kw_only=True)
class TimedSteps:
    """A row of repro/bench/step.py: the mean time of a kind of step, and the work of its steps, each with how often it occurs."""

    kind: str
    batch_size: int
    total_len: int
    seconds: float
    works: tuple[tuple[int, StepWork], ...]
    shape: ModelShape

    @property
    def name(self) -> str:
        return f"{self.kind} step of {self.batch_size} requests of {self.total_len} tokens, {self.shape.name}"

    def predicted_s(self, card: Gpu, calibration: Calibration) -> float:
        """Seconds of the mean step on the card's roofline."""
        roofline = Roofline(self.shape, card, calibration)
        total = sum(n * roofline.step_time(work).total_s for n, work in self.works)
        return total / sum(n for n, _ in self.works)

    def lower_bound_s(self, card: Gpu) -> float:
        """Seconds of the mean step at the peaks of a card."""
        roofline = Roofline(self.shape, card)
        return sum(n * roofline.lower_bound_s(work) for n, work in self.works) / sum(n for n, _ in self.works)


@dataclass(frozen=True, kw_only=True)
class PredictedAndMeasured:
    name: str
    role: Role
    unit: str
    measured: float
    predicted: float

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted / self.measured - 1)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A fitted calibration. ``machine``, ``commit`` and ``finished_utc`` belong to the run with the fitted rows."""

    calibration: Calibration
    comparisons: tuple[PredictedAndMeasured, ...]
    machine: str | None
    commit: str | None
    finished_utc: str

    @property
    def medians(self) -> dict[str, dict[str, Any]]:
        """Median absolute error of the predictions, in percent, by kind."""
        errors: dict[str, list[float]] = {}
        for comparison in self.comparisons:
            if comparison.role == "prediction":
                errors.setdefault(KINDS[comparison.unit], []).append(abs(comparison.error_percent))
        return {kind: {"count": len(errs), "median_percent": round(median(errs), 2)} for kind, errs in errors.items()}

    @property
    def report(self) -> dict[str, Any]:
        """The report, like that of a card fitted to stated numbers, but with measured numbers."""
        return {
            "schema_version": fitting.SCHEMA_VERSION,
            "card": self.calibration.gpu,
            "calibration": asdict(self.calibration),
            "machine": self.machine,
            "commit": self.commit,
            "finished_utc": self.finished_utc,
            "against": f"numbers measured on {self.machine} at commit {self.commit}",
            "medians": self.medians,
            "comparisons": [
                {
                    "claim": comparison.name,
                    "kind": "measured",
                    "role": comparison.role,
                    "unit": comparison.unit,
                    "expected": comparison.measured,
                    "ours": comparison.predicted,
                    "error_percent": round(comparison.error_percent, 2),
                }
                for comparison in self.comparisons
            ],
        }


# -- what was measured ----------------------------------------------------------------------------------------


def benchmark_run(suite: Suite, script: str) -> StoredRun | None:
    """The stored run of a script of ``repro.bench``; None if no run has a row yet. A run that was cut off has the rows up to then."""
    for job in suite.jobs:
        if job.experiment.cell.knob_values.get("script") == script:
            run = suite.stored(job)
            if run is not None and (run.facts.get("rows") or {}).get("rows"):
                return run
    return None


def timed_steps(run: StoredRun) -> list[TimedSteps]:
    facts = run.facts["rows"]
    shape = ModelShape(**facts["shape"])
    return [
        TimedSteps(
            kind=row["kind"],
            batch_size=row["batch_size"],
            total_len=row["total_len"],
            seconds=row["ms"] / 1e3,
            works=tuple((n, StepWork(**work)) for n, work in row["works"]),
            shape=shape,
        )
        for row in facts["rows"]
    ]


def card_of(suite: Suite, run: StoredRun) -> Gpu:
    """The platform's card by its datasheet, or else by the peaks that the benchmark itself measured."""
    name = platform(suite.platform).gpu
    if name is not None:
        return gpu(name)
    facts = run.facts["rows"]
    return Gpu.of_peaks(suite.platform, facts["flops_per_s"], facts["bytes_per_s"])


def measured_card(suite: Suite) -> Gpu | None:
    """A card with the peaks that repro/bench/peaks.py reached; None if it has not run yet."""
    run = benchmark_run(suite, "peaks")
    if run is None:
        return None
    (row,) = run.facts["rows"]["rows"]
    return Gpu.of_peaks(suite.platform, row["flops_per_s"], row["bytes_per_s"])


# -- the fit --------------------------------------------------------------------------------------------------


def fitted_rows(rows: Sequence[TimedSteps]) -> tuple[TimedSteps, ...]:
    """Refresh and Reuse rows of the smallest and the largest batch, at the shortest length."""
    length = min(row.total_len for row in rows)
    selected = [row for row in rows if row.kind in FITTED_KINDS and row.total_len == length]
    sizes = [row.batch_size for row in selected]
    return tuple(row for row in selected if row.batch_size in (min(sizes), max(sizes)))


@cache
def fit(rows: tuple[TimedSteps, ...], card: Gpu, *, copy_card: Gpu | None = None) -> Calibration:
    """Fit by least squares of the relative errors of these rows. The best overhead for a share has a closed form; shares are searched on
    ever narrower grids. ``copy_card`` has the bandwidth that a copy reached.

    Raises UserError if no row is bound by arithmetic, because the rows then do not determine the share.
    """
    require(
        len(rows) >= 2, f"{len(rows)} timed steps cannot fix two constants: run the step benchmark with more batches"
    )
    bandwidth = ASSUMED_BANDWIDTH if copy_card is None else min(1.0, copy_card.bandwidth / card.bandwidth)
    weights = 1 / np.array([row.seconds for row in rows])

    def least_error(share: float) -> tuple[float, float]:
        """The least sum of squared relative errors for a share, and the overhead that gives it."""
        alone = np.array([row.predicted_s(card, _constants(card, share, 0.0, bandwidth)) for row in rows])
        residual = 1 - alone * weights
        overhead = max(0.0, float(residual @ weights / (weights @ weights)))
        return float(np.sum((residual - overhead * weights) ** 2)), overhead

    low, high = np.log(LEAST_SHARE), 0.0
    for _ in range(ZOOMS):
        shares = np.linspace(low, high, GRID)
        errors = [least_error(float(np.exp(log_share)))[0] for log_share in shares]
        best = int(np.argmin(errors))
        low, high = shares[max(0, best - 1)], shares[min(GRID - 1, best + 1)]
    share = float(np.exp(shares[best]))
    require(
        least_error(1.0)[0] > least_error(share)[0] + SAME or share >= MOST_SHARE,
        "none of the timed steps is bound by arithmetic, so that they do not tell its share: run the step benchmark with a "
        "larger batch",
    )
    require(
        share < MOST_SHARE, f"steps are faster than the peaks of {card.name} allow: time them again on an idle machine"
    )
    return replace(
        _constants(card, share, least_error(share)[1], bandwidth),
        fitted_on=tuple(f"{row.name}: {1e3 * row.seconds:.4g} ms" for row in rows),
        note=f"two constants fitted to measured steps: matmul = attention share of peak, and the overhead of a step; "
        f"bandwidth share {bandwidth:.3g} is " + ("assumed" if copy_card is None else "that of a timed copy"),
    )


def _constants(card: Gpu, share: float, overhead_s: float, bandwidth: float) -> Calibration:
    return Calibration(
        gpu=card.name,
        matmul_efficiency=share,
        attention_efficiency=share,
        bandwidth_efficiency=bandwidth,
        step_overhead_s=overhead_s,
        fitted_on=(),
        note="",
    )


# -- what it predicts -----------------------------------------------------------------------------------------


def calibrated(suite: Suite) -> Fitted | str:
    """The calibration of a suite's runs, or a clause that says why there is none. It is written beside the summary."""
    run = benchmark_run(suite, "step")
    if run is None:
        return "not run yet"
    try:
        fitted = _fit_run(suite, run)
    except UserError as error:
        return str(error)
    replace_text(suite.root / CALIBRATION, json_text(sealed(fitted.report)))
    return fitted


def _fit_run(suite: Suite, run: StoredRun) -> Fitted:
    rows, card = timed_steps(run), card_of(suite, run)
    selected = fitted_rows(rows)
    calibration = fit(selected, card, copy_card=measured_card(suite))
    comparisons = [
        PredictedAndMeasured(
            name=row.name,
            role="fitted" if row in selected else "prediction",
            unit="ms",
            measured=1e3 * row.seconds,
            predicted=1e3 * row.predicted_s(card, calibration),
        )
        for row in rows
    ]
    if platform(suite.platform).gpu is not None:
        comparisons += _throughput_comparisons(suite, calibration)
    origin, has_no_card = run.provenance, platform(suite.platform).part(DllmPart).device == "cpu"
    return Fitted(
        calibration=calibration,
        comparisons=tuple(comparisons),
        machine=origin["cpu"]["model"] if has_no_card else (origin["gpu"] or {}).get("name"),
        commit=origin["git"]["commit"],
        finished_utc=origin["finished_utc"],
    )


def _throughput_comparisons(suite: Suite, calibration: Calibration) -> Iterator[PredictedAndMeasured]:
    for job in suite.jobs:
        run = suite.stored(job) if job.stage in SERVED_STAGES else None
        if run is None or not run.validity.valid or not run.summary["throughput_tok_s"]:
            continue
        cell = job.experiment.cell
        if predicted := predicted_tok_s(cell, calibration):
            yield PredictedAndMeasured(
                name=f"{title_of(cell)} on {cell.dataset}, {job.stage}, {run.manifest['facts']['model']}",
                role="prediction",
                unit="tok/s",
                measured=run.summary["throughput_tok_s"],
                predicted=predicted,
            )


@cache
def predicted_tok_s(cell: Cell, calibration: Calibration) -> float | None:
    """Throughput of the cell's simulated run. It is cached, because every job ends with a page that needs it."""
    return served_per_second(simulated(cell, calibration).run(), "output_len")


# -- as the calibration of every simulation of the card -------------------------------------------------------


def read_fit(folder: Path, card: str) -> dict[str, Any]:
    """The report in the suite's folder. Raises UserError unless it shows that it was measured on this card, and at which commit."""
    path = folder / CALIBRATION
    if not path.is_file():
        raise UserError(f"platform={card!r} has no calibration in {folder}: run 'make gpu-first' on such a card")
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        is_sealed = is_whole(value)
        version, machine, commit = value["schema_version"], value["machine"], value["commit"]
        calibration = Calibration.from_dict(value["calibration"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}): run gpu-suite again") from error
    require(version == fitting.SCHEMA_VERSION, f"{path} has schema_version={version}: run gpu-suite again")
    require(is_sealed, f"{path} is not as it was written: run gpu-suite again")
    machine_gpu = gpu_of_device(machine) if isinstance(machine, str) else None
    require(
        machine_gpu is not None and machine_gpu.name == card == calibration.gpu,
        f"{path} was fitted on {machine or 'an unnamed machine'}, which is no {card}: give the folder of a suite that ran "
        f"on one",
    )
    require(
        isinstance(commit, str),
        f"{path} does not say of which commit its runs are: set REPRO_COMMIT where there is no .git, and run them again",
    )
    return {name: part for name, part in value.items() if name != SEAL}
