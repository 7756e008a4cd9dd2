"""The best deployment of a system for a trace, a model, a rate and a number of GPUs.

The paper tunes every baseline's deployment and reports the best (AMPD §7.1). Candidates are simulated on samples of
the workload, and a third of them goes on to the next sample. Use other seeds than the comparison's: the best of many on the
very runs that are reported would be luck as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.ampd.performance import PerformanceModel
from engines.ampd.planner.coefficients import PlanningWorkload, coefficients
from engines.ampd.planner.planner import PlannerConfig, solve
from engines.ar.cluster.cluster import NEVER, Cluster, StopRule
from engines.ar.deployment import Deployment
from engines.ar.hardware import Hardware
from engines.ar.metrics import Reading, attainment, observe
from engines.ar.session import Arrivals
from engines.errors import require
from engines.policies.task import Slo

_SHORTLIST = 12


@dataclass(frozen=True, kw_only=True)
class Candidate:
    cluster: Cluster
    attainment: float
    """Mean over the samples it was tried on."""
    e2el_s: float
    """Mean over the same; decides between equals."""
    num_samples: int


def search(
    clusters: Sequence[Cluster],
    samples: Sequence[Arrivals],
    slo: Slo,
    reading: Reading,
    *,
    seed: int = 0,
    stop: StopRule = NEVER,
) -> tuple[Candidate, ...]:
    """All candidates, best first: those that were tried on more samples before the others. It ends where all that would go on
    have met every objective so far: the next sample says nothing that the latency does not."""
    require(bool(clusters), "no candidate deployments: allow another degree or more GPUs")
    require(bool(samples), "no samples: give at least one workload to try the candidates on")
    scores: dict[int, list[tuple[float, float]]] = {index: [] for index in range(len(clusters))}
    alive = list(scores)
    for turn, sample in enumerate(samples):
        for index in alive:
            observed = observe(clusters[index].simulate(sample, seed=seed + turn, stop=stop))
            # What never ended has no latency: count it as infinitely late.
            e2el_s = float(observed.e2el_s.mean()) if observed.session_done.all() else float("inf")
            scores[index].append((attainment(observed, slo, reading), e2el_s))
        alive.sort(key=lambda index: _rank(scores[index]))
        if turn + 1 < len(samples):
            alive = alive[: -(-len(alive) // 3)]
            if all(share == 1.0 for index in alive for share, _ in scores[index]):
                break
    order = sorted(scores, key=lambda index: (-len(scores[index]), _rank(scores[index])))
    return tuple(
        Candidate(
            cluster=clusters[index],
            attainment=-_rank(scores[index])[0],
            e2el_s=_rank(scores[index])[1],
            num_samples=len(scores[index]),
        )
        for index in order
    )


def _rank(scores: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return -sum(share for share, _ in scores) / len(scores), sum(late for _, late in scores) / len(scores)


def disaggregated_shortlist(
    hardware: Hardware, model: PerformanceModel, workload: PlanningWorkload, num_gpus: int, *, size: int = _SHORTLIST
) -> tuple[Deployment, ...]:
    """The deployments with the least worst phase by closed forms: what is worth simulating."""
    longest = max(session.context_tokens for session in workload.sessions)
    degrees = hardware.degrees(min_kv_tokens=longest)
    table = coefficients(model, workload, degrees, num_gpus, "closed")
    found = solve(table, num_gpus, top=size, config=PlannerConfig(solver="enumeration"))
    return tuple(each.deployment for each in found)
