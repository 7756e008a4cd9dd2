"""Fits a card's roofline to dLLM-Serve's stated throughputs. Its results for any baseline are predictions.

One constant is fitted per card: the share of the matmul peak (attention gets the same). It makes dLLM-Serve's stated throughputs right in
the geometric mean. The share of bandwidth and the overhead of a step are assumed, the same for every system. The report compares every
stated number with what the fit gives, with medians over the predictions alone.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from engines.cost.roofline import Calibration
from engines.errors import UserError
from repro import paths
from repro.families.dllm.deployment import DllmDeployment
from repro.files import replace_text, sealed
from repro.reports.claims import Judged, stated
from repro.reports.claims_file import as_row
from repro.runs.cell import Cell
from repro.runs.family import served_per_second
from repro.runs.system import SYSTEMS
from repro.workloads.workload import Workload

SCHEMA_VERSION = 4
KINDS: Mapping[str, str] = MappingProxyType({"tok/s": "throughputs", "x": "ratios", "%": "ratios", "s": "latencies"})
"""Unit of a stated number -> the median it enters. % is a reduction or a gain. An overloaded run's latencies follow from its throughput."""
_ONE = {"throughputs": "throughput", "ratios": "ratio", "latencies": "latency", "steps": "step"}

_KEPT = ("role", "verdict", "expected", "unit", "ours", "of", "error_percent", "obtained", "how")


def report_path(card: str) -> Path:
    return paths.CALIBRATION / f"{card}-report.json"


def report(calibration: Calibration, judged: Iterable[Judged]) -> dict[str, Any]:
    """``judged`` are the simulated comparisons on the card."""
    rows = [as_row(each) for each in judged]
    comparisons = [
        {"claim": row["id"], "what": row["statement"], "kind": row["kind"], **{name: row[name] for name in _KEPT}}
        for row in rows
        if row["role"] is not None
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "card": calibration.gpu,
        "calibration": asdict(calibration),
        "medians": medians(comparisons),
        "comparisons": comparisons,
    }


