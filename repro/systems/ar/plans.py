"""Which deployment a system runs on: as written, AMPD's plan, or the best of a search on other samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baselines.ar.search import disaggregated_shortlist, search
from engines.ampd.planner.coefficients import PlanningWorkload
from engines.ampd.planner.planner import Plan, plan
from engines.ar.cluster.cluster import Cluster
from engines.ar.deployment import Deployment, Pool, replications
from engines.ar.session import OpenLoop
from engines.errors import UserError, require
from repro.files import kept
from repro.systems.ar.settings import OTHER_SEED, Ground
from repro.systems.simulated import Options

PLANNER, SEARCH = "planner", "search"
_NUM_SAMPLES = 3
SEARCHED = 24
"""What the search of any system simulates at most: deployments times its free knobs. Who has fewer of these tries more
deployments, the likeliest by closed forms; where fewer exist, all."""

Build = Callable[["Ground", Deployment, Mapping[str, Any]], Cluster]
_POOLS = re.compile(r"TP[1-9]\d*x[1-9]\d*(?:\+TP[1-9]\d*x[1-9]\d*)*")


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A system on its deployment, and how that was chosen."""

    cluster: Cluster
    chosen: str
    options: Options = ()
    """What a search chose besides the deployment."""


def parse_deployment(text: str) -> Deployment:
    """``P:TP4x2 D:TP8x1``, or ``TP8x2`` for co-located workers; pools of one phase are joined by +."""
    words = text.split()
    pools: dict[str, tuple[Pool, ...]] = {}
    for word in words:
        phase, colon, rest = word.rpartition(":")
        if not _POOLS.fullmatch(rest) or (phase not in ("P", "D") if colon else len(words) > 1) or phase in pools:
            raise UserError(
                f"deployment={text!r} is none: write P:TP4x2 D:TP8x1 (degree x replicas) or TP8x2, {PLANNER} or {SEARCH}"
            )
        pools[phase] = tuple(
            Pool(degree=int(degree), replicas=int(replicas)) for degree, replicas in re.findall(r"TP(\d+)x(\d+)", rest)
        )
    if not pools or ("" not in pools and "D" not in pools):
        raise UserError(f"deployment={text!r} has no workers that decode: write P:TP4x2 D:TP8x1 or TP8x2")
    return Deployment(decode=pools.get("D") or pools[""], prefill=pools.get("P", ()))


@kept(maxsize=256)
def planned(ground: Ground, rate: float, top: int = 1) -> tuple[Plan, ...]:
    """AMPD's planner for sessions at ``rate`` (AMPD §5), best first."""
    degrees = ground.hardware.degrees(min_kv_tokens=ground.sampled().longest_tokens)
    workload = PlanningWorkload(sessions=ground.sampled(rate=rate).sessions, rate=rate, slo=ground.slo)
    found = plan(ground.performance, workload, degrees, ground.num_gpus, top=top)
    require(
        bool(found),
        f"num_gpus={ground.num_gpus}: no split of them into prefill and decode workers of {ground.hardware.shape.name} uses them all, "
        "give an even number",
    )
    return found


@kept(maxsize=2048)
def searched(ground: Ground, build: Build, is_disaggregated: bool, tried: tuple[Options, ...]) -> Placed:
    """The best by simulating ``_NUM_SAMPLES`` other samples, a third of the candidates kept after each."""
    samples = [OpenLoop(sessions=ground.sampled(1 + turn).sessions) for turn in range(_NUM_SAMPLES)]
    deployments = candidates(ground, is_disaggregated, SEARCHED // len(tried))
    choices = [(deployment, options) for deployment in deployments for options in tried]
    clusters = [build(ground, deployment, dict(options)) for deployment, options in choices]
    best = search(clusters, samples, ground.slo, ground.reading, seed=OTHER_SEED)[0]
    place = next(index for index, cluster in enumerate(clusters) if cluster is best.cluster)
    return Placed(
        cluster=best.cluster,
        chosen=f"best of {len(clusters)} on {_NUM_SAMPLES} other samples of this workload",
        options=choices[place][1],
    )


def candidates(ground: Ground, is_disaggregated: bool, most: int) -> tuple[Deployment, ...]:
    """``most`` of them, the even split among these; replicas of every degree where there are no phases to split."""
    longest = ground.sampled().longest_tokens
    hardware = ground.hardware
    if not is_disaggregated:
        found = tuple(replications(ground.num_gpus, hardware.degrees(min_kv_tokens=longest)))
        require(
            bool(found),
            f"num_gpus={ground.num_gpus} cannot be divided into workers that hold {ground.hardware.shape.name}: use a multiple of "
            f"{min(hardware.degrees(min_kv_tokens=longest))}",
        )
        return found
    rate = ground.workload.arrivals.rate or 1e3
    workload = PlanningWorkload(sessions=ground.sampled(rate=rate).sessions, rate=rate, slo=ground.slo)
    likely = disaggregated_shortlist(hardware, ground.performance, workload, ground.num_gpus, size=most)
    even = even_split(ground.num_gpus, hardware.degrees(min_kv_tokens=longest))
    return likely if even is None or even in likely else (*likely[: most - 1], even)


def even_split(num_gpus: int, degrees: tuple[int, ...]) -> Deployment | None:
    """Half of the GPUs for each phase in the largest workers that fit: what Table 2 lists for ten of twelve pairs."""
    half = num_gpus // 2
    fitting = [degree for degree in degrees if half and half % degree == 0]
    if num_gpus % 2 or not fitting:
        return None
    degree = max(fitting)
    return Deployment.disaggregated(degree, half // degree, degree, half // degree)
