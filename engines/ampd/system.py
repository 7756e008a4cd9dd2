"""AMPD as a serving system: its policies on a deployment, with a switch for each technique (AMPD §4, Figure 5)."""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

from engines.ampd.performance import PerformanceModel
from engines.ampd.policies import MAX_LOOKAHEAD, AdaptiveRouter, ReorderingQueue, RoutingConfig
from engines.cluster.hardware import Deployment, Hardware
from engines.cluster.simulation import Cluster, Policies
from engines.cluster.worker import WINDOW_S
from engines.errors import require
from engines.knobs import Checked, Only, Range
from engines.policies.batching import LateShare, OnTimeQueue
from engines.policies.routing import Dispatch, RemoteOnly, Router
from engines.policies.views import PrefillQueue, Slo

QueueOrder = Literal["window", "on-time"]


@dataclass(frozen=True, kw_only=True)
class AmpdConfig(Checked):
    """The knobs of AMPD. The defaults are the paper's (§7.1)."""

    adaptive_routing: bool = True
    """Adaptive routing (AR). Without it every prefill is remote."""
    routing: Annotated[RoutingConfig, Only(adaptive_routing=True)] = field(default_factory=RoutingConfig)
    dispatch: Annotated[Dispatch, Only(adaptive_routing=False)] = "shortest"
    """Which prefill worker gets a prefill, if routing is not adaptive."""
    prefill_reordering: bool = True
    """Prefill reordering (PR). Without it queues are first come, first served."""
    queue_order: Annotated[QueueOrder, Only(prefill_reordering=True)] = "window"
    """How queues are reordered. window: the best of all orders of the first w, as printed. on-time (ours): by due time. If not all
    can be on time, the fewest are given up, and get a share of the work."""
    w: Annotated[int, Range(1, MAX_LOOKAHEAD), Only(prefill_reordering=True, queue_order="window")] = 3
    """How many waiting prefills are reordered at once (§4.2)."""
    late: Annotated[LateShare, Only(prefill_reordering=True, queue_order="on-time")] = field(default_factory=LateShare)
    window_s: Annotated[float, Range(above=0, most=1e6)] = WINDOW_S
    """Length of the windows over which the statistics of workers are means."""

    def make_router(self, slo: Slo, model: PerformanceModel, *, seed: int) -> Router:
        if self.adaptive_routing:
            return AdaptiveRouter(model, slo, self.routing, seed=seed)
        return RemoteOnly(self.dispatch, seed=seed)

    def make_queue(self, slo: Slo) -> PrefillQueue:
        if not self.prefill_reordering:
            return PrefillQueue()
        if self.queue_order == "on-time":
            return OnTimeQueue(ttft_s=slo.ttft_s, late=self.late)
        return ReorderingQueue(ttft_s=slo.ttft_s, w=self.w)


def ampd(
    hardware: Hardware, deployment: Deployment, slo: Slo, model: PerformanceModel, config: AmpdConfig | None = None
) -> Cluster:
    config = config or AmpdConfig()
    require(bool(deployment.prefill), f"deployment={deployment}: AMPD needs prefill workers, give a disaggregated one")
    return Cluster(
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
