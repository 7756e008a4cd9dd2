"""The compiled core and the Python that it stands for: the same runs, to the last bit."""

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.cluster import core
from engines.cluster.hardware import Deployment, EngineTimes, Hardware, Pool, cost_constants
from engines.cluster.record import ClusterRun, Values
from engines.cluster.sessions import OpenLoop, Round, Session
from engines.cluster.simulation import NEVER, Cluster, Policies, StopRule
from engines.compiled import CompilerError, loaded
from engines.cost.roofline import gpu
from engines.errors import RunError
from engines.models.shape import model_shape
from engines.policies.batching import Chunked, OneByOne, PrefillFirst
from engines.policies.routing import Binder, FewestSessions, LeastKvMemory, RoundRobin
from engines.policies.views import Batching, OpenQueue

try:
    loaded(core.LIBRARY)
except CompilerError as error:
    pytest.skip(f"no core: {error}", allow_module_level=True)

BINDERS: tuple[Callable[[], Binder], ...] = RoundRobin, LeastKvMemory, FewestSessions


@pytest.fixture(autouse=True, scope="module")
def any_length() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "LONG", 0)
        yield


class Guess:
    def prefill_s(self, history: int, tokens: int, degree: int) -> float:
        return 0.1


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


@st.composite
def clusters(draw: st.DrawFn, longest: int) -> Cluster:
    """With memory that is short as often as not."""
    constants = cost_constants(draw(st.sampled_from(["physical", "vllm-0.15", "none"])))
    hardware = Hardware(
        shape=model_shape(draw(st.sampled_from(["Qwen2.5-14B", "Llama-3.1-8B"]))),
        gpu=gpu("h100"),
        constants=replace(constants, engine=draw(st.sampled_from([constants.engine, TIMES, AHEAD]))),
        kernels=draw(st.sampled_from([None, "vllm"])),
        kv_tokens=draw(st.sampled_from([None, longest, longest + longest // 3, 4 * longest])),
    )
    pool = st.builds(Pool, degree=st.sampled_from([1, 2]), replicas=st.sampled_from([1, 2]))
    policies = Policies(
        make_binder=draw(st.sampled_from(BINDERS)),
        local_batching=draw(batchings),
        keeps=draw(st.booleans()),
        keep_s=draw(st.sampled_from([0.0, 1.0, 10.0])),
    )
    deployment = Deployment(decode=tuple(draw(st.lists(pool, min_size=1, max_size=2))))
    return Cluster(name="any", hardware=hardware, deployment=deployment, policies=policies)


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


@settings(max_examples=20)
@given(
    batching=batchings,
    keeps=st.booleans(),
    keep_s=st.sampled_from([0.0, 0.5]),
    tokens=st.integers(1000, 2500),
    constants=st.sampled_from(["none", "vllm-0.15-top-p"]),
)
def test_both_preempt_and_evict_alike(
    batching: Batching, keeps: bool, keep_s: float, tokens: int, constants: str
) -> None:
    """Answers that outgrow the memory of a worker, in sessions that come back for more."""
    rng = random.Random(tokens)
    served = tuple(
        Session(place, 0.02 * place, tuple(Round(rng.randrange(1, 60), rng.randrange(100, 300), 0.1) for _ in "ab"))
        for place in range(40)
    )
    hardware = Hardware(
        shape=model_shape("Qwen2.5-14B"),
        gpu=gpu("h100"),
        constants=cost_constants(constants),
        kernels="vllm",
        kv_tokens=tokens,
    )
    policies = Policies(local_batching=batching, keeps=keeps, keep_s=keep_s)
    cluster = Cluster(name="any", hardware=hardware, deployment=Deployment.colocated(1, 2), policies=policies)
    run = both(cluster, served)
    if not isinstance(batching, OneByOne) and batching.max_num_seqs > 4:
        assert sum(run.workers["num_preemptions"]) > 0


@pytest.mark.parametrize("change", [{"estimator": Guess()}, {"make_local_queue": OpenQueue}, {"block_size": 16}])
def test_policies_that_the_core_does_not_know_are_served_in_python(change: dict[str, Any]) -> None:
    hardware = Hardware(shape=model_shape("Qwen2.5-14B"), gpu=gpu("h100"), constants=cost_constants("none"))
    cluster = Cluster(name="any", hardware=hardware, deployment=Deployment.colocated(1, 1), policies=Policies(**change))
    run = cluster.simulate(OpenLoop(sessions=(Session(0, 0.0, (Round(10, 5),)),)))
    assert isinstance(run.sessions["status"], list)


def test_what_a_cost_raises_ends_the_run() -> None:
    class Broken(Hardware):
        def run_cost(self, degree: int, batching: object = None, *, is_remote: bool = False) -> Any:
            return self

        def decode_line(self, decoding: int) -> Any:
            raise RunError("no such step")

        def step_s(self, *_: object) -> float:
            return 0.01

    hardware = Broken(shape=model_shape("Qwen2.5-14B"), gpu=gpu("h100"), constants=cost_constants("none"))
    cluster = Cluster(name="any", hardware=hardware, deployment=Deployment.colocated(1, 1), policies=Policies())
    with pytest.raises(RunError, match="no such step"):
        cluster.simulate(OpenLoop(sessions=(Session(0, 0.0, (Round(10, 5),)),)))