def medians(comparisons: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Median absolute error of predictions of stated numbers, by kind. A number that is stated twice counts once."""
    errors: dict[str, list[float]] = {name: [] for name in KINDS.values()}
    seen: set[tuple[Any, ...]] = set()
    for row in comparisons:
        name, error = KINDS.get(row["unit"]), row["error_percent"]
        key = (row["unit"], row["expected"], row["ours"])
        if row["role"] != "prediction" or row["kind"] != "stated" or name is None or error is None or key in seen:
            continue
        seen.add(key)
        errors[name].append(abs(error))
    return {name: {"count": len(own), "median_percent": round(median(own), 2)} for name, own in errors.items() if own}


def write_report(value: Mapping[str, Any]) -> Path:
    text = json.dumps(sealed(value), indent=2, ensure_ascii=False, allow_nan=False)
    return replace_text(report_path(value["card"]), text + "\n")


def read_report(card: str) -> dict[str, Any] | None:
    """The stored report of a card, or None."""
    path = report_path(card)
    if not path.is_file():
        return None
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if value["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema_version={value['schema_version']}, not {SCHEMA_VERSION}")
        medians_sentence(value["medians"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path.name} cannot be used ({type(error).__name__}: {error}): run 'repro calibrate' again"
        ) from error
    return value


def predictions_note(card: str) -> str:
    """A sentence on the errors of the card's predictions, without numbers that were fitted or follow from fitted ones."""
    report = read_report(card)
    if report is None:
        return f"No comparison of the {card} calibration with stated numbers is stored: run 'repro calibrate --platform {card} --keep'."
    errors = {
        row["claim"]: row["error_percent"]
        for row in report["comparisons"]
        if row["role"] == "prediction" and row["error_percent"] is not None
    }
    if not errors:
        return f"No stated number but those that {card} was fitted on, or that follow from them, can be compared with."
    worst = max(errors, key=lambda claim: abs(errors[claim]))
    return (
        f"Predictions of {card} against {report.get('against', 'stated numbers')}, median absolute error: {medians_sentence(report['medians'])}; "
        f"worst {worst} {errors[worst]:+.0f} % (results/calibration/{report_path(card).name})."
    )


def medians_sentence(errors: Mapping[str, Mapping[str, Any]]) -> str:
    """The medians in words, the same in captions and on the terminal."""
    parts = [
        f"{row['median_percent']:.1f} % over {row['count']} {_ONE.get(name, name) if row['count'] == 1 else name}"
        for name, row in errors.items()
    ]
    return ", ".join(parts) if parts else "no prediction to compare with"


SYSTEM = "dllm-serve"
FITTED = (("cost", "roofline"),)
"""Only the roofline is fitted, because composed steps have nothing to fit."""
BANDWIDTH_EFFICIENCY = 0.8
STEP_OVERHEAD_S = 0.005
TOLERANCE = 1e-3
"""Relative tolerance of the geometric mean. Throughput changes in small steps as batches fall differently."""
MAX_STEPS = 12


@dataclass(frozen=True, kw_only=True)
class CardProtocol:
    card: str
    rate: float
    source: str
    targets: Mapping[str, str]
    """Claim of a stated throughput of dLLM-Serve -> data set of the run that answers it. All of them together fix the share of peak."""

    def cell(self, claim: str) -> Cell:
        """The cell of a target's run, as in Figure 3 and Table 4."""
        return Cell(
            system=SYSTEM,
            dataset=self.targets[claim],
            rate=self.rate,
            platform=self.card,
            executor="roofline",
            knobs=FITTED,
        )


_RTX4090 = CardProtocol(card="rtx4090", rate=0.5, source="dLLM-Serve §6.2", targets={"dllm-4090-burst-peak": "burst"})
_L40S = CardProtocol(
    card="l40s",
    rate=1.0,
    source="dLLM-Serve Table 4",
    targets={f"dllm-t4-{dataset}-serve-tput": dataset for dataset in ("livebench", "burst", "osc")},
)
PROTOCOLS: Mapping[str, CardProtocol] = MappingProxyType({protocol.card: protocol for protocol in (_RTX4090, _L40S)})


def protocol_of(card: str) -> CardProtocol:
    if card not in PROTOCOLS:
        raise UserError(f"platform={card!r} has no stated cell to fit: use one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[card]


Simulate = Callable[[str, Calibration], float]


def fit(
    protocol: CardProtocol, on_run: Callable[[], object] = lambda: None, simulate: Simulate | None = None
) -> Calibration:
    """Fit the card's calibration. ``simulate`` returns the throughput of a claim's cell under a calibration; by default it runs the cell.
    ``on_run`` is called after each run."""

    def bias(share: float) -> float:
        """Mean of log(simulated / stated)."""
        calibration, logs = calibration_with(protocol, share), []
        for claim in protocol.targets:
            rate = throughput(protocol, claim, calibration) if simulate is None else simulate(claim, calibration)
            logs.append(math.log(rate / stated("dllm-serve", claim)))
            on_run()
        return sum(logs) / len(logs)

    root = find_root(lambda x: bias(math.exp(x)), math.log(0.4), high=0.0, slope=1.0, name="share of peak")
    return calibration_with(protocol, math.exp(root))


def find_root(f: Callable[[float], float], start: float, *, slope: float, name: str, high: float = math.inf) -> float:
    """Find a root by secant steps from ``start``, the first along ``slope``, until |f| < ``TOLERANCE``. A root above ``high`` is
    ``high``."""
    x, value = start, f(start)
    for _ in range(MAX_STEPS):
        if abs(value) < TOLERANCE:
            return x
        following = min(high, x - value / slope)
        if following == x:
            return x
        after = f(following)
        if after != value:
            slope = (after - value) / (following - x)
        x, value = following, after
    raise UserError(
        f"the {name} does not settle after {MAX_STEPS} steps (now {x:g}, off by {100 * value:.1f} %): check the stated cells"
    )


def throughput(protocol: CardProtocol, claim: str, calibration: Calibration) -> float:
    """Tokens per second of the claim's cell with a calibration that is not stored yet."""
    # ``prepare`` would read the stored calibration, and an unreadable one could then not be fitted again.
    deployment, workload = SYSTEMS.get(SYSTEM).prepare(protocol.cell(claim))
    assert isinstance(deployment, DllmDeployment)
    assert isinstance(workload, Workload)
    rate = served_per_second(replace(deployment, calibration=calibration).run(workload), "output_len")
    assert rate is not None, "every request of a simulated cell finishes"
    return rate


def calibration_with(protocol: CardProtocol, share: float) -> Calibration:
    """The card's calibration with this share of peak and the assumed constants."""
    return Calibration(
        gpu=protocol.card,
        matmul_efficiency=share,
        attention_efficiency=share,
        bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
        step_overhead_s=STEP_OVERHEAD_S,
        fitted_on=tuple(
            f"{SYSTEM} on {dataset}: {stated('dllm-serve', claim):g} tok/s at {protocol.rate:g} req/s ({protocol.source})"
            for claim, dataset in protocol.targets.items()
        ),
        note=f"one constant fitted: matmul = attention share of peak; bandwidth share {BANDWIDTH_EFFICIENCY} and "
        f"{1e3 * STEP_OVERHEAD_S:g} ms per step of any system are assumed",
    )
