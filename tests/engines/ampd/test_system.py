"""AMPD on a small cluster: that its parts are connected, and its switches do what they say."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from support.clusters import hardware, profiled, session
from support.refusals import refuses

from engines.ampd.performance import PerformanceModel
from engines.ampd.policies import RoutingConfig
from engines.ampd.system import AmpdConfig, ampd
from engines.cluster.hardware import Deployment
from engines.cluster.record import ClusterRun
from engines.cluster.sessions import OpenLoop
from engines.errors import UserError
from engines.knobs import given_to
from engines.policies.views import Slo

PLATFORM = hardware()
MODEL = profiled(num_gpus=8)
SLO = Slo(ttft_s=1.0, itl_s=0.05)
PLAN = Deployment.disaggregated(2, 2, 4, 1)


def run(config: AmpdConfig, rate: float = 4.0, seed: int = 1, slo: Slo = SLO) -> ClusterRun:
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1 / rate, 60)).tolist()
    sessions = [
        session(index, time, *((int(tokens), 20) for tokens in rng.integers(100, 1500, 3)))
        for index, time in enumerate(times)
    ]
    return ampd(PLATFORM, PLAN, slo, MODEL, config).simulate(OpenLoop(sessions=sessions), seed=seed)


@pytest.mark.parametrize(("degree", "link"), [(4, "intra-server"), (8, "inter-server")])
def test_kv_takes_the_link_between_the_servers_of_its_workers(degree, link):
    plan, config = Deployment.disaggregated(degree, 1, degree, 1), AmpdConfig(adaptive_routing=False)
    found = ampd(PLATFORM, plan, SLO, MODEL, config).simulate(OpenLoop(sessions=[session(0, 0.0, (100, 5))]))
    assert found.transfers["link"] == [link]


def test_overload_uses_every_branch_of_algorithm_1():
    reasons = Counter(run(AmpdConfig()).tasks["reason"])
    assert set(reasons) == {"ttft-slack", "itl-slack", "cost"}


def test_without_load_every_prefill_is_remote():
    assert set(run(AmpdConfig(), rate=0.05, slo=Slo(ttft_s=9.0, itl_s=0.05)).tasks["reason"]) == {"ttft-slack"}


def test_without_adaptive_routing_every_prefill_is_remote():
    found = run(AmpdConfig(adaptive_routing=False))
    assert set(found.tasks["reason"]) == {"always-remote"}
    assert not any(found.tasks["is_local"])


def test_reordering_changes_the_order_and_only_its_switch_does():
    assert max(run(AmpdConfig()).tasks["postponed"]) > 0
    assert max(run(AmpdConfig(prefill_reordering=False)).tasks["postponed"]) == 0
    fifo = run(AmpdConfig(prefill_reordering=False, adaptive_routing=False, dispatch="round-robin"))
    for worker in set(fifo.tasks["worker_id"]):
        mine = [index for index, owner in enumerate(fifo.tasks["worker_id"]) if owner == worker]
        started = [fifo.tasks["started_s"][index] for index in mine]
        assert started == sorted(started)


def test_w_of_one_is_first_come_first_served():
    assert run(AmpdConfig(w=1)).tasks["started_s"] == run(AmpdConfig(prefill_reordering=False)).tasks["started_s"]


@pytest.mark.parametrize(
    "change",
    [{"alpha": 0.3}, {"beta": 0.1}, {"w": 5}, {"window_s": 1.0}, {"route_order": "load"}, {"window": "backlog"}],
)
def test_every_knob_has_an_effect(change):
    assert run(given_to(AmpdConfig(), change)).tasks["started_s"] != run(AmpdConfig()).tasks["started_s"]


def test_order_by_load_does_not_depend_on_the_seed():
    by_load = AmpdConfig(routing=RoutingConfig(route_order="load"))
    assert run(by_load, seed=1).tasks == run(by_load, seed=2).tasks


def test_estimates_are_the_models_and_not_the_truth():
    found = run(AmpdConfig())
    for history, tokens, is_local, estimate in zip(
        *(found.tasks[name] for name in ("history", "tokens", "is_local", "estimate_s")), strict=True
    ):
        assert estimate == MODEL.prefill_s(history, tokens, 4 if is_local else 2)


def test_colocated_deployment_is_refused():
    with pytest.raises(UserError, match="needs prefill workers"):
        ampd(PLATFORM, Deployment.colocated(4, 2), SLO, MODEL)


def test_policies_believe_the_model_whatever_the_truth():
    """A model that takes decode workers for the slower ones keeps fewer prefills there when costs decide."""
    slow = replace(MODEL, prefill={**MODEL.prefill, 4: MODEL.prefill[2], 2: MODEL.prefill[4]})
    sessions = [session(index, 0.2 * index, (900, 20), (900, 20)) for index in range(60)]

    def kept(model: PerformanceModel) -> int:
        found = ampd(PLATFORM, PLAN, replace(SLO, itl_s=0.001), model).simulate(OpenLoop(sessions=sessions))
        return sum(found.tasks["is_local"])

    assert kept(slow) < kept(MODEL)


def test_more_rounds_are_on_time_with_the_on_time_queue():
    """With AMPD's router, and with the shortest queue."""
    for routing in (True, False):
        printed = run(AmpdConfig(adaptive_routing=routing), rate=6.0)
        ours = run(AmpdConfig(adaptive_routing=routing, queue_order="on-time"), rate=6.0)
        waits = [np.array(each.rounds["first_token_s"]) - each.rounds["ready_s"] for each in (printed, ours)]
        assert (waits[1] <= SLO.ttft_s).mean() > (waits[0] <= SLO.ttft_s).mean()
    with refuses("w=3"):
        given_to(AmpdConfig(), {"queue_order": "on-time", "w": 3})
