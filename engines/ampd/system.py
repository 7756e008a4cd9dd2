"""AMPD as a system: its policies on a deployment, each technique with its switch (AMPD §4, Figure 5)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from engines.ampd.performance import PerformanceModel
from engines.ampd.policies import MAX_LOOKAHEAD, AdaptiveRouter, ReorderingQueue, RoutingConfig
from engines.ar.cluster.cluster import Cluster, Policies
from engines.ar.deployment import Deployment
from engines.ar.hardware import Hardware
from engines.ar.window import WINDOW_S
from engines.errors import require
from engines.knobs import Checked, Only, Range
from engines.policies.routing import Dispatch, RemoteOnly, Router
from engines.policies.task import PrefillQueue, Slo


@dataclass(frozen=True, kw_only=True)
class AmpdConfig(Checked):
    """Defaults are the paper's (§7.1)."""

    adaptive_routing: bool = True
    """AR; without it every prefill is remote."""
    routing: Annotated[RoutingConfig, Only(adaptive_routing=True)] = field(default_factory=RoutingConfig)
    dispatch: Annotated[Dispatch, Only(adaptive_routing=False)] = "shortest"
    """Which prefill worker, where routing is not adaptive."""
    prefill_reordering: bool = True
    """PR; without it queues are first come, first served."""
    w: Annotated[int, Range(1, MAX_LOOKAHEAD), Only(prefill_reordering=True)] = 3
    """How many waiting prefills are reordered at once (§4.2)."""
    window_s: Annotated[float, Range(above=0, most=1e6)] = WINDOW_S
    """Length of the windows that statistics of workers are means of."""

    def make_router(self, slo: Slo, model: PerformanceModel, *, seed: int) -> Router:
        if self.adaptive_routing:
            return AdaptiveRouter(model, slo, self.routing, seed=seed)
        return RemoteOnly(self.dispatch, seed=seed)

    def make_queue(self, slo: Slo) -> PrefillQueue:
        return ReorderingQueue(ttft_s=slo.ttft_s, w=self.w) if self.prefill_reordering else PrefillQueue()


def ampd(
    hardware: Hardware, deployment: Deployment, slo: Slo, model: PerformanceModel, config: AmpdConfig | None = None
) -> Cluster:
    config = config or AmpdConfig()
    require(bool(deployment.prefill), f"deployment={deployment}: AMPD needs prefill workers, give a disaggregated one")
    return Cluster(
        name="ampd",
        hardware=hardware,
        deployment=deployment,
        policies=Policies(
            make_router=lambda seed: config.make_router(slo, model, seed=seed),
            make_prefill_queue=partial(config.make_queue, slo),
            make_local_queue=partial(config.make_queue, slo),
            estimator=model,
            window_s=config.window_s,
        ),
    )
