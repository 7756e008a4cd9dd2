"""The compiled core and the Python that it stands for: the same runs, to the last bit."""

import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.ar.dynamo import ConditionalRouter, DynamoConfig, dynamo
from baselines.ar.vllm import InFlightFirst, continuum
from engines.ampd.performance import PerformanceModel, profile_hardware
from engines.ampd.policies import AdaptiveRouter, ReorderingQueue, RouteOrder, RoutingConfig, WindowSignal
from engines.ampd.system import AmpdConfig, ampd
from engines.cluster import core
from engines.cluster.hardware import Deployment, EngineTimes, Hardware, Pool, cost_constants
from engines.cluster.record import ClusterRun
from engines.cluster.sessions import OpenLoop, Round, Session
from engines.cluster.simulation import NEVER, Cluster, Policies, StopRule
from engines.columns import Values
from engines.compiled import CompilerError, load_library
from engines.cost.roofline import gpu
from engines.errors import RunError, UserError
from engines.models.shape import model_shape
from engines.policies.batching import Chunked, LateShare, OneByOne, OnTimeQueue, PrefillFirst
from engines.policies.routing import (
    Dispatch,
    FewestSessions,
    KvCost,
    LeastKvMemory,
    Local,
    RemoteOnly,
    RoundRobin,
    Router,
)
from engines.policies.views import Batching, OpenQueue, PrefillQueue, Slo

try:
    load_library(core.LIBRARY)
except CompilerError as error:
    pytest.skip(f"no core: {error}", allow_module_level=True)

SLO = Slo(ttft_s=0.25, itl_s=0.018)
ADAPTIVE = [
    RoutingConfig(route_order=order, window=window)
    for order in get_args(RouteOrder)
    for window in get_args(WindowSignal)
]


@cache
def model(name: str) -> PerformanceModel:
    hardware = Hardware(shape=model_shape(name), gpu=gpu("h100"), constants=cost_constants("physical"))
    return profile_hardware(hardware, num_gpus=8, degrees=(1, 2))


@pytest.fixture(autouse=True, scope="module")
def any_length() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "LONG", 0)
        yield


class OfTheirOwn(Local):
    """A user's router that has all of ours."""


TIMES = EngineTimes(host_s=2e-3, sequence_s=1e-5, request_s=3e-3, response_s=1e-3)
AHEAD = replace(TIMES, schedules_ahead=True, draw_s=1e-4, logit_s=1e-10)
rounds = st.builds(
    Round, st.sampled_from([1, 5, 100, 1500, 3000]), st.sampled_from([1, 2, 30, 200]), st.sampled_from([0.0, 0.1, 5.0])
)
batchings = st.one_of(
    st.just(OneByOne()),
    st.builds(
        PrefillFirst, max_num_batched_tokens=st.sampled_from([64, 2048]), max_num_seqs=st.sampled_from([1, 4, 256])
    ),
    st.builds(
        Chunked, max_num_batched_tokens=st.sampled_from([1, 16, 512, 8192]), max_num_seqs=st.sampled_from([1, 4, 256])
    ),
)


@st.composite
def sessions(draw: st.DrawFn) -> tuple[Session, ...]:
    pace_s = draw(st.sampled_from([0.001, 0.05, 2.0]))
    gaps = draw(st.lists(st.floats(0, 2), min_size=1, max_size=40))
    found, arrival_s = [], 0.0
    for place, gap in enumerate(gaps):
        arrival_s += gap * pace_s
        found.append(Session(3 * place + 1, arrival_s, tuple(draw(st.lists(rounds, min_size=1, max_size=3)))))
    return tuple(found)


def routers(name: str) -> st.SearchStrategy[Callable[..., Router]]:
    """Those that may send prefills away."""
    dispatch = st.sampled_from(get_args(Dispatch))
    conditional = st.builds(
        DynamoConfig,
        dispatch=dispatch,
        conditional=st.sampled_from(["isl_bounding", "prefill_load", "isl_or_load"]),
        prefill_busy_threshold=st.sampled_from([0.01, 0.2]),
        decode_busy_threshold=st.sampled_from([None, 0.3]),
        scheduling=st.just("chunked"),
    )
    return st.one_of(
        dispatch.map(lambda each: partial(RemoteOnly, each)),
        conditional.map(lambda config: partial(ConditionalRouter, config)),
        st.sampled_from(ADAPTIVE).map(lambda config: partial(AdaptiveRouter, model(name), SLO, config)),
        st.just(lambda *, seed: KvCost(overlap_weight=0.5)),
    )


