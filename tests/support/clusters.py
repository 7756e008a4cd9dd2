"""Clusters for tests: stub costs with round numbers, and simulations wired by hand."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from hypothesis import strategies as st

from engines.ampd.performance import PerformanceModel, profile_hardware
from engines.cluster.decode import DecodeWorker
from engines.cluster.hardware import NO_TIMES, PHYSICAL, CostConstants, EngineTimes, Hardware, KvLinks, Link, WorkerCost
from engines.cluster.prefix import BlockKv
from engines.cluster.record import ClusterRun
from engines.cluster.sessions import OpenLoop, Round, Session
from engines.cluster.simulation import NEVER, DecodeSimulation, StopRule
from engines.cluster.worker import CachingPrefillWorker, Parts, PrefillWorker
from engines.cost.roofline import H20, DecodeLine
from engines.models.shape import LLAMA_3_1_70B, ModelShape
from engines.policies.batching import ONE_BY_ONE
from engines.policies.routing import Binder, Decision, Estimator, LeastKvMemory, Router
from engines.policies.views import Batching, Chunk, DecodeView, PrefillQueue, PrefillTask, PrefillView


@dataclass(frozen=True)
class LinearCost:
    """A prefill takes ``token_s`` a token, a decode step base + slope * context or floor, whichever is longer."""

    token_s: float = 1e-3
    decode_s: float = 10e-3
    slope_s: float = 0.0
    floor_s: float = 0.0

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        prefill = sum(chunk.tokens for chunk in chunks) * self.token_s
        if not decoding:
            return prefill
        return prefill + max(self.decode_s + self.slope_s * context, self.floor_s)

    def decode_line(self, decoding: int) -> DecodeLine:
        return DecodeLine(self.decode_s, self.slope_s, self.floor_s)


class TimedCost(WorkerCost):
    """A worker's cost, asked for one prefill alone and one decode step."""

    def prefill_s(self, history: int, tokens: int) -> float:
        return self.step_s([Chunk(history, tokens)], 0, 0)

    def decode_s(self, decoding: int, context: int) -> float:
        base_s, slope_s, floor_s = self.decode_line(decoding)
        return max(base_s + slope_s * context, floor_s)


@dataclass(frozen=True)
class TokenEstimator:
    token_s: float = 1e-3

    def prefill_s(self, history: int, tokens: int, degree: int) -> float:
        return tokens * self.token_s


@dataclass(frozen=True)
class Scripted:
    """Routes task i to worker ``places[i]``; None is local. Beyond the script, the last place."""

    places: tuple[int | None, ...]

    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Decision:
        place = self.places[min(task.task_id, len(self.places) - 1)]
        return Decision(home.worker_id, True, "script") if place is None else Decision(place, False, "script")


FIRST_PREFILL = Scripted(places=(100,))
"""Worker 100 is the first prefill worker of ``simulation``."""


def links(seconds_per_token: float, latency_s: float = 0.0) -> KvLinks:
    link = Link(name="intra-server", latency_s=latency_s, bytes_per_s=1 / seconds_per_token)
    return KvLinks(intra=link, inter=link, kv_bytes_per_token=1)


