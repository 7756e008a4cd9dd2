"""A serving system on hardware: a deployment of workers with its policies, ready to be given sessions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from engines.ar.cluster.decode_worker import DecodeWorker
from engines.ar.cluster.prefill_worker import PrefillWorker
from engines.ar.cluster.simulation import NEVER, Simulation, StopRule
from engines.ar.cost import Hardware
from engines.ar.deployment import Deployment, place
from engines.ar.record import ClusterRun
from engines.ar.session import Arrivals, ClosedLoop, OpenLoop, Session
from engines.ar.window import WINDOW_S
from engines.errors import require
from engines.policies.batching import ONE_BY_ONE
from engines.policies.routing import Binder, Estimator, LeastKvMemory, Local, Router
from engines.policies.step import Batching
from engines.policies.task import PrefillQueue


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
        decode_servers, prefill_servers = place(decode, prefill)
        for index, degree in enumerate(decode):
            simulation.add(
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
            simulation.add(
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
        sessions = self._fitting(arrivals.sessions)
        if isinstance(arrivals, ClosedLoop):
            return simulation.run(replace(arrivals, sessions=tuple(sessions)))
        return simulation.run(OpenLoop(sessions=sessions))

    def _fitting(self, sessions: Iterable[Session]) -> Iterator[Session]:
        """A session that fits no worker is refused, before it runs where arrivals are drawn one at a time."""
        pools = (*self.deployment.prefill, *self.deployment.decode)
        capacity = min(self.hardware.kv_capacity(pool.degree) for pool in pools)
        for session in sessions:
            require(
                session.context_tokens <= capacity,
                f"session {session.session_id} grows to {session.context_tokens} tokens of K/V and a worker of "
                f"{self.deployment} holds {capacity}: shorten it or raise the degree",
            )
            yield session
