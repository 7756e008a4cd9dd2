"""A serving system on hardware: a deployment of workers with its policies, ready to be given sessions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from engines.ar.cluster.decode_worker import DecodeWorker
from engines.ar.cluster.prefill_worker import PrefillWorker
from engines.ar.cluster.record import ClusterRun
from engines.ar.cluster.simulation import NEVER, Simulation, StopRule
from engines.ar.constants import CostConstants
from engines.ar.cost import WorkerCost, fits, kv_capacity_tokens
from engines.ar.deployment import DEGREES, Deployment, place
from engines.ar.session import Arrivals, ClosedLoop, OpenLoop, Session
from engines.ar.transfer import KvLinks
from engines.ar.window import WINDOW_S
from engines.errors import require
from engines.hardware.catalogue import Gpu
from engines.models.shape import ModelShape
from engines.policies.batching import ONE_BY_ONE
from engines.policies.binding import Binder, LeastKvMemory
from engines.policies.queue import PrefillQueue
from engines.policies.routing import Estimator, Local, Router
from engines.policies.step import Batching


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A model on a kind of GPU, under one reading of the constants."""

    shape: ModelShape
    gpu: Gpu
    constants: CostConstants
    _costs: dict[tuple[int, bool], WorkerCost] = field(default_factory=dict, init=False, repr=False, compare=False)

    def cost(self, degree: int, *, is_remote: bool = False) -> WorkerCost:
        key = degree, is_remote
        if key not in self._costs:
            self._costs[key] = WorkerCost(self.shape, self.gpu, degree, self.constants, is_remote=is_remote)
        return self._costs[key]

    @property
    def links(self) -> KvLinks:
        return KvLinks.of(self.shape, self.gpu, self.constants)

    def kv_capacity(self, degree: int) -> int:
        return kv_capacity_tokens(self.shape, self.gpu, degree, self.constants)

    def degrees(self, *, min_kv_tokens: int = 1) -> tuple[int, ...]:
        """Tensor-parallel degrees that leave room for so many tokens of K/V."""
        found = tuple(
            degree
            for degree in DEGREES
            if fits(self.shape, self.gpu, degree, self.constants, min_kv_tokens=min_kv_tokens)
        )
        require(
            bool(found),
            f"model={self.shape.name!r} with {min_kv_tokens} tokens of K/V does not fit {max(DEGREES)} x {self.gpu.name}: "
            "use a smaller model or a larger GPU",
        )
        return found


@dataclass(frozen=True, kw_only=True)
class Policies:
    """What makes a system. Factories, as policies keep state: every run has its own; routers get the run's seed."""

    make_router: Callable[[int], Router] = lambda seed: Local()
    make_binder: Callable[[], Binder] = LeastKvMemory
    make_prefill_queue: Callable[[], PrefillQueue] = PrefillQueue
    """Makes the queue of workers that only prefill."""
    make_local_queue: Callable[[], PrefillQueue] = PrefillQueue
    """Makes the queue of prefills on workers that decode."""
    prefill_batching: Batching = ONE_BY_ONE
    local_batching: Batching = ONE_BY_ONE
    estimator: Estimator | None = None
    shares_prefill_queue: bool = False
    """One queue for all prefill workers, each takes the next task when it is free."""
    overlaps: bool = True
    """Whether the history of the next prefill is read during the current one (AMPD §6)."""
    keep_s: float = 0.0
    """Time-to-live of a session's K/V between rounds (vLLM-Continuum)."""
    window_s: float = WINDOW_S


@dataclass(frozen=True, kw_only=True)
class Cluster:
    name: str
    hardware: Hardware
    deployment: Deployment
    policies: Policies

    def __post_init__(self) -> None:
        hardware = self.hardware
        for pool in (*self.deployment.prefill, *self.deployment.decode):
            require(
                hardware.kv_capacity(pool.degree) >= 1,
                f"deployment={self.deployment}: {hardware.shape.name} does not fit {pool.degree} x {hardware.gpu.name}, "
                f"use a degree of {min(hardware.degrees())} or more",
            )

    def simulate(
        self, arrivals: Arrivals, *, seed: int = 0, stop: StopRule = NEVER, max_run_steps: int = sys.maxsize
    ) -> ClusterRun:
        """One run from empty workers. The same arguments give the same record, to the last bit.

        ``max_run_steps`` 1 makes an event of every decode step; it changes no more than rounding, and the time it takes.
        """
        policies = self.policies
        simulation = Simulation(
            binder=policies.make_binder(),
            router=policies.make_router(seed),
            estimator=policies.estimator,
            links=self.hardware.links,
            stop=stop,
        )
        decode = [pool.degree for pool in self.deployment.decode for _ in range(pool.replicas)]
        prefill = [pool.degree for pool in self.deployment.prefill for _ in range(pool.replicas)]
        decode_servers, prefill_servers = _placed(decode, prefill)
        for index, degree in enumerate(decode):
            simulation.add_home(
                DecodeWorker(
                    simulation,
                    worker_id=index,
                    degree=degree,
                    server=decode_servers[index],
                    cost=self.hardware.cost(degree),
                    queue=policies.make_local_queue(),
                    batching=policies.local_batching,
                    kv_capacity=self.hardware.kv_capacity(degree),
                    keep_s=policies.keep_s,
                    window_s=policies.window_s,
                    max_run_steps=max_run_steps,
                )
            )
        shared = policies.make_prefill_queue() if policies.shares_prefill_queue else None
        for index, degree in enumerate(prefill):
            simulation.add_prefill(
                PrefillWorker(
                    simulation,
                    worker_id=len(decode) + index,
                    degree=degree,
                    server=prefill_servers[index],
                    cost=self.hardware.cost(degree, is_remote=True),
                    queue=policies.make_prefill_queue() if shared is None else shared,
                    batching=policies.prefill_batching,
                    overlaps=policies.overlaps,
                    window_s=policies.window_s,
                )
            )
        facts = {
            "system": self.name,
            "model": self.hardware.shape.name,
            "gpu": self.hardware.gpu.name,
            "constants": self.hardware.constants.name,
            "deployment": str(self.deployment),
            "seed": seed,
        }
        return simulation.run(self._checked(arrivals), facts)

    def _checked(self, arrivals: Arrivals) -> Arrivals:
        """A session that fits no worker is refused, before it runs where arrivals are drawn one at a time."""
        pools = (*self.deployment.prefill, *self.deployment.decode)
        capacity = min(self.hardware.kv_capacity(pool.degree) for pool in pools)

        def check(sessions: Iterable[Session]) -> Iterable[Session]:
            for session in sessions:
                require(
                    session.context_tokens <= capacity,
                    f"session {session.session_id} grows to {session.context_tokens} tokens of K/V and a worker of "
                    f"{self.deployment} holds {capacity}: shorten it or raise the degree",
                )
                yield session

        if isinstance(arrivals, ClosedLoop):
            return replace(arrivals, sessions=tuple(check(arrivals.sessions)))
        return OpenLoop(sessions=check(arrivals.sessions))


def _placed(decode: list[int], prefill: list[int]) -> tuple[list[int], list[int]]:
    """Servers, workers of the two phases in turn so that each finds the other on its own."""
    turns = [
        (degree, is_decode, index)
        for index, pair in enumerate(zip_longest(decode, prefill))
        for is_decode, degree in zip((True, False), pair, strict=True)
        if degree is not None
    ]
    servers = place([degree for degree, _, _ in turns])
    found = {(is_decode, index): server for (_, is_decode, index), server in zip(turns, servers, strict=True)}
    return [found[True, index] for index in range(len(decode))], [found[False, index] for index in range(len(prefill))]
