"""A serving system on hardware: which workers a run of it has, and by which policies they decide."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engines.cluster.decode import DecodeWorker
from engines.cluster.hardware import Deployment, Hardware, place
from engines.cluster.memory import WINDOW_S
from engines.cluster.record import ClusterRun
from engines.cluster.sessions import Arrivals
from engines.cluster.simulation import NEVER, DecodeSimulation, StopRule
from engines.cluster.worker import CachingPrefillWorker, Parts, PrefillWorker
from engines.errors import require
from engines.policies.batching import ONE_BY_ONE
from engines.policies.routing import Binder, Estimator, LeastKvMemory, Local, Router
from engines.policies.step import Batching
from engines.policies.task import PrefillQueue

HistoryRead = Literal["overlapped", "serial", "own-cache"]
"""How prefill workers get a history: from its decode worker, during the prefill before (AMPD §6) or after it; or from a prefix cache
of their own."""


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
    history: HistoryRead = "overlapped"
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
        decode = [pool.degree for pool in self.deployment.decode for _ in range(pool.replicas)]
        prefill = [pool.degree for pool in self.deployment.prefill for _ in range(pool.replicas)]
        simulation = DecodeSimulation(
            binder=policies.make_binder(),
            router=policies.make_router(seed),
            estimator=policies.estimator,
            links=self.hardware.links,
            stop=stop,
            most_tokens=min(self.hardware.kv_capacity(degree) for degree in (*decode, *prefill)),
        )
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
            parts = Parts(
                worker_id=len(decode) + index,
                degree=degree,
                server=prefill_servers[index],
                cost=self.hardware.cost(degree, is_remote=True),
                queue=policies.make_prefill_queue() if shared is None else shared,
                batching=policies.prefill_batching,
            )
            simulation.add(self._prefill_worker(simulation, parts))
        run = simulation.run(arrivals)
        simulation.let_go()
        return run

    def _prefill_worker(self, simulation: DecodeSimulation, parts: Parts) -> PrefillWorker:
        history, window_s = self.policies.history, self.policies.window_s
        if history == "own-cache":
            capacity = self.hardware.kv_capacity(parts.get("degree", 1))
            return CachingPrefillWorker(simulation, kv_capacity=capacity, window_s=window_s, **parts)
        return PrefillWorker(simulation, overlaps=history == "overlapped", window_s=window_s, **parts)
