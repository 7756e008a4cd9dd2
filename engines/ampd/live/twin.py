"""The simulator in the live workers' place: their profile for its costs, the same policies, the same sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engines.ampd.live.profile import LiveProfile
from engines.ampd.performance import Piecewise
from engines.cluster.decode import DecodeWorker
from engines.cluster.hardware import KvLinks, Link
from engines.cluster.record import ClusterRun
from engines.cluster.sessions import OpenLoop, Session
from engines.cluster.simulation import DecodeSimulation
from engines.cluster.worker import WINDOW_S, PrefillWorker
from engines.cost.roofline import DecodeLine
from engines.policies.batching import ONE_BY_ONE
from engines.policies.routing import Binder, Estimator, Router
from engines.policies.views import Chunk, PrefillQueue

HOMES, PREFILLS = 0, 1
"""Servers that tell the two directions apart."""


@dataclass(frozen=True, kw_only=True)
class _LiveLinks(KvLinks):
    """``intra`` is the way to the prefill worker, ``inter`` the way back."""

    def between(self, server: int, other_server: int) -> Link:
        return self.intra if server == HOMES else self.inter


@dataclass(frozen=True, kw_only=True)
class _FittedCost:
    """A ``StepCost``."""

    prefill: Piecewise
    profile: LiveProfile

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        """Workers run one prefill a step, before decoding."""
        total_s = 0.0
        for history, tokens in chunks:
            a, b, c, d = self.prefill.at(tokens)
            total_s += max(a + b * tokens + c * tokens * (history + 0.5 * tokens) + d * history, 0.0)
        return total_s

    def decode_line(self, decoding: int) -> DecodeLine:
        fit = self.profile.decode
        return DecodeLine(fit.base_s + fit.per_sequence_s * decoding, fit.per_token_s, 0.0)


def simulate_live(
    profile: LiveProfile,
    sessions: Sequence[Session],
    *,
    num_homes: int,
    num_prefills: int,
    binder: Binder,
    router: Router,
    estimator: Estimator,
    make_queue: Callable[[], PrefillQueue],
    kv_capacity: int,
    window_s: float = WINDOW_S,
) -> ClusterRun:
    """Worker ids are the live ones: homes first. A dispatch takes the worker no time, hence it lies with the transfer back."""
    alpha, beta = profile.transfer.pieces[-1]
    there = Link(name="intra-server", latency_s=max(alpha, 0.0), bytes_per_s=1 / max(beta, 1e-12))
    back = Link(name="inter-server", latency_s=there.latency_s + profile.dispatch_s, bytes_per_s=there.bytes_per_s)
    simulation = DecodeSimulation(
        binder=binder,
        router=router,
        estimator=estimator,
        links=_LiveLinks(intra=there, inter=back, kv_bytes_per_token=1),
    )
    for worker in range(num_homes):
        simulation.add(
            DecodeWorker(
                simulation,
                worker_id=worker,
                degree=1,
                cost=_FittedCost(prefill=profile.local, profile=profile),
                queue=make_queue(),
                batching=ONE_BY_ONE,
                kv_capacity=kv_capacity,
                window_s=window_s,
            )
        )
    for worker in range(num_homes, num_homes + num_prefills):
        simulation.add(
            PrefillWorker(
                simulation,
                worker_id=worker,
                degree=1,
                cost=_FittedCost(prefill=profile.remote, profile=profile),
                queue=make_queue(),
                batching=ONE_BY_ONE,
                server=PREFILLS,
                window_s=window_s,
            )
        )
    return simulation.run(OpenLoop(sessions=sessions))
