"""tau_pre(n, k) and tau_dec(n, k): P95 latencies of a phase with k replicas of degree n.

Eq. (5) charges a degree n a constant tau(n), however many replicas share the load, so as printed it never
instantiates a second one. Here the coefficients depend on k, and the load of a replica falls with it. Everything is
computed from the fitted performance model: the planner sees no more of the truth than the routers do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal

import numpy as np

from engines.ampd.performance import PerformanceModel
from engines.ampd.planner.closed_form import ClosedForm, PhaseLatency
from engines.ampd.planner.workload import PlanningWorkload
from engines.ar.cluster.decode_worker import DecodeWorker, Sink
from engines.ar.cluster.prefill_worker import PrefillWorker
from engines.ar.cluster.simulation import Simulation
from engines.ar.cluster.worker import Parts
from engines.ar.cost import DecodeLine, StepCost
from engines.ar.metrics import observe
from engines.ar.session import OpenLoop
from engines.errors import require
from engines.policies.batching import ONE_BY_ONE
from engines.policies.binding import FewestSessions
from engines.policies.queue import PrefillQueue
from engines.policies.routing import RemoteOnly
from engines.policies.step import Chunk

Method = Literal["direct", "cached", "closed"]
"""direct: simulate the phase for every (n, k), on the very cluster code. cached: simulate some k a degree and
interpolate ln tau over ln k between them. closed: formulas."""
_DIRECT_UP_TO_GPUS = 32
_CACHED_UP_TO_GPUS = 64
_CACHED_PER_OCTAVE = 2
_UNBOUNDED_KV = 10**15


Key = tuple[int, int]
"""(degree n, replicas k)."""


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    prefill: dict[Key, PhaseLatency]
    decode: dict[Key, PhaseLatency]


def default_method(num_gpus: int) -> Method:
    if num_gpus <= _DIRECT_UP_TO_GPUS:
        return "direct"
    return "cached" if num_gpus <= _CACHED_UP_TO_GPUS else "closed"


def coefficients(
    model: PerformanceModel,
    workload: PlanningWorkload,
    degrees: Sequence[int],
    num_gpus: int,
    method: Method | None = None,
) -> Coefficients:
    """Coefficients of every (n, k) that leaves the other phase at least one worker; ``method`` None goes by ``num_gpus``."""
    require(bool(degrees), "degrees=(): the planner needs a degree the model fits")
    most = num_gpus - min(degrees)
    require(
        most >= min(degrees),
        f"num_gpus={num_gpus} do not hold a prefill and a decode worker of {min(degrees)} GPUs each: give more",
    )
    method = method or default_method(num_gpus)
    replicas = {degree: range(1, most // degree + 1) for degree in degrees if degree <= most}
    if method == "closed":
        form = ClosedForm(model, workload)
        return Coefficients(
            prefill={
                (degree, k): latency
                for degree, counts in replicas.items()
                for k, latency in zip(counts, form.prefill(degree, counts), strict=True)
            },
            decode={(degree, k): form.decode(degree, k) for degree, counts in replicas.items() for k in counts},
        )
    found = []
    for phase in (simulate_prefill, simulate_decode):
        table: dict[Key, PhaseLatency] = {}
        for degree, counts in replicas.items():
            known = _thinned(counts) if method == "cached" else counts
            points = {k: phase(model, workload, degree, k) for k in known}
            table.update(((degree, k), points[k] if k in points else _between(points, k)) for k in counts)
        found.append(table)
    return Coefficients(prefill=found[0], decode=found[1])


def simulate_prefill(model: PerformanceModel, workload: PlanningWorkload, degree: int, replicas: int) -> PhaseLatency:
    """k prefill workers before a decode side without contention; tasks join the shortest queue, first come first served."""
    simulation = Simulation(binder=FewestSessions(), router=RemoteOnly(), estimator=model)
    simulation.add(Sink(simulation, worker_id=0, degree=degree, itl_s=model.decode_s(1, degree)))
    for index in range(replicas):
        simulation.add(PrefillWorker(simulation, **_parts(1 + index, degree, ModelCost(model, degree))))
    ttft_s = observe(simulation.run(OpenLoop(sessions=workload.at_rate()))).ttft_s
    p95_s = float(np.percentile(ttft_s, 95))
    return PhaseLatency(seconds=p95_s, of_slo=p95_s / workload.slo.ttft_s)


def simulate_decode(model: PerformanceModel, workload: PlanningWorkload, degree: int, replicas: int) -> PhaseLatency:
    """k decode workers behind a prefill side that takes no time; sessions go where the fewest are."""
    simulation = Simulation(binder=FewestSessions(), router=RemoteOnly(), estimator=model)
    for index in range(replicas):
        parts = _parts(index, degree, ModelCost(model, degree))
        simulation.add(DecodeWorker(simulation, kv_capacity=_UNBOUNDED_KV, **parts))
    simulation.add(PrefillWorker(simulation, **_parts(replicas, degree, ModelCost(None, degree))))
    run = simulation.run(OpenLoop(sessions=workload.at_rate()))
    itl_s = observe(run).round_itl_s["mean"]
    known = itl_s[~np.isnan(itl_s)]
    decode_s = np.array(run.rounds["finished_s"]) - np.array(run.rounds["first_token_s"])
    return PhaseLatency(
        seconds=float(np.percentile(decode_s, 95)),
        of_slo=float(np.percentile(known, 95)) / workload.slo.itl_s if len(known) else 0.0,
    )


def _parts(worker_id: int, degree: int, cost: StepCost) -> Parts:
    return Parts(worker_id=worker_id, degree=degree, cost=cost, queue=PrefillQueue(), batching=ONE_BY_ONE)


@dataclass(frozen=True)
class ModelCost:
    """The performance model as the cost of a worker; without one nothing takes time."""

    model: PerformanceModel | None
    degree: int

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        model = self.model
        return 0.0 if model is None else fsum(model.prefill_s(*chunk, self.degree) for chunk in chunks)

    def decode_line(self, decoding: int) -> DecodeLine:
        return DecodeLine(0.0 if self.model is None else self.model.decode_s(decoding, self.degree), 0.0, 0.0)


def _thinned(replicas: range) -> list[int]:
    """About two k an octave, the ends among them."""
    steps = range(int(np.log2(replicas[-1]) * _CACHED_PER_OCTAVE) + 1)
    return sorted({*(round(2 ** (step / _CACHED_PER_OCTAVE)) for step in steps), replicas[-1]})


def _between(points: dict[int, PhaseLatency], k: int) -> PhaseLatency:
    known = sorted(points)

    def interpolated(values: Iterable[float]) -> float:
        logs = np.log([max(value, 1e-12) for value in values])
        return float(np.exp(np.interp(np.log(k), np.log(known), logs)))

    return PhaseLatency(
        seconds=interpolated(points[each].seconds for each in known),
        of_slo=interpolated(points[each].of_slo for each in known),
    )
