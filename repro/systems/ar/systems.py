"""AMPD and the systems it is compared with, on the simulated cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baselines.ar.dynamo import ConditionalConfig, dynamo
from baselines.ar.vllm import continuum, vllm
from engines.ampd.system import AmpdConfig, ampd
from engines.ar.cluster.cluster import Cluster
from engines.ar.deployment import Deployment
from engines.errors import require
from repro.systems.ar import knobs
from repro.systems.ar.plans import PLANNER, SEARCH, Ground
from repro.systems.ar.plugged import router_maker
from repro.systems.ar.system import ArSystem

_SCHEDULINGS = ((("scheduling", "prefill-first"),), (("scheduling", "chunked"),))


def build_ampd(ground: Ground, deployment: Deployment, options: Mapping[str, Any]) -> Cluster:
    given = dict(options)
    router = given.pop("router", None)
    config = AmpdConfig(**given)
    for name in ("alpha", "beta", "route_order", "window", "adaptive_routing", "dispatch"):
        require(
            router is None or name not in given,
            f"{name}={given.get(name)!r} has no effect with router={router!r}: keep one",
        )
    for name in ("alpha", "beta", "route_order", "window"):
        require(
            config.adaptive_routing or name not in options,
            f"{name}={options.get(name)!r} has no effect with adaptive_routing=false: leave it out",
        )
    require(
        not config.adaptive_routing or "dispatch" not in options,
        f"dispatch={config.dispatch!r} has no effect with adaptive routing: add adaptive_routing=false, or leave it out",
    )
    require(
        config.prefill_reordering or "w" not in options,
        f"w={config.w} has no effect with prefill_reordering=false: leave it out",
    )
    require(config.window_s > 0, f"window_s={config.window_s} must be above 0 s")
    cluster = ampd(ground.hardware, deployment, ground.slo, ground.performance, config)
    # Policies are made for each run; making them once here shows wrong options before any.
    if router is None:
        cluster.policies.make_router(0)
    else:
        policies = replace(cluster.policies, make_router=router_maker(ground, router))
        cluster = replace(cluster, policies=policies)
    cluster.policies.make_prefill_queue()
    return cluster


def build_dynamo(ground: Ground, deployment: Deployment, options: Mapping[str, Any]) -> Cluster:
    given = dict(options)
    dispatch, policy = given.pop("dispatch", "shortest"), given.pop("conditional", None)
    for name, value in given.items():
        require(
            policy is not None, f"{name}={value!r} has no effect without conditional: give its policy, or leave it out"
        )
    conditional = None if policy is None else ConditionalConfig(policy=policy, **given)
    cluster = dynamo(ground.hardware, deployment, ground.performance, dispatch=dispatch, conditional=conditional)
    cluster.policies.make_router(0)
    return cluster


def build_vllm(ground: Ground, deployment: Deployment, options: Mapping[str, Any]) -> Cluster:
    return vllm(ground.hardware, deployment, **options)


def build_continuum(ground: Ground, deployment: Deployment, options: Mapping[str, Any]) -> Cluster:
    return continuum(ground.hardware, deployment, **options)


AMPD = ArSystem(
    name="ampd",
    title="AMPD",
    summary="disaggregation with adaptive routing, prefill reordering and a planner, simulated",
    own=knobs.AMPD,
    build=build_ampd,
    is_disaggregated=True,
    deployment=PLANNER,
)
DYNAMO_SIM = ArSystem(
    name="dynamo-sim",
    title="Dynamo",
    summary="disaggregation, prefills always remote or by Dynamo's conditional rule, simulated",
    own=knobs.DYNAMO,
    build=build_dynamo,
    is_disaggregated=True,
    deployment=SEARCH,
)
VLLM_SIM = ArSystem(
    name="vllm-sim",
    title="vLLM",
    summary="co-located prefill and decode with a prefix cache, simulated",
    own=knobs.VLLM,
    build=build_vllm,
    is_disaggregated=False,
    deployment=SEARCH,
    tried=_SCHEDULINGS,
)
CONTINUUM_SIM = ArSystem(
    name="continuum-sim",
    title="vLLM-Continuum",
    summary="vLLM with sessions in flight first and their K/V kept between rounds, simulated",
    own=knobs.CONTINUUM,
    build=build_continuum,
    is_disaggregated=False,
    deployment=SEARCH,
    tried=_SCHEDULINGS,
)
