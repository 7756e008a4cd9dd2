"""Measures the times of live workers in service, with lone sessions on the path that every session takes (AMPD §3, profiler).

It also simulates the live workers: with their profile as costs, the same policies, and the same sessions.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from engines.ampd.live.coordinator import Coordinator, OnTurn, Prompts, serve
from engines.ampd.live.record import Mark, collect
from engines.ampd.live.store import Store
from engines.ampd.performance import PerformanceModel, Piecewise, fit_piecewise
from engines.cluster.decode import DecodeWorker
from engines.cluster.hardware import KvLinks, Link
from engines.cluster.record import ClusterRun, rows_of
from engines.cluster.sessions import OpenLoop, Round, Session
from engines.cluster.simulation import DecodeSimulation
from engines.cluster.worker import WINDOW_S, Parts, PrefillWorker
from engines.cost.roofline import DecodeLine
from engines.least_squares import least_squares
from engines.policies.routing import Binder, Estimator, LeastKvMemory, Local, RemoteOnly, Router
from engines.policies.views import Chunk, PrefillQueue

FIRST_ID = 10**9
"""The sessions of a profile have ids from here on."""


@dataclass(frozen=True, kw_only=True)
class ProfileGrid:
    tokens: tuple[int, ...] = (8, 32, 96, 192, 384, 768)
    """l_incr."""
    histories: tuple[int, ...] = (0, 128, 512, 1024)
    """l_hist, approximately: the one token of the answer comes on top."""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] = (64, 768)
    """Tokens of the sequences that decode together."""
    steps: int = 24
    """Decode steps of each batch."""
    repeats: int = 3


@dataclass(frozen=True, kw_only=True)
class DecodeFit:
    """T_dec: base + per_sequence * b + per_token * context, seconds."""

    base_s: float
    per_sequence_s: float
    per_token_s: float
    mean_error: float


@dataclass(frozen=True, kw_only=True)
class LiveProfile:
    """Measured and fitted times: everything that a simulation of these workers needs."""

    remote: Piecewise
    """T_pre on a prefill worker, from the start of a task to its last token."""
    local: Piecewise
    """T_pre on a decode worker."""
    decode: DecodeFit
    transfer: Piecewise
    """T_kv, including the answer of the other side."""
    dispatch_s: float
    """Median time from a round's begin to the start of its prefill on an idle worker, without the transfer of its history."""
    decode_context: int
    """Tokens of each sequence in the T_dec(b) that policies know."""

    @property
    def performance(self) -> PerformanceModel:
        """The performance model that policies get (AMPD §3)."""
        fit = self.decode
        line = (fit.base_s, fit.per_sequence_s + fit.per_token_s * self.decode_context)
        decode = Piecewise(knees=(), pieces=(line,), mean_error=fit.mean_error, max_error=fit.mean_error)
        return PerformanceModel(
            prefill={1: self.remote},
            decode={1: decode},
            transfer={(1, 1): self.transfer},
            decode_context=self.decode_context,
        )


def profile_live(
    store: Store,
    roles: dict[int, str],
    prompts: Prompts,
    *,
    grid: ProfileGrid | None = None,
    until_s: float = 600.0,
    on_turn: OnTurn | None = None,
) -> LiveProfile:
    """Serve the grid's sessions one after the other, with remote prefills, then local ones. Then serve batches that decode together."""
    grid = grid or ProfileGrid()
    numbers = itertools.count(FIRST_ID)
    runs = {}
    for name, router in (("remote", RemoteOnly("round-robin")), ("local", Local())):
        coordinator = Coordinator(store, binder=LeastKvMemory(), router=router, estimator=None)
        mark, sessions, start_s = Mark.of(store, roles), [], store.clock.now()
        for history, tokens in list(itertools.product(grid.histories, grid.tokens)) * grid.repeats:
            rounds = (Round(history, 1), Round(tokens, 1)) if history else (Round(tokens, 1),)
            sessions.append(Session(next(numbers), 0.0, rounds))
            serve(coordinator, sessions[-1:], prompts, until_s=until_s, on_turn=on_turn)
        runs[name] = collect(store, sessions, start_s, roles, {}, since=mark)
    coordinator = Coordinator(store, binder=LeastKvMemory(), router=RemoteOnly("shortest"), estimator=None)
    logs = {worker: store.key("steps", worker) for worker in roles}
    num_steps = {worker: store.retry(partial(store.client.llen, log)) for worker, log in logs.items()}
    for context, batch in itertools.product(grid.contexts, grid.batches):
        together = [Session(next(numbers), 0.0, (Round(context, grid.steps),)) for _ in range(batch)]
        serve(coordinator, together, prompts, until_s=until_s, on_turn=on_turn)
    steps = [row for worker in roles for row in _steps(store, worker, num_steps[worker])]
    store.call("forget")
    return _fit(runs["remote"], runs["local"], steps, round(float(np.mean(grid.contexts))))


