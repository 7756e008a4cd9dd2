"""AMPD and the systems it is compared with, on the simulated cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from baselines.ar.dynamo import DynamoConfig, dynamo
from baselines.ar.vllm import ContinuumConfig, VllmConfig, continuum, vllm
from engines.ampd.system import AmpdConfig, ampd
from engines.ar.cluster.cluster import Cluster
from engines.ar.deployment import Deployment
from engines.knobs import given_to
from repro.runs.cell import Cell, Scalar
from repro.runs.free import Free
from repro.runs.system import SYSTEMS
from repro.runs.tuning import CANDIDATES
from repro.systems.ar.own import POLICIES, OwnPolicies, own_policies
from repro.systems.ar.plans import PLANNER, SEARCH, replicated, splits
from repro.systems.ar.settings import Ground, resolve
from repro.systems.ar.system import ArSystem


def _ground(cell: Cell) -> Ground:
    system = SYSTEMS.get(cell.system)
    assert isinstance(system, ArSystem)
    return resolve(cell, system.name, system.own).ground


def _splits(cell: Cell) -> tuple[Mapping[str, Scalar], ...]:
    """the 16 splits of all GPUs with the least worst phase by closed forms, the even one among them"""
    return tuple({"deployment": str(each)} for each in splits(_ground(cell), CANDIDATES))


def _replicated(cell: Cell) -> tuple[Mapping[str, Scalar], ...]:
    """replicas of every degree that holds the longest session"""
    return tuple({"deployment": str(each)} for each in replicated(_ground(cell)))


_TUNED = "§7.1 tunes the deployments of all and reports the best"
_SPLITS = Free("deployment", (), _TUNED, _splits, has_default=False)
_DYNAMO = (
    _SPLITS,
    Free(
        "which prefill worker",
        ({"dispatch": "round-robin"}, {"dispatch": "shared"}),
        "no setting of a baseline is printed. The shortest queue by default",
    ),
)
_CO_LOCATED = (
    Free("deployment", (), _TUNED, _replicated, has_default=False),
    Free("steps", ({"scheduling": "chunked"},), "no setting of a baseline is printed. Whole prefills first by default"),
    Free(
        "where sessions go",
        ({"balance": "sessions"}, {"balance": "round-robin"}),
        "no setting of a baseline is printed. To the worker with most memory by default",
    ),
)


@dataclass(frozen=True, kw_only=True)
class AmpdKnobs(AmpdConfig, OwnPolicies):
    pass


def build_ampd(ground: Ground, deployment: Deployment, options: Mapping[str, Any]) -> Cluster:
    config, own = given_to(AmpdKnobs(), options), own_policies(options)
    cluster = ampd(ground.hardware, deployment, ground.slo, ground.performance, config)
    told = {"model": ground.performance, "slo": ground.slo}
    changes: dict[str, Any] = {}
    for each in own.values():
        # Policies are made for each run; making them once here shows wrong ones before any.
        each.checked(**{name: told.get(name, 0) for name in each.kind.offered})
    if (router := own.get("router")) is not None:
        changes["make_router"] = lambda seed: router.made(**told, seed=seed)
    if (binder := own.get("binder")) is not None:
        changes["make_binder"] = partial(binder.made, **told)
    if (queue := own.get("queue")) is not None:
        changes["make_prefill_queue"] = changes["make_local_queue"] = partial(queue.made, slo=ground.slo)
    cluster = replace(cluster, policies=replace(cluster.policies, **changes))
    if router is None:
        cluster.policies.make_router(0)
    cluster.policies.make_prefill_queue()
    return cluster


def build_dynamo(ground: Ground, deployment: Deployment, options: Mapping[str, Any]) -> Cluster:
    config = given_to(DynamoConfig(), options)
    cluster = dynamo(ground.hardware, deployment, ground.performance, config)
    cluster.policies.make_router(0)
    return cluster


def build_vllm(ground: Ground, deployment: Deployment, options: Mapping[str, Any]) -> Cluster:
    return vllm(ground.hardware, deployment, given_to(VllmConfig(), options))


def build_continuum(ground: Ground, deployment: Deployment, options: Mapping[str, Any]) -> Cluster:
    return continuum(ground.hardware, deployment, given_to(ContinuumConfig(), options))


AMPD = ArSystem(
    name="ampd",
    title="AMPD",
    own=AmpdKnobs,
    build=build_ampd,
    is_disaggregated=True,
    deployment=PLANNER,
    free=(_SPLITS,),
    policies=POLICIES,
)
DYNAMO_SIM = ArSystem(
    name="dynamo-sim",
    title="Dynamo",
    own=DynamoConfig,
    build=build_dynamo,
    is_disaggregated=True,
    deployment=SEARCH,
    free=_DYNAMO,
)
VLLM_SIM = ArSystem(
    name="vllm-sim",
    title="vLLM",
    own=VllmConfig,
    build=build_vllm,
    is_disaggregated=False,
    deployment=SEARCH,
    free=_CO_LOCATED,
)
CONTINUUM_SIM = ArSystem(
    name="continuum-sim",
    title="vLLM-Continuum",
    own=ContinuumConfig,
    build=build_continuum,
    is_disaggregated=False,
    deployment=SEARCH,
    free=_CO_LOCATED,
)