@st.composite
def clusters(draw: st.DrawFn, longest: int) -> Cluster:
    """With memory that is short as often as not."""
    constants = cost_constants(draw(st.sampled_from(["physical", "vllm-0.15", "none"])))
    name = draw(st.sampled_from(["Qwen2.5-14B", "Llama-3.1-8B"]))
    hardware = Hardware(
        shape=model_shape(name),
        gpu=gpu("h100"),
        constants=replace(constants, engine=draw(st.sampled_from([constants.engine, TIMES, AHEAD]))),
        kernels=draw(st.sampled_from([None, "vllm"])),
        kv_tokens=draw(st.sampled_from([None, longest, longest + longest // 3, 4 * longest])),
    )
    pools = st.lists(
        st.builds(Pool, degree=st.sampled_from([1, 2]), replicas=st.sampled_from([1, 2])), min_size=1, max_size=2
    ).map(tuple)
    router, is_apart = draw(routers(name)), draw(st.booleans())
    lates = LateShare(share=0.0), LateShare(), LateShare(share=0.25, patience=0.1), LateShare(share=1.0, patience=0.1)
    late = draw(st.sampled_from(lates))
    on_time = partial(OnTimeQueue, ttft_s=SLO.ttft_s, late=late)
    queue = st.sampled_from([PrefillQueue, partial(ReorderingQueue, ttft_s=SLO.ttft_s), InFlightFirst, on_time])
    policies = Policies(
        make_router=(lambda seed: router(seed=seed)) if is_apart else (lambda seed: Local()),
        prefill_batching=draw(batchings),
        shares_prefill_queue=draw(st.booleans()),
        history=draw(st.sampled_from(["overlapped", "serial"])),
        make_prefill_queue=draw(queue),
        make_local_queue=draw(queue),
        estimator=draw(st.sampled_from([None, model(name)])),
        make_binder=draw(st.sampled_from([RoundRobin, LeastKvMemory, FewestSessions, KvCost])),
        local_batching=draw(batchings),
        keeps=draw(st.booleans()),
        keep_s=draw(st.sampled_from([0.0, 1.0, 10.0])),
    )
    deployment = Deployment(prefill=draw(pools) if is_apart else (), decode=draw(pools))
    return Cluster(hardware=hardware, deployment=deployment, policies=policies)


def tables_of(run: ClusterRun) -> dict[str, Any]:
    return {
        name: {key: list(values) for key, values in getattr(run, name).items()}
        for name in ("sessions", "rounds", "tasks", "transfers", "workers")
    }


def both(cluster: Cluster, served: tuple[Session, ...], stop: StopRule = NEVER, steps: int = sys.maxsize) -> ClusterRun:
    """The run, which the core made, and Python too: a generator of sessions is served there."""
    compiled = cluster.simulate(OpenLoop(sessions=served), stop=stop, max_run_steps=steps)
    run = cluster.simulate(OpenLoop(sessions=(each for each in served)), stop=stop, max_run_steps=steps)
    assert repr(tables_of(compiled)) == repr(tables_of(run))
    assert [(each.dtype, each.tobytes()) for each in compiled.gaps] == [(e.dtype, e.tobytes()) for e in run.gaps]
    assert compiled.facts == run.facts
    assert isinstance(compiled.sessions["status"], Values)
    return compiled


@settings(max_examples=100)
@given(st.data(), st.sampled_from([None, 5.0]), st.sampled_from([None, 10]), st.sampled_from([sys.maxsize, 1, 7]))
def test_both_make_the_same_run(data: st.DataObject, until_s: float | None, most: int | None, steps: int) -> None:
    served = data.draw(sessions())
    cluster = data.draw(clusters(max(each.context_tokens for each in served)))
    both(cluster, served, StopRule(until_s=until_s, max_live_sessions=most), steps)


@settings(max_examples=14)
@given(
    batching=batchings,
    keeps=st.booleans(),
    keep_s=st.sampled_from([0.0, 0.5]),
    tokens=st.integers(1000, 2500),
    constants=st.sampled_from(["none", "vllm-0.15-top-p"]),
    prefill=st.sampled_from([(), (Pool(degree=1, replicas=1),)]),
)
def test_both_preempt_and_evict_alike(
    batching: Batching, keeps: bool, keep_s: float, tokens: int, constants: str, prefill: tuple[Pool, ...]
) -> None:
    """Answers that outgrow the memory of a worker, in sessions that come back for more."""
    rng = random.Random(tokens)
    served = tuple(
        Session(place, 0.02 * place, tuple(Round(rng.randrange(1, 60), rng.choice([1, 250]), 0.1) for _ in "abc"))
        for place in range(40)
    )
    hardware = Hardware(
        shape=model_shape("Qwen2.5-14B"),
        gpu=gpu("h100"),
        constants=cost_constants(constants),
        kernels="vllm",
        kv_tokens=tokens,
    )
    policies = Policies(
        make_router=(lambda seed: RemoteOnly()) if prefill else (lambda seed: Local()),
        local_batching=batching,
        prefill_batching=batching,
        keeps=keeps,
        keep_s=keep_s,
    )
    deployment = Deployment(prefill=prefill, decode=(Pool(degree=1, replicas=2),))
    cluster = Cluster(hardware=hardware, deployment=deployment, policies=policies)
    run = both(cluster, served)
    if not isinstance(batching, OneByOne) and batching.max_num_seqs > 4:
        assert sum(run.workers["num_preemptions"]) > 0


@pytest.mark.parametrize("routing", [*ADAPTIVE, *get_args(Dispatch), "kv-aware", "continuum"])
def test_both_route_an_overload_alike(routing: RoutingConfig | str) -> None:
    """Every line of AMPD's Algorithm 1 decides some prefills."""
    rng = random.Random(5)
    served = tuple(
        Session(place, 0.05 * place, tuple(Round(rng.randrange(100, 3000), 20, 0.2) for _ in "abc"))
        for place in range(60)
    )
    constants = replace(cost_constants("physical"), engine=AHEAD, transfer_latency_s=0.05)
    hardware = Hardware(shape=model_shape("Qwen2.5-14B"), gpu=gpu("h100"), constants=constants)
    parts, believed = (hardware, Deployment.disaggregated(1, 3, 1, 2)), model("Qwen2.5-14B")
    if isinstance(routing, RoutingConfig):
        run = both(ampd(*parts, SLO, believed, AmpdConfig(routing=routing, window_s=1.0)), served)
        assert set(run.tasks["reason"]) == {"ttft-slack", "itl-slack", "cost"}
    elif routing == "continuum":
        found = continuum(hardware, Deployment.colocated(1, 2))
        both(replace(found, policies=replace(found.policies, make_binder=KvCost)), served)
    else:
        config = DynamoConfig(dispatch=routing, scheduling="chunked", max_num_batched_tokens=512)
        assert len(set(both(dynamo(*parts, believed, config), served).tasks["worker_id"])) == 3


@pytest.mark.parametrize("late", [LateShare(share=0.0), LateShare(share=0.25, patience=0.5), LateShare(share=1.0)])
def test_both_give_up_the_same_of_an_overload(late: LateShare) -> None:
    rng = random.Random(7)
    served = tuple(Session(place, 0.02 * place, (Round(rng.randrange(100, 4000), 5, 0.0),)) for place in range(80))
    believed, config = model("Qwen2.5-14B"), DynamoConfig(dispatch="shortest", scheduling="one-by-one")
    hardware = Hardware(shape=model_shape("Qwen2.5-14B"), gpu=gpu("h100"), constants=cost_constants("physical"))
    found = dynamo(hardware, Deployment.disaggregated(1, 1, 1, 1), believed, config)
    queue = partial(OnTimeQueue, ttft_s=SLO.ttft_s, late=late)
    run = both(replace(found, policies=replace(found.policies, make_prefill_queue=queue, estimator=believed)), served)
    assert max(run.tasks["postponed"]) > 3


def alone(policies: Policies, kind: type[Hardware] = Hardware, num_rounds: int = 2) -> ClusterRun:
    hardware = kind(shape=model_shape("Qwen2.5-14B"), gpu=gpu("h100"), constants=cost_constants("none"))
    cluster = Cluster(hardware=hardware, deployment=Deployment.colocated(1, 1), policies=policies)
    return cluster.simulate(OpenLoop(sessions=(Session(0, 0.0, (Round(10, 5), Round(20, 5))[:num_rounds]),)))


@pytest.mark.parametrize(
    "change", [{"make_router": lambda seed: OfTheirOwn()}, {"make_prefill_queue": OpenQueue}, {"block_size": 16}]
)
def test_policies_that_the_core_does_not_know_are_served_in_python(change: dict[str, Any]) -> None:
    assert isinstance(alone(Policies(**change)).sessions["status"], list)


def test_a_router_without_prefill_workers_is_refused_in_python() -> None:
    with pytest.raises(UserError, match="no prefill workers"):
        alone(Policies(make_router=lambda seed: RemoteOnly()))


def test_short_runs_behind_a_long_one_find_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(core, "LONG", 2)
    monkeypatch.setattr(core, "_SEEN", core.Counter())
    monkeypatch.setattr(core, "_load_if_ready", lambda _, is_long: asked.append(is_long))
    for num_rounds in (1, 2, 1):
        alone(Policies(), num_rounds=num_rounds)
    assert asked == [False, True, True]


def test_a_run_hears_ctrl_c_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised while Python answers the core, it would be lost."""
    asked = []

    class Interrupted:
        def prefill_s(self, history: int, tokens: int, degree: int) -> float:
            signal.raise_signal(signal.SIGINT)
            asked.append(tokens)
            return 0.1

    monkeypatch.setattr(core, "_EVENTS", 1)
    with pytest.raises(KeyboardInterrupt):
        alone(Policies(estimator=Interrupted()))
    assert asked == [10]


def test_what_a_cost_raises_ends_the_run() -> None:
    class Broken(Hardware):
        def run_cost(self, degree: int, batching: object = None, *, is_remote: bool = False) -> Any:
            return self

        def decode_line(self, decoding: int) -> Any:
            raise RunError("no such step")

        def step_s(self, *_: object) -> float:
            return 0.01

    with pytest.raises(RunError, match="no such step"):
        alone(Policies(), Broken)
