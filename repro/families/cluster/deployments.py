"""The deployments that a system may run on: one as written, AMPD's plan, or the candidates of a search (repro.runs.tuning)."""

import re

from engines.ampd.planner import Plan, PlanningWorkload, coefficients, plan, solve
from engines.cluster.hardware import Deployment, Pool, replications
from engines.errors import UserError, require
from repro.families.cluster.ampd_settings import Ground
from repro.files import file_cache

PLANNER, SEARCH = "planner", "search"
_POOLS = re.compile(r"TP[1-9]\d*x[1-9]\d*(?:\+TP[1-9]\d*x[1-9]\d*)*")


def parse_deployment(text: str) -> Deployment:
    """Parse ``P:TP4x2 D:TP8x1``, or ``TP8x2`` for co-located workers. A + joins pools of one phase."""
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


@file_cache(maxsize=256)
def best_plans(ground: Ground, rate: float, top: int = 1) -> tuple[Plan, ...]:
    """The ``top`` plans of AMPD's planner for sessions at ``rate`` (AMPD §5), best first."""
    degrees = ground.hardware.degrees(min_kv_tokens=ground.sampled().longest_tokens)
    workload = PlanningWorkload(sessions=ground.sampled(rate=rate).sessions, rate=rate, slo=ground.slo)
    return _require_plans(plan(ground.performance, workload, degrees, ground.num_gpus, top=top), ground)


def _require_plans(plans: tuple[Plan, ...], ground: Ground) -> tuple[Plan, ...]:
    require(
        bool(plans),
        f"num_gpus={ground.num_gpus}: no split of them into prefill and decode workers of {ground.hardware.shape.name} uses them all, "
        "give an even number",
    )
    return plans


@file_cache(maxsize=256)
def splits(ground: Ground, limit: int) -> tuple[Deployment, ...]:
    """The ``limit`` prefill/decode splits whose worse phase is least by closed forms, always including the even split if there is one."""
    rate = ground.workload.arrivals.rate or 1e3
    workload = PlanningWorkload(sessions=ground.sampled(rate=rate).sessions, rate=rate, slo=ground.slo)
    degrees = ground.hardware.degrees(min_kv_tokens=ground.sampled().longest_tokens)
    table = coefficients(ground.performance, workload, degrees, ground.num_gpus, "closed")
    plans = _require_plans(solve(table, ground.num_gpus, top=limit), ground)
    likely = tuple(plan.deployment for plan in plans)
    even = even_split(ground.num_gpus, degrees)
    return likely if even is None or even in likely else (*likely[: limit - 1], even)


def replicated(ground: Ground) -> tuple[Deployment, ...]:
    """One deployment of co-located workers for each degree that holds the longest session."""
    degrees = ground.hardware.degrees(min_kv_tokens=ground.sampled().longest_tokens)
    deployments = tuple(replications(ground.num_gpus, degrees))
    require(
        bool(deployments),
        f"num_gpus={ground.num_gpus} cannot be divided into workers that hold {ground.hardware.shape.name}: use a multiple of "
        f"{min(degrees)}",
    )
    return deployments


def even_split(num_gpus: int, degrees: tuple[int, ...]) -> Deployment | None:
    """Half of the GPUs for each phase, in the largest workers that fit. Table 2 lists this split for ten of twelve pairs."""
    half = num_gpus // 2
    fitting = [degree for degree in degrees if half and half % degree == 0]
    if num_gpus % 2 or not fitting:
        return None
    degree = max(fitting)
    return Deployment.disaggregated(degree, half // degree, degree, half // degree)
