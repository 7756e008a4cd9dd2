"""What a card's fit determines of stored runs, whatever its calibration lists as its targets."""

from __future__ import annotations

from repro.reports.fitting import PROTOCOLS
from repro.runs.cell import Cell
from repro.runs.store import StoredRun

THROUGHPUTS = frozenset({"throughput_tok_s", "request_throughput", "window_s"})
SATURATED = 0.9
"""A system that serves less than this share of the arriving requests is saturated."""


def fitted_claims() -> frozenset[str]:
    """Claims whose stated throughput a constant is fitted to."""
    return frozenset(target.claim for protocol in PROTOCOLS.values() for target in protocol.targets)


def determined(run: StoredRun) -> frozenset[str]:
    """Metrics of the run that the fit of its card gives; none if it is not of a target's system and data set.

    Saturated, it serves the same tokens per second at any rate, and the latencies of its N requests follow: their mean
    is about (N / 2) (tokens / throughput - 1 / rate). Below, its throughput is the load's."""
    cell, protocol = run.cell, PROTOCOLS.get(run.cell.platform)
    if protocol is None or cell.rate is None:
        return frozenset()
    if all(_but_rate(protocol.cell(target)) != _but_rate(cell) for target in protocol.targets):
        return frozenset()
    served = run.summary["request_throughput"] or 0.0
    is_saturated = cell.rate == protocol.rate or served < SATURATED * cell.rate
    return frozenset(run.summary) if is_saturated else THROUGHPUTS


def _but_rate(cell: Cell) -> tuple[object, ...]:
    """What a cell asks, whatever its rate, its seed and the basis of its answer."""
    knobs = frozenset(knob for knob in cell.knobs if knob[0] != "basis")
    return (cell.system, cell.dataset, cell.platform, cell.executor, knobs)
