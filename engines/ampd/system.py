"""AMPD as a system: its policies on a deployment, each technique with its switch (AMPD §4, Figure 5)."""

from __future__ import annotations

from dataclasses import dataclass

from engines.ampd.performance import PerformanceModel
from engines.ampd.reordering import ReorderingQueue
from engines.ampd.routing import AdaptiveRouter, RouteOrder, RoutingConfig, WindowSignal
from engines.ar.cluster.cluster import Cluster, Hardware, Policies
from engines.ar.cluster.dispatch import Dispatch, RemoteOnly
from engines.ar.cluster.queue import PrefillQueue
from engines.ar.deployment import Deployment
from engines.ar.slo import Slo
from engines.ar.window import WINDOW_S
from engines.errors import require


@dataclass(frozen=True, kw_only=True)
class AmpdConfig:
    """Defaults are the paper's (§7.1)."""

    alpha: float = 0.9
    beta: float = 0.85
    w: int = 3
    window_s: float = WINDOW_S
    adaptive_routing: bool = True
    """AR; without it every prefill is remote."""
    prefill_reordering: bool = True
    """PR; without it queues are first come, first served."""
    route_order: RouteOrder = "random"
    window: WindowSignal = "done"
    dispatch: Dispatch = "shortest"
    """Which prefill worker, where routing is not adaptive."""


def ampd(
    hardware: Hardware, deployment: Deployment, slo: Slo, model: PerformanceModel, config: AmpdConfig | None = None
) -> Cluster:
    config = config or AmpdConfig()
    require(bool(deployment.prefill), f"deployment={deployment}: AMPD needs prefill workers, give a disaggregated one")
    routing = RoutingConfig(
        slo=slo, alpha=config.alpha, beta=config.beta, route_order=config.route_order, window=config.window
    )

    def queue() -> PrefillQueue:
        return ReorderingQueue(ttft_s=slo.ttft_s, w=config.w) if config.prefill_reordering else PrefillQueue()

    return Cluster(
        name="ampd",
        hardware=hardware,
        deployment=deployment,
        policies=Policies(
            make_router=lambda seed: (
                AdaptiveRouter(model, routing, seed=seed)
                if config.adaptive_routing
                else RemoteOnly(config.dispatch, seed=seed)
            ),
            make_prefill_queue=queue,
            make_local_queue=queue,
            estimator=model,
            window_s=config.window_s,
        ),
    )
