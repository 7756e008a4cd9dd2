"""AMPD and the systems it is compared with, on the simulated cluster."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from baselines.ar.dynamo import DynamoConfig, dynamo
from baselines.ar.vllm import ContinuumConfig, VllmConfig, continuum, vllm
from engines.ampd.policies import RoutingConfig
from engines.ampd.system import AmpdConfig, ampd
from engines.ar.cluster.cluster import Cluster
from engines.ar.deployment import Deployment
from engines.errors import UserError, require
from engines.knobs import given_to, knobs_of
from engines.named import load_named
from engines.policies.routing import Router
from repro.runs.cell import Cell, Scalar
from repro.runs.free import Free
from repro.runs.system import SYSTEMS
from repro.runs.tuning import CANDIDATES
from repro.systems.ar.plans import PLANNER, SEARCH, replicated, splits
from repro.systems.ar.settings import Ground, resolve
from repro.systems.ar.system import ArSystem

_NEEDED = "name a class, or a function, that called with model, slo and seed gives an object with route(task, home, prefills, now)"


def router_maker(ground: Ground, where: str) -> Callable[[int], Router]:
    """What makes a run's router from its seed. One is made here: what is none is refused before any run."""
    make = load_named("router", where)
    require(callable(make), f"router={where!r} cannot be called: {_NEEDED}")

    def made(seed: int) -> Router:
        # Its own copies: what is shared decides other systems' runs, and the verdict on its own.
        router: Router = make(model=deepcopy(ground.performance), slo=deepcopy(ground.slo), seed=seed)
        return router

    try:
        found = made(0)
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        said = " ".join(str(error).split())
        raise UserError(f"router={where!r} fails when called ({type(error).__name__}: {said}): {_NEEDED}") from error
    require(
        _takes(getattr(found, "route", None), 4),
        f"router={where!r} makes {type(found).__name__}, which has no route() of four arguments: {_NEEDED}",
    )
    return made


def _takes(call: object, num: int) -> bool:
    """Whether it can be called with so many arguments; True where Python does not know."""
    if not callable(call):
        return False
    try:
        inspect.signature(call).bind(*range(num))
    except TypeError:
        return False
    except ValueError:
        return True
    return True


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
class AmpdKnobs(AmpdConfig):
    router: str | None = None
    """A router of one's own as module:NAME, called as NAME(model=..., slo=..., seed=...) for every run."""


def build_ampd(ground: Ground, deployment: Deployment, options: Mapping[str, Any]) -> Cluster:
    config = given_to(AmpdKnobs(), options)
    cluster = ampd(ground.hardware, deployment, ground.slo, ground.performance, config)
    # Policies are made for each run; making them once here shows wrong options before any.
    if config.router is None:
        cluster.policies.make_router(0)
    else:
        for name in (*knobs_of(RoutingConfig), "adaptive_routing", "dispatch"):
            require(
                name not in options,
                f"{name}={options.get(name)!r} has no effect with router={config.router!r}: keep one",
            )
        policies = replace(cluster.policies, make_router=router_maker(ground, config.router))
        cluster = replace(cluster, policies=policies)
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
