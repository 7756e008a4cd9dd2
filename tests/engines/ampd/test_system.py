"""AMPD on a small cluster: that its parts are connected, and its switches do what they say.

Policies decide by plain data: given snapshots of a simulated cluster, as a live coordinator has them, they decide the same.
"""

import ast
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import hardware, profiled, session
from support.refusals import refuses

from engines.ampd.performance import BATCHES, HISTORIES, TOKENS, PerformanceModel, fit_piecewise, profile_hardware
from engines.ampd.policies import AdaptiveRouter, RoutingConfig
from engines.ampd.system import AmpdConfig, ampd
from engines.cluster.hardware import CONSTANTS, PHYSICAL, Deployment
from engines.cluster.record import ClusterRun, rows_of
from engines.cluster.sessions import OpenLoop
from engines.errors import UserError
from engines.knobs import with_knobs
from engines.models.shape import LLAMA_3_1_70B, MIXTRAL_8X7B, QWEN3_32B
from engines.policies.routing import Decision, Router
from engines.policies.views import Chunk, DecodeView, PrefillTask, PrefillView, Slo, WorkerSnapshot
from repro.paths import REPO

PLATFORM = hardware()
MODEL = profiled(num_gpus=8)
SLO = Slo(ttft_s=1.0, itl_s=0.05)
PLAN = Deployment.disaggregated(2, 2, 4, 1)


def sessions_at(rate: float) -> OpenLoop:
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1 / rate, 60)).tolist()
    lengths = rng.integers(100, 1500, (60, 3)).tolist()
    each = zip(times, lengths, strict=True)
    return OpenLoop(sessions=[session(i, time, *((n, 20) for n in own)) for i, (time, own) in enumerate(each)])


def run(config: AmpdConfig, rate: float = 4.0, seed: int = 1, slo: Slo = SLO) -> ClusterRun:
    return ampd(PLATFORM, PLAN, slo, MODEL, config).simulate(sessions_at(rate), seed=seed)


@pytest.mark.parametrize(("degree", "link"), [(4, "intra-server"), (8, "inter-server")])
def test_kv_takes_the_link_between_the_servers_of_its_workers(degree, link):
    plan, config = Deployment.disaggregated(degree, 1, degree, 1), AmpdConfig(adaptive_routing=False)
    found = ampd(PLATFORM, plan, SLO, MODEL, config).simulate(OpenLoop(sessions=[session(0, 0.0, (100, 5))]))
    assert found.transfers["link"] == [link]


def test_overload_uses_every_branch_of_algorithm_1():
    reasons = Counter(run(AmpdConfig()).tasks["reason"])
    assert set(reasons) == {"ttft-slack", "itl-slack", "cost"}


def test_without_load_or_adaptive_routing_every_prefill_is_remote():
    calm = run(AmpdConfig(), rate=0.05, slo=Slo(ttft_s=9.0, itl_s=0.05))
    for found, reason in ((calm, "ttft-slack"), (run(AmpdConfig(adaptive_routing=False)), "always-remote")):
        assert set(found.tasks["reason"]) == {reason}
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


def test_estimates_are_the_models_and_not_the_truth():
    found = run(AmpdConfig())
    for history, tokens, is_local, estimate in rows_of(found.tasks, "history", "tokens", "is_local", "estimate_s"):
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
        with_knobs(AmpdConfig(), {"queue_order": "on-time", "w": 3})


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
    simulated = ampd(PLATFORM, PLAN, SLO, MODEL, AmpdConfig())
    policies = replace(simulated.policies, make_router=lambda seed: recording)
    replace(simulated, policies=policies).simulate(sessions_at(4.0))

    live = AdaptiveRouter(MODEL, SLO, config, seed=5)
    said = [live.route(task, home, prefills, now) for task, home, prefills, now, _ in recording.asked]
    assert said == [decision for *_, decision in recording.asked]
    assert len({decision.reason for decision in said}) >= 2