def simulation(
    *,
    homes: int = 1,
    prefills: int = 0,
    cost: LinearCost | None = None,
    prefill_cost: LinearCost | None = None,
    router: Router | None = None,
    binder: Binder | None = None,
    estimator: Estimator | None = None,
    kv_links: KvLinks | None = None,
    kv_capacity: int = 10**9,
    make_queue: Callable[[], PrefillQueue] = PrefillQueue,
    batching: Batching = ONE_BY_ONE,
    prefill_batching: Batching = ONE_BY_ONE,
    overlaps: bool = True,
    own_cache: int | None = None,
    block_size: int | None = None,
    keep_s: float = 0.0,
    max_run_steps: int = sys.maxsize,
    schedules_ahead: bool = False,
    engine: EngineTimes = NO_TIMES,
    stop: StopRule = NEVER,
) -> DecodeSimulation:
    """Homes 0, 1, ... and prefill workers 100, 101, ..., which with ``own_cache`` keep so many tokens of K/V themselves, where there
    is a ``block_size`` in blocks that sessions share."""
    from engines.policies.routing import Local

    def shared(capacity: int) -> BlockKv | None:
        return None if block_size is None else built.shared_kv(capacity, block_size)

    built = DecodeSimulation(
        binder=binder or LeastKvMemory(),
        router=router or (FIRST_PREFILL if prefills else Local()),
        estimator=estimator,
        links=kv_links,
        stop=stop,
        engine=engine,
    )
    for index in range(homes):
        built.add(
            DecodeWorker(
                built,
                worker_id=index,
                degree=1,
                cost=cost or LinearCost(),
                queue=make_queue(),
                batching=batching,
                kv_capacity=kv_capacity,
                kv=shared(kv_capacity),
                keep_s=keep_s,
                max_run_steps=max_run_steps,
                schedules_ahead=schedules_ahead,
            )
        )
    for index in range(prefills):
        parts = Parts(
            worker_id=100 + index,
            degree=1,
            cost=prefill_cost or cost or LinearCost(),
            queue=make_queue(),
            batching=prefill_batching,
        )
        if own_cache is None:
            built.add(PrefillWorker(built, overlaps=overlaps, **parts))
        else:
            built.add(CachingPrefillWorker(built, kv_capacity=own_cache, kv=shared(own_cache), **parts))
    return built


def serve(built: DecodeSimulation, *sessions: Session) -> ClusterRun:
    return built.run(OpenLoop(sessions=sessions))


def session(session_id: int, arrival_s: float, *rounds: tuple[int, int] | tuple[int, int, float]) -> Session:
    return Session(session_id, arrival_s, tuple(Round(*entry) for entry in rounds))


def task(
    task_id: int = 0,
    *,
    history: int = 0,
    tokens: int = 100,
    ready_s: float = 0.0,
    enqueued_s: float = 0.0,
    estimate_s: float = 0.0,
    postponed: int = 0,
    kind: str = "initial",
) -> PrefillTask:
    return PrefillTask(
        task_id=task_id,
        session_id=task_id,
        order=task_id,
        round_index=0 if kind == "initial" else 1,
        kind=kind,
        history=history,
        tokens=tokens,
        ready_s=ready_s,
        enqueued_s=enqueued_s,
        estimate_s=estimate_s,
        postponed=postponed,
    )


def hardware(shape: ModelShape = LLAMA_3_1_70B, constants: CostConstants = PHYSICAL) -> Hardware:
    return Hardware(shape=shape, gpu=H20, constants=constants)


@cache
def profiled(*, num_gpus: int) -> PerformanceModel:
    """``hardware()``, profiled once for all tests that decide by it."""
    return profile_hardware(hardware(), num_gpus=num_gpus)


def poisson_singles(
    num: int, rate: float, tokens: Callable[[np.random.Generator, int], np.ndarray], seed: int
) -> Iterator[Session]:
    """Sessions of one prefill and no decode: the customers of a queue."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, num)).tolist()
    lengths = np.maximum(1, np.rint(tokens(rng, num))).astype(np.int64).tolist()
    for index in range(num):
        yield Session(index, times[index], (Round(lengths[index], 1),))


@st.composite
def session_lists(draw: st.DrawFn, max_sessions: int = 12) -> list[Session]:
    """Sessions in order of arrival, with odd lengths and delays that include 0."""
    num = draw(st.integers(1, max_sessions))
    arrivals = sorted(draw(st.lists(st.floats(0, 3), min_size=num, max_size=num)))
    rounds = st.lists(
        st.builds(Round, st.integers(1, 400), st.integers(1, 40), st.sampled_from((0.0, 0.0, 0.013, 0.7))),
        min_size=1,
        max_size=4,
    )
    return [Session(index, arrival, tuple(draw(rounds))) for index, arrival in enumerate(arrivals)]
