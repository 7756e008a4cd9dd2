"""Fits a card's roofline to a few stated throughputs; what it says of every other stated number is a prediction.

Two constants are fitted per card. The share of the matmul peak (attention gets the same) makes dLLM-Serve's stated
throughputs right in the geometric mean; then the overhead of a published baseline's step makes Fast-dLLM's right.
The share of bandwidth and the overhead of our engine's step are assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from engines.errors import UserError
from engines.hardware.roofline import Calibration
from repro.reports.paper import load_claims
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.metrics import throughput_tok_s
from repro.systems.dllm.deployment import Deployment

BANDWIDTH_EFFICIENCY = 0.8
STEP_OVERHEAD_S = 0.005
TOLERANCE = 1e-3
"""Relative, of the geometric mean; throughput steps a little as batches fall differently."""
MAX_STEPS = 12


@dataclass(frozen=True, kw_only=True)
class FittedCell:
    """A stated throughput, by its claim, and the run that answers it."""

    claim: str
    system: str
    dataset: str

    @property
    def name(self) -> str:
        return f"{self.system} on {self.dataset}"


@dataclass(frozen=True, kw_only=True)
class CardProtocol:
    """``engine`` fixes the share of peak, ``upstream`` the overhead of published baselines."""

    card: str
    rate: float
    source: str
    engine: tuple[FittedCell, ...]
    upstream: tuple[FittedCell, ...]
    restated: tuple[str, ...] = ()
    """Claims that state a fitted number again: meeting them is no prediction either."""

    @property
    def claims(self) -> frozenset[str]:
        return frozenset((*(cell.claim for cell in (*self.engine, *self.upstream)), *self.restated))


PROTOCOLS: Mapping[str, CardProtocol] = MappingProxyType(
    {
        protocol.card: protocol
        for protocol in (
            CardProtocol(
                card="rtx4090",
                rate=0.5,
                source="dLLM-Serve §6.2",
                engine=(FittedCell(claim="dllm-4090-burst-peak", system="dllm-serve", dataset="burst"),),
                upstream=(FittedCell(claim="dllm-4090-burst-fast", system="fast-dllm", dataset="burst"),),
                restated=("dllm-4090-burst-ratio",),
            ),
            CardProtocol(
                card="l40s",
                rate=1.0,
                source="dLLM-Serve Table 4",
                engine=tuple(
                    FittedCell(claim=f"dllm-t4-{dataset}-serve-tput", system="dllm-serve", dataset=dataset)
                    for dataset in ("livebench", "burst", "osc")
                ),
                upstream=tuple(
                    FittedCell(claim=f"dllm-t4-{dataset}-fast-dllm-tput", system="fast-dllm", dataset=dataset)
                    for dataset in ("livebench", "burst", "osc")
                ),
                restated=("dllm-l40s-burst",),
            ),
        )
    }
)


def protocol_of(card: str) -> CardProtocol:
    if card not in PROTOCOLS:
        raise UserError(f"platform={card!r} has no stated cell to fit: use one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[card]


Simulate = Callable[[FittedCell, Calibration], float]


def fit(
    protocol: CardProtocol, on_run: Callable[[], object] = lambda: None, simulate: Simulate | None = None
) -> Calibration:
    """``simulate`` gives a cell's throughput under a calibration; by default it runs the cell. ``on_run`` is
    called after each."""
    stated = _stated(protocol)

    def bias(cells: Sequence[FittedCell], calibration: Calibration) -> float:
        """Mean of log(simulated / stated)."""
        logs = []
        for cell in cells:
            reached = throughput(protocol, cell, calibration) if simulate is None else simulate(cell, calibration)
            logs.append(math.log(reached / stated[cell.claim]))
            on_run()
        return sum(logs) / len(logs)

    def with_share(share: float) -> Calibration:
        return _calibration(protocol, share, 0.0)

    share = find_root(
        lambda x: bias(protocol.engine, with_share(math.exp(x))),
        math.log(0.4),
        high=0.0,
        slope=1.0,
        name="share of peak",
    )
    engine = with_share(math.exp(share))
    # Throughput is about inverse to time per step; a first guess for the slope is enough.
    overhead = find_root(
        lambda x: bias(protocol.upstream, replace(engine, upstream_step_overhead_s=x)),
        STEP_OVERHEAD_S,
        low=0.0,
        slope=-1 / 0.05,
        name="upstream step overhead",
    )
    return replace(engine, upstream_step_overhead_s=overhead)


def find_root(
    f: Callable[[float], float],
    start: float,
    *,
    slope: float,
    name: str,
    low: float = -math.inf,
    high: float = math.inf,
) -> float:
    """Secant steps from ``start``, the first along ``slope``, to |f| < ``TOLERANCE``. A root outside
    [low, high] is the bound."""
    x, value = start, f(start)
    for _ in range(MAX_STEPS):
        if abs(value) < TOLERANCE:
            return x
        following = min(high, max(low, x - value / slope))
        if following == x:
            return x
        after = f(following)
        if after != value:
            slope = (after - value) / (following - x)
        x, value = following, after
    raise UserError(
        f"the {name} does not settle after {MAX_STEPS} steps (now {x:g}, off by {100 * value:.1f} %): check the stated cells"
    )


def throughput(protocol: CardProtocol, fitted: FittedCell, calibration: Calibration) -> float:
    """Tokens per second of the cell as Figure 3 and Table 4 run it, with a calibration that is not stored yet."""
    knobs = () if fitted.system == "dllm-serve" else (("reading", "published"),)
    cell = Cell(
        system=fitted.system,
        dataset=fitted.dataset,
        rate=protocol.rate,
        platform=protocol.card,
        executor="roofline",
        seed=0,
        knobs=knobs,
    )
    experiment = prepare(cell)
    deployment = experiment.deployment
    assert isinstance(deployment, Deployment)
    reached = throughput_tok_s(replace(deployment, calibration=calibration).run(experiment.workload))
    assert reached is not None, "every request of a simulated cell finishes"
    return reached


def _stated(protocol: CardProtocol) -> dict[str, float]:
    found = {}
    for claim in load_claims("dllm-serve"):
        if claim.id in protocol.claims:
            assert isinstance(claim.expected.value, float | int)
            found[claim.id] = float(claim.expected.value)
    return found


def _calibration(protocol: CardProtocol, share: float, upstream: float) -> Calibration:
    stated = _stated(protocol)
    return Calibration(
        gpu=protocol.card,
        matmul_efficiency=share,
        attention_efficiency=share,
        bandwidth_efficiency=BANDWIDTH_EFFICIENCY,
        step_overhead_s=STEP_OVERHEAD_S,
        upstream_step_overhead_s=upstream,
        fitted_on=tuple(
            f"{cell.name}: {stated[cell.claim]:g} tok/s at {protocol.rate:g} req/s ({protocol.source})"
            for cell in (*protocol.engine, *protocol.upstream)
        ),
        note="two constants fitted: matmul = attention share of peak, and the overhead of a published baseline's step; "
        f"bandwidth share {BANDWIDTH_EFFICIENCY} and {1e3 * STEP_OVERHEAD_S:g} ms per step of our engine are assumed",
    )