@pytest.mark.parametrize("path", POLICY_FILES)
def test_policies_know_neither_clock_nor_socket_nor_simulator(path):
    tree = ast.parse((Path(__file__).parents[3] / path).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    forbidden = {"time", "socket", "asyncio", "threading", "torch", "redis", "datetime"}
    assert not {name.partition(".")[0] for name in names} & forbidden
    if path.startswith("engines"):
        assert not {name for name in names if name.endswith((".simulation", ".events", ".worker", ".decode"))}


@settings(max_examples=20)
@given(st.integers(2, 16), st.floats(0.1, 5), st.floats(0.0, 0.02), st.floats(0.05, 2))
def test_knee_of_two_lines_is_found(place, start, flat, steep):
    x = np.arange(1.0, 21.0)
    knee = x[place]
    y = np.where(x <= knee, start + flat * x, start + flat * knee + 2 * start + steep * (x - knee))
    fit = fit_piecewise(x, np.stack([np.ones_like(x), x], axis=1), y)
    assert fit.knees == (knee,)
    assert fit.max_error < 1e-9
    assert fit.at(knee) == pytest.approx((start, flat), abs=1e-9)
    assert fit.at(knee + 1)[1] == pytest.approx(steep)


def test_pieces_are_added_only_as_needed():
    x = np.arange(1.0, 41.0)
    features = np.stack([np.ones_like(x), x], axis=1)
    assert fit_piecewise(x, features, 3 + 0.5 * x).knees == ()
    stairs = np.where(x <= 10, 1.0, np.where(x <= 25, 5.0, 20.0))
    assert fit_piecewise(x, features, stairs).knees == (10.0, 25.0)
    coarse = fit_piecewise(x, features, stairs, max_pieces=2)
    assert len(coarse.knees) == 1
    assert coarse.mean_error > 0.05


@given(st.lists(st.floats(0.5, 2.0), min_size=9, max_size=9))
def test_knees_are_the_best_of_all_places(y):
    """Three pieces over nine points, against every pair of knees."""
    x, times = np.arange(9.0), np.array(y)
    features = np.stack([np.ones_like(x), x], axis=1) / times[:, None]

    def loss(first: int, end: int) -> float:
        rows = features[first:end]
        return float(((rows @ np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0] - 1) ** 2).sum())

    least = loss(0, 3) + loss(3, 6) + loss(6, 9)  # a piece of two features needs three points
    fit = fit_piecewise(x, features * times[:, None], times, max_pieces=3, tolerance=0.0)
    total = sum((np.dot(fit.at(each), (1.0, each)) / time - 1) ** 2 for each, time in zip(x.tolist(), y, strict=True))
    assert total <= least + 1e-9


def test_too_few_measurements_are_refused():
    x = np.array([1.0, 2.0])
    with pytest.raises(ValueError, match="too few"):
        fit_piecewise(x, np.stack([np.ones(2), x], axis=1), x)
    with pytest.raises(UserError, match="not positive"):
        fit_piecewise(x, x[:, None], np.array([1.0, 0.0]))


@pytest.mark.parametrize(
    ("shape", "constants"),
    [(QWEN3_32B, PHYSICAL), (LLAMA_3_1_70B, PHYSICAL), *((MIXTRAL_8X7B, each) for each in CONSTANTS)],
)
def test_error_of_the_fit_is_small_and_reported(shape, constants):
    """1 % on average and 12 % at most, where a long history moves a knee that only l_incr places."""
    platform = hardware(shape, constants)
    degrees = platform.degrees()[::2]
    model = profile_hardware(platform, num_gpus=8, degrees=degrees)
    for degree in degrees:
        fit = model.prefill[degree]
        times = {(h, t): platform.cost(degree).step_s([Chunk(h, t)], 0, 0) for h in HISTORIES for t in TOKENS}
        errors = [abs(model.prefill_s(h, t, degree) / true - 1) for (h, t), true in times.items()]
        assert max(errors) == pytest.approx(fit.max_error, abs=1e-12)
        assert np.mean(errors) == pytest.approx(fit.mean_error, abs=1e-12)
        assert fit.mean_error <= 0.01
    assert model.max_error < 0.12


@settings(max_examples=80)
@given(st.integers(0, 16_000), st.integers(1, 8000), st.sampled_from((2, 4, 8)))
def test_fit_holds_between_the_points_of_its_grid(history, tokens, degree):
    true = PLATFORM.cost(degree).step_s([Chunk(history, tokens)], 0, 0)
    assert MODEL.prefill_s(history, tokens, degree) == pytest.approx(true, rel=0.08)


def test_decode_and_transfer_are_profiled_too():
    for batch in BATCHES:
        true = PLATFORM.cost(4).step_s([], batch, batch * MODEL.decode_context)
        assert MODEL.decode_s(batch, 4) == pytest.approx(true, rel=0.05)
    links = PLATFORM.links
    assert MODEL.transfer_s(777, 2, 8) == pytest.approx(links.transfer_s(777, links.intra, 2, 8), rel=1e-6)
    assert MODEL.transfer_s(0, 2, 8) == 0.0
    # Larger clusters are profiled across servers.
    model = profile_hardware(PLATFORM, num_gpus=16, degrees=(4,))
    assert model.transfer_s(5000, 4, 4) == pytest.approx(links.transfer_s(5000, links.inter, 4, 4), rel=1e-6)
