"""Policies decide by plain data: given snapshots of a simulated cluster, as a live coordinator has them, they decide the same."""

import ast
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.clusters import hardware, profiled, session

from engines.ampd.policies import AdaptiveRouter, RoutingConfig
from engines.ampd.system import AmpdConfig, ampd
from engines.cluster.hardware import Deployment
from engines.cluster.sessions import OpenLoop
from engines.cluster.simulation import Cluster
from engines.policies.routing import Decision, Router
from engines.policies.views import DecodeView, PrefillTask, PrefillView, Slo, WorkerSnapshot
from repro.paths import REPO

PLATFORM = hardware()
MODEL = profiled(num_gpus=8)
SLO = Slo(ttft_s=1.0, itl_s=0.05)
POLICY_FILES = (
    "engines/ampd/policies.py",
    "engines/ampd/performance.py",
    "engines/cluster/worker.py",
    *(str(path.relative_to(REPO)) for path in sorted((REPO / "engines" / "policies").glob("*.py"))),
    "baselines/ar/dynamo.py",
    "baselines/ar/vllm.py",
)


def frozen(worker: PrefillView | DecodeView, now: float) -> WorkerSnapshot:
    """What a worker would have written to shared memory."""
    return WorkerSnapshot(
        worker_id=worker.worker_id,
        degree=worker.degree,
        backlog_s=worker.backlog_s,
        backlog_tokens=worker.backlog_tokens,
        running_s=worker.busy_s(now),
        wait_s=worker.oldest_wait_s(now),
        ttft_s=worker.windowed_ttft_s(now) if hasattr(worker, "windowed_ttft_s") else 0.0,
        itl_s=worker.windowed_itl_s(now) if hasattr(worker, "windowed_itl_s") else 0.0,
        age_s=worker.token_age_s(now) if hasattr(worker, "token_age_s") else 0.0,
        kv_tokens=worker.kv_tokens if hasattr(worker, "kv_tokens") else 0,
    )


class Recording:
    """Keeps what the router saw, as data, and what it said."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.asked: list[tuple[PrefillTask, WorkerSnapshot, list[WorkerSnapshot], float, Decision]] = []

    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Decision:
        snapshots = [frozen(worker, now) for worker in prefills]
        said = self.router.route(task, home, prefills, now)
        self.asked.append((task, frozen(home, now), snapshots, now, said))
        return said


@pytest.mark.parametrize("route_order", ["random", "load"])
@pytest.mark.parametrize("window", ["done", "age", "backlog"])
def test_router_decides_the_same_on_snapshots(route_order, window):
    config = RoutingConfig(route_order=route_order, window=window)
    recording = Recording(AdaptiveRouter(MODEL, SLO, config, seed=5))
    simulated = ampd(PLATFORM, Deployment.disaggregated(2, 2, 4, 1), SLO, MODEL, AmpdConfig())
    policies = simulated.policies.__class__(**{**simulated.policies.__dict__, "make_router": lambda seed: recording})
    cluster = Cluster(name="x", hardware=PLATFORM, deployment=simulated.deployment, policies=policies)
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(0.25, 60)).tolist()
    lengths = rng.integers(100, 1500, (60, 3)).tolist()
    cluster.simulate(
        OpenLoop(sessions=[session(index, times[index], *((n, 20) for n in lengths[index])) for index in range(60)])
    )

    live = AdaptiveRouter(MODEL, SLO, config, seed=5)
    said = [live.route(task, home, prefills, now) for task, home, prefills, now, _ in recording.asked]
    assert said == [decision for *_, decision in recording.asked]
    assert len({decision.reason for decision in said}) >= 2


@pytest.mark.parametrize("path", POLICY_FILES)
def test_policies_know_neither_clock_nor_socket_nor_simulator(path):
    tree = ast.parse((Path(__file__).parents[3] / path).read_text(encoding="utf-8"))
    names = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    forbidden = {"time", "socket", "asyncio", "threading", "torch", "redis", "datetime"}
    assert not {name.partition(".")[0] for name in names} & forbidden
    if path.startswith("engines"):
        assert not {name for name in names if name.endswith((".simulation", ".events", ".worker", ".decode"))}
