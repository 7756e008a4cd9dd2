"""Fits a card's roofline to one stated cell and compares every other stated number with its prediction.

One constant is fitted, the share of the card's matmul peak that packed forwards reach (attention gets
the same share); bandwidth share and step overhead are assumptions, stated in the calibration's note.
Nothing else is tuned: what the fit misses is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from engines.errors import UserError
from engines.hardware import gpu
from engines.roofline import Calibration, Roofline
from repro.cell import Cell
from repro.clock import VirtualClock
from repro.driver import drive_steps
from repro.experiment import prepare
from repro.metrics import summarize
from repro.paper import Claim, load_claims

BANDWIDTH_EFFICIENCY = 0.8
STEP_OVERHEAD_S = 0.005
TOLERANCE = 1e-3
"""Relative, of the fitted cell; throughput steps a little as batches fall differently."""

Role = Literal["fitted", "held out", "not run"]
Summary = Mapping[str, Any]
Runs = Mapping[str, Summary]
"""Run label -> its metrics."""


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A stated number and how the simulation answers it; ``value`` None means it cannot yet."""

    claim: str
    what: str
    value: Callable[[Runs], float] | None
    missing: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    claim: str
    what: str
    stated: float | tuple[float, ...] | None
    unit: str | None
    predicted: float | None
    error_percent: float | None
    """Relative error; None where only a bound or a range is stated, or nothing was run."""
    role: Role
    note: str


@dataclass(frozen=True, kw_only=True)
class CardProtocol:
    """What the text states about one card, and the runs that answer it."""

    card: str
    fitted_claim: str
    fitted_cell: str
    """Name of the fitted cell, as calibrations carry it."""
    fitted_run: str
    runs: Mapping[str, Mapping[str, Any]]
    """Label -> system, dataset, rate and knobs."""
    stated: tuple[Stated, ...]


def fit(protocol: CardProtocol) -> tuple[Calibration, list[Comparison]]:
    """Bisect the matmul share until the fitted cell's throughput is met, then predict the rest."""
    claims = {claim.id: claim for claim in load_claims("dllm-serve")}
    target = claims[protocol.fitted_claim].expected.value
    assert isinstance(target, float | int)
    low, high = 0.05, 1.0
    while True:
        middle = (low + high) / 2
        calibration = _calibration(protocol, middle)
        reached = _simulate(protocol, protocol.fitted_run, calibration)["throughput_tok_s"]
        if abs(reached / target - 1) < TOLERANCE or high - low < 1e-4:
            break
        low, high = (middle, high) if reached < target else (low, middle)
    runs = {label: _simulate(protocol, label, calibration) for label in protocol.runs}
    return calibration, [_compare(stated, claims[stated.claim], runs, protocol) for stated in protocol.stated]