def _fit(
    remote: ClusterRun, local: ClusterRun, steps: Sequence[tuple[int, int, float]], decode_context: int
) -> LiveProfile:
    length = np.array(remote.transfers["tokens"], dtype=np.float64)
    seconds = np.array(remote.transfers["end_s"]) - np.array(remote.transfers["start_s"])
    transfer = _medians(length[:, None], seconds)
    sizes = transfer[0][:, 0]
    moves = rows_of(remote.transfers, "task_id", "content", "start_s", "end_s")
    reads = {task: end_s - start_s for task, content, start_s, end_s in moves if content == "history"}
    starts = rows_of(remote.tasks, "task_id", "ready_s", "started_s")
    waits = [started - ready - reads.get(task, 0.0) for task, ready, started in starts]
    return LiveProfile(
        remote=_prefill(remote),
        local=_prefill(local),
        decode=_decode(steps),
        transfer=fit_piecewise(sizes, np.stack([np.ones_like(sizes), sizes], axis=1), transfer[1], max_pieces=2),
        dispatch_s=float(np.median(waits)),
        decode_context=decode_context,
    )


def _prefill(run: ClusterRun) -> Piecewise:
    """Fit the medians of the repeats. We take ``tokens``, because ``computed_tokens`` includes the newest token of the round before."""
    tasks = run.tasks
    points = np.stack([np.array(tasks["history"]), np.array(tasks["tokens"])], axis=1).astype(np.float64)
    seconds = np.array(tasks["finished_s"], dtype=np.float64) - np.array(tasks["started_s"], dtype=np.float64)
    unique, times = _medians(points, seconds)
    history, incr = unique.T
    features = np.stack([np.ones_like(incr), incr, incr * (history + 0.5 * incr), history], axis=1)
    return fit_piecewise(incr, features, times, max_pieces=2)


def _decode(steps: Sequence[tuple[int, int, float]]) -> DecodeFit:
    points, times = _medians(np.array([step[:2] for step in steps], dtype=np.float64), np.array([s[2] for s in steps]))
    features = np.stack([np.ones(len(points)), points[:, 0], points[:, 1]], axis=1) / times[:, None]
    # Neither another sequence nor a longer context makes a step shorter, so we leave out coefficients that noise makes negative.
    for columns in ((0, 1, 2), (0, 2), (0, 1), (0,)):
        solution = np.array(least_squares(features[:, columns].T.tolist(), [1.0] * len(points)))
        if (solution >= 0).all():
            break
    error = np.abs(features[:, columns] @ solution - 1).mean()
    base, per_sequence, per_token = (
        dict(zip(columns, solution.tolist(), strict=True)).get(index, 0.0) for index in range(3)
    )
    return DecodeFit(base_s=base, per_sequence_s=per_sequence, per_token_s=per_token, mean_error=float(error))


def _medians(points: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The median time at every distinct point."""
    unique, index = np.unique(points, axis=0, return_inverse=True)
    return unique, np.array([np.median(times[index.ravel() == point]) for point in range(len(unique))])


def _steps(store: Store, worker: int, start: int) -> list[tuple[int, int, float]]:
    """Return (batch, context, seconds) of each decode step. The context is binned, so that there are repeats."""
    lines = store.retry(lambda: store.client.lrange(store.key("steps", worker), start, -1))
    rows = [row for line in lines for row in json.loads(line)]
    return [(batch, round(context / batch / 64) * 64 * batch, seconds) for batch, context, seconds in rows]


HOMES, PREFILLS = 0, 1
"""Server numbers that tell the two directions of a transfer apart."""


@dataclass(frozen=True, kw_only=True)
class _LiveLinks(KvLinks):
    """``intra`` is the link to the prefill worker, and ``inter`` the link back."""

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
    """Simulate live workers, under the same ids: homes first. A dispatch keeps no worker busy, so it adds to the transfer back."""
    alpha, beta = profile.transfer.pieces[-1]
    outward = Link(name="intra-server", latency_s=max(alpha, 0.0), bytes_per_s=1 / max(beta, 1e-12))
    back = Link(name="inter-server", latency_s=outward.latency_s + profile.dispatch_s, bytes_per_s=outward.bytes_per_s)
    simulation = DecodeSimulation(
        binder=binder,
        router=router,
        estimator=estimator,
        links=_LiveLinks(intra=outward, inter=back, kv_bytes_per_token=1),
    )
    for worker in range(num_homes + num_prefills):
        is_home = worker < num_homes
        cost = _FittedCost(prefill=profile.local if is_home else profile.remote, profile=profile)
        parts = Parts(worker_id=worker, cost=cost, queue=make_queue(), server=HOMES if is_home else PREFILLS)
        if is_home:
            simulation.add(DecodeWorker(simulation, kv_capacity=kv_capacity, window_s=window_s, **parts))
        else:
            simulation.add(PrefillWorker(simulation, window_s=window_s, **parts))
    return simulation.run(OpenLoop(sessions=sessions))