def protocol_of(card: str) -> CardProtocol:
    if card not in PROTOCOLS:
        raise UserError(f"platform={card!r} has no stated cell to fit: use one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[card]


def _calibration(protocol: CardProtocol, share: float) -> Calibration:
    return Calibration(
        gpu=protocol.card,
        matmul_efficiency=share,
        attention_efficiency=share,
        bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
        step_overhead_s=STEP_OVERHEAD_S,
        fitted_on=(protocol.fitted_cell,),
        note=f"one constant fitted (matmul = attention share of peak); bandwidth share {BANDWIDTH_EFFICIENCY} and "
        f"{1e3 * STEP_OVERHEAD_S:g} ms per step are assumed",
    )


def _simulate(protocol: CardProtocol, label: str, calibration: Calibration) -> Summary:
    """As a cell would run, but with a calibration that is not stored yet."""
    run = dict(protocol.runs[label])
    cell = Cell(
        system=run.pop("system"), dataset=run.pop("dataset"), rate=run.pop("rate"), platform=protocol.card,
        executor="roofline", seed=0, knobs=tuple(run.items()),
    )  # fmt: skip
    experiment = prepare(cell)
    engine = experiment.system.assemble(experiment.settings, experiment.resources, "roofline").engine
    executor = engine.executor
    executor.roofline = Roofline(executor.roofline.shape, gpu(protocol.card), calibration)  # type: ignore[attr-defined]
    return summarize(drive_steps(engine, experiment.workload.requests, VirtualClock()))


def _compare(stated: Stated, claim: Claim, runs: Runs, protocol: CardProtocol) -> Comparison:
    predicted = stated.value(runs) if stated.value is not None else None
    expected = claim.expected.value
    error = None
    if predicted is not None and isinstance(expected, float | int) and claim.tolerance.type != "one_sided":
        error = 100 * (predicted / expected - 1)
    role: Role = "not run" if predicted is None else "fitted" if stated.claim == protocol.fitted_claim else "held out"
    return Comparison(
        claim=stated.claim, what=stated.what, stated=expected, unit=claim.expected.unit, predicted=predicted,
        error_percent=error, role=role, note=stated.missing,
    )  # fmt: skip


def _throughput(run: str) -> Callable[[Runs], float]:
    return lambda runs: runs[run]["throughput_tok_s"]


def _latency(run: str) -> Callable[[Runs], float]:
    return lambda runs: runs[run]["e2el_s"]["mean"]


def _ratio(run: str, base: str) -> Callable[[Runs], float]:
    return lambda runs: runs[run]["throughput_tok_s"] / runs[base]["throughput_tok_s"]


def _service_rate(run: str) -> Callable[[Runs], float]:
    """The knee of a throughput curve: requests/s served when saturated."""
    return lambda runs: runs[run]["request_throughput"]


def _runs(rate: float, low: float | None) -> Mapping[str, Mapping[str, Any]]:
    """dLLM-Serve and Sparse-dLLM at saturation on every dataset; on Burst also at a low rate."""
    runs: dict[str, Mapping[str, Any]] = {}
    for dataset in ("livebench", "burst", "osc"):
        runs[f"serve-{dataset}"] = {"system": "dllm-serve", "dataset": dataset, "rate": rate}
        runs[f"sparse-{dataset}"] = {"system": "sparse-dllm", "dataset": dataset, "rate": rate, "batch_size": 1}
    if low is not None:
        runs["serve-low"] = {"system": "dllm-serve", "dataset": "burst", "rate": low}
        runs["sparse-low"] = {"system": "sparse-dllm", "dataset": "burst", "rate": low, "batch_size": 1}
    return MappingProxyType(runs)


_NO_FAST = "Fast-dLLM is not part of this comparison yet"
_NO_CACHE = "dLLM-Cache is not part of this comparison yet"
_BATCH_1 = "Sparse-dLLM one request at a time, as its published code runs"

_RTX4090 = CardProtocol(
    card="rtx4090",
    fitted_claim="dllm-4090-burst-peak",
    fitted_cell="dLLM-Serve on Burst at 0.5 req/s: 76.6 tok/s (dLLM-Serve §6.2)",
    fitted_run="serve-burst",
    runs=_runs(0.5, 0.1),
    stated=(
        Stated(claim="dllm-4090-burst-peak", what="dLLM-Serve throughput, Burst", value=_throughput("serve-burst")),
        Stated(claim="dllm-4090-burst-serve-lat", what="dLLM-Serve mean latency, Burst, 0.5 req/s", value=_latency("serve-burst")),
        Stated(claim="dllm-4090-sparse-inferred", what="Sparse-dLLM throughput, Burst (inferred from Figure 8)",
               value=_throughput("sparse-burst"), missing=_BATCH_1),
        Stated(claim="dllm-4090-burst-base-lat", what="baselines' mean latency, Burst, 0.5 req/s: above 4000 s",
               value=_latency("sparse-burst"), missing=_BATCH_1),
        Stated(claim="dllm-wall-025", what="baselines' knee", value=_service_rate("sparse-burst"), missing=_BATCH_1),
        Stated(claim="dllm-linear-04", what="dLLM-Serve's knee", value=_service_rate("serve-burst"),
               missing="the paper's own 76.6 tok/s is 0.30 req/s, so its 0.4-0.5 cannot hold"),
        Stated(claim="dllm-low-load-equal", what="mean latency at 0.1 req/s, Sparse-dLLM / dLLM-Serve, Burst",
               value=lambda runs: runs["sparse-low"]["e2el_s"]["mean"] / runs["serve-low"]["e2el_s"]["mean"], missing=_BATCH_1),
        Stated(claim="dllm-abl-full-livebench", what="dLLM-Serve / Sparse-dLLM, LiveBench (card not stated)",
               value=_ratio("serve-livebench", "sparse-livebench"), missing=_BATCH_1),
        Stated(claim="dllm-abl-full-burst", what="dLLM-Serve / Sparse-dLLM, Burst (card not stated)",
               value=_ratio("serve-burst", "sparse-burst"), missing=_BATCH_1),
        Stated(claim="dllm-abl-full-osc", what="dLLM-Serve / Sparse-dLLM, OSC (card not stated)",
               value=_ratio("serve-osc", "sparse-osc"), missing=_BATCH_1),
        Stated(claim="dllm-4090-burst-fast", what="Fast-dLLM throughput, Burst", value=None, missing=_NO_FAST),
        Stated(claim="dllm-4090-burst-ratio", what="dLLM-Serve / Fast-dLLM, Burst", value=None, missing=_NO_FAST),
        Stated(claim="dllm-abs-tput-4090", what="dLLM-Serve / best baseline, all datasets", value=None, missing=_NO_FAST),
        Stated(claim="dllm-4090-burst-lat-ratio", what="best baseline's latency / dLLM-Serve, Burst", value=None, missing=_NO_FAST),
        Stated(claim="dllm-jitter-sd", what="latency deviation below the best baseline's, LiveBench", value=None, missing=_NO_FAST),
        Stated(claim="dllm-jitter-span", what="tail span below the best baseline's, LiveBench", value=None, missing=_NO_FAST),
        Stated(claim="dllm-jitter-cache-min", what="fastest dLLM-Cache request, Burst", value=None, missing=_NO_CACHE),
        Stated(claim="dllm-jitter-cache-max", what="slowest dLLM-Cache request, Burst", value=None, missing=_NO_CACHE),
    ),
)  # fmt: skip

_L40S = CardProtocol(
    card="l40s",
    fitted_claim="dllm-t4-burst-serve-tput",
    fitted_cell="dLLM-Serve on Burst at 1.0 req/s: 106.95 tok/s (dLLM-Serve Table 4)",
    fitted_run="serve-burst",
    runs=_runs(1.0, None),
    stated=tuple(
        Stated(claim=f"dllm-t4-{dataset}-{claim}-{metric}", what=f"{title} {label}, {dataset}", value=answer(f"{run}-{dataset}"),
               missing=note)
        for dataset in ("livebench", "burst", "osc")
        for claim, title, run, note in (("serve", "dLLM-Serve", "serve", ""), ("sparse-dllm", "Sparse-dLLM", "sparse", _BATCH_1))
        for metric, label, answer in (("tput", "throughput", _throughput), ("lat", "mean latency", _latency))
    ),
)  # fmt: skip

PROTOCOLS: Mapping[str, CardProtocol] = MappingProxyType({p.card: p for p in (_RTX4090, _L40S)})
