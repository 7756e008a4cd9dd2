"""Ranks deployments for a workload (AMPD §5, Table 2), by the integer program of eq. (5).

Binary variables z(n, k) choose a degree n and k replicas of it for each phase. The printed eq. (5) has an integer x(n) for every degree
and a tau(n) that does not depend on the replicas, so it never adds a second replica. Here tau_pre(n, k) and tau_dec(n, k), the P95
latencies of a phase, fall with the replicas that share its load. C1 and C2 hold Z above the tau of the chosen pool. A phase has one
degree, as in all 36 rows of Table 2, because a pool's tau assumes that it carries the phase's whole load.

Latencies follow from the fitted performance model alone. We simulate them, or use formulas that take microseconds. By formula, prefill
is an M/G/k queue that starts empty and is watched while the sample arrives, so that overload has an answer too. Decode is a fixed
point: the batch follows from the token rate and the step time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from engines.ampd.performance import PerformanceModel
from engines.cluster.decode import DecodeWorker, Sink
from engines.cluster.hardware import Deployment
from engines.cluster.record import observe
from engines.cluster.sessions import OpenLoop, Round, Session
from engines.cluster.simulation import DecodeSimulation
from engines.cluster.worker import PrefillWorker
from engines.cost.roofline import DecodeLine
from engines.errors import require
from engines.knobs import Checked
from engines.least_squares import Floats
from engines.policies.routing import FewestSessions, RemoteOnly
from engines.policies.views import Chunk, Slo


@dataclass(frozen=True, kw_only=True)
class PlanningWorkload:
    """``sessions`` arrive at ``rate`` sessions/s. Their own arrival times give the pattern, not the rate."""

    sessions: Sequence[Session]
    rate: float
    slo: Slo

    def __post_init__(self) -> None:
        require(bool(self.sessions), "sessions=(): the planner needs a sample of the workload")
        require(0 < self.rate < float("inf"), f"rate={self.rate}: planning needs a finite rate above 0 sessions/s")

    @cached_property
    def rounds(self) -> list[Round]:
        return [entry for session in self.sessions for entry in session.rounds]

    @property
    def span_s(self) -> float:
        """How long the sample takes to arrive."""
        return len(self.sessions) / self.rate

    @property
    def rounds_per_s(self) -> float:
        return self.rate * len(self.rounds) / len(self.sessions)

    def prefill_s(self, model: PerformanceModel, degree: int) -> Floats:
        """T_pre of every round, seconds."""
        seconds = []
        for session in self.sessions:
            history = 0
            for prefill, decode, _ in session.rounds:
                seconds.append(model.prefill_s(history, prefill, degree))
                history += prefill + decode
        return np.array(seconds)

    def at_rate(self) -> tuple[Session, ...]:
        """The sessions with their arrivals stretched to the planning rate."""
        last_s = self.sessions[-1].arrival_s
        stretch = self.span_s / last_s if last_s > 0 else 0.0
        return tuple(
            Session(session.session_id, session.arrival_s * stretch, session.rounds) for session in self.sessions
        )


_QUANTILE = 0.95
_TIMES = (np.arange(6) + 0.5) / 6
"""Moments at which we look at arrivals, as shares of the run."""
_SERVICES = 48
"""How many equally likely service times stand for those of all rounds."""
_BISECTIONS = 30


class PhaseLatency(NamedTuple):
    """P95 over the rounds of a phase."""

    seconds: float
    """Prefill: TTFT. Decode: from the first to the last token of a round."""
    of_slo: float
    """Prefill: TTFT over its objective. Decode: mean ITL of a round over its objective."""


class ClosedForm:
    def __init__(self, model: PerformanceModel, workload: PlanningWorkload) -> None:
        self._model, self._workload = model, workload
        decoding = np.array([entry.decode_tokens for entry in workload.rounds], dtype=np.int64) - 1
        self._mean_decode = float(decoding.mean())
        self._long_decode = float(np.quantile(decoding, _QUANTILE))

    def prefill(self, degree: int, replicas: Sequence[int]) -> list[PhaseLatency]:
        """P95 of wait + service for each number of replicas. The wait is independent of the round's service time."""
        service_s = np.sort(self._workload.prefill_s(self._model, degree))
        services = np.array([part.mean() for part in np.array_split(service_s, min(_SERVICES, len(service_s)))])
        workload, servers = self._workload, np.array(replicas)
        rate, rounds = workload.rounds_per_s, workload.rounds_per_s / workload.rate
        # Beyond saturation a session has one prefill in the queue at a time, so its rounds share the growth of the backlog.
        rounds_sharing = np.where(rate * services.mean() >= servers, rounds, 1.0)[:, None]

        def exceeds(limits_s: Floats) -> npt.NDArray[np.bool_]:
            """Whether P(wait + service > limit) is above 5 %, for each number of replicas."""
            backlog_s = (limits_s[:, None] - services) * rounds_sharing
            tail: Floats = backlog_exceeds(backlog_s, services, servers, rate, workload.span_s).mean(axis=1)
            return tail > 1 - _QUANTILE

        low, high = np.zeros(len(servers)), np.full(len(servers), services[-1] + 1e-9)
        while (above := exceeds(high)).any():
            low, high = np.where(above, high, low), np.where(above, 2 * high, high)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            above = exceeds(middle)
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        return [PhaseLatency(seconds, seconds / workload.slo.ttft_s) for seconds in high.tolist()]

    def decode(self, degree: int, replicas: int) -> PhaseLatency:
        workload = self._workload
        tokens_per_s = workload.rounds_per_s * self._mean_decode / replicas
        batch = self._batch(degree, tokens_per_s, max_batch=max(1.0, len(workload.sessions) / replicas))
        # The number of sequences scatters like a Poisson variable around its mean.
        typical_s = self._model.decode_s(max(1.0, batch), degree)
        busy_s = self._model.decode_s(max(1.0, batch + 1.645 * math.sqrt(batch)), degree)
        return PhaseLatency(self._long_decode * typical_s, busy_s / workload.slo.itl_s)

    def _batch(self, degree: int, tokens_per_s: float, max_batch: float) -> float:
        """Solve b = tokens per second x T_dec(b) by bisection; ``max_batch`` if tokens come faster than any batch makes them."""
        if tokens_per_s * self._model.decode_s(max_batch, degree) >= max_batch:
            return max_batch
        low, high = 0.0, max_batch
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if tokens_per_s * self._model.decode_s(max(1.0, middle), degree) > middle
                else (low, middle)
            )
        return high


def backlog_exceeds(
    limits_s: Floats, services: Floats, servers: npt.NDArray[np.int64], rate: float, span_s: float
) -> Floats:
    """P(wait > limit) of an M/G/k queue that began empty, averaged over the arrivals of ``span_s`` seconds.

    ``limits_s`` has a row for each number of servers. The backlog is a reflected Brownian motion with the drift rho - 1.
    We choose its variance such that below saturation its tail becomes that of Lee and Longton's M/G/k. Erlang's C is the
    share that waits at all; from rho = 1 on all wait.
    """
    mean_s = float(services.mean())
    loads = rate * mean_s / servers
    waits = np.array(
        [
            erlang_c(count, load * count) if load < 1 else 1.0
            for count, load in zip(servers.tolist(), loads.tolist(), strict=True)
        ]
    )
    # Axes: servers, limits, times.
    variance = (float((services**2).mean()) / (mean_s * servers))[:, None, None]
    drift = np.where(np.abs(loads - 1) > 1e-6, loads - 1, 1e-6)[:, None, None]
    positive = np.maximum(limits_s, 0.0)[:, :, None]
    times = _TIMES * span_s
    root = np.sqrt(variance * times)
    below = (drift * times - positive) / root
    tail = _upper_tail(np.abs(below))
    beyond = np.where(below >= 0, 1 - tail, tail)
    # Its mirror image, exp(2 drift x / variance) Phi(-z), with the exponents joined: one is huge when the other is tiny.
    z = (positive + drift * times) / root
    joined = np.exp(-0.5 * below * below) * _mills(np.maximum(z, 0.0))
    apart = np.exp(np.minimum(2 * drift * positive / variance, 0.0)) * (1 - _upper_tail(-np.minimum(z, 0.0)))
    beyond += np.where(z >= 0, joined, apart)
    chances: Floats = np.where(limits_s < 0, 1.0, waits[:, None] * np.clip(beyond, 0.0, 1.0).mean(axis=2))
    return chances


def erlang_c(servers: int, offered: float) -> float:
    """Probability that an arrival of M/M/k waits; ``offered`` is lambda E[S], below k."""
    blocked = 1.0  # Erlang B, by its recursion: no factorials to overflow
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    load = offered / servers
    return blocked / (1 - load + load * blocked)


def _upper_tail(x: Floats) -> Floats:
    """P(N > x) of a standard normal for x >= 0."""
    tail: Floats = np.exp(-0.5 * x * x) * _mills(x)
    return tail


def _mills(x: Floats) -> Floats:
    """P(N > x) / exp(-x^2 / 2) for x >= 0, by Abramowitz and Stegun 26.2.17: absolute error below 1e-7."""
    t = 1 / (1 + 0.2316419 * x)
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    mills: Floats = series / math.sqrt(2 * math.pi)
    return mills


Method = Literal["direct", "cached", "closed"]
"""direct: simulate the phase for every (n, k), with the cluster code itself. cached: simulate some k for each degree,
and interpolate ln tau over ln k between them. closed: formulas."""
_DIRECT_UP_TO_GPUS = 32
_CACHED_UP_TO_GPUS = 64
_CACHED_PER_OCTAVE = 2
_UNBOUNDED_KV = 10**15


Key = tuple[int, int]
"""(degree n, replicas k)."""


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    prefill: dict[Key, PhaseLatency]
    decode: dict[Key, PhaseLatency]


def default_method(num_gpus: int) -> Method:
    if num_gpus <= _DIRECT_UP_TO_GPUS:
        return "direct"
    return "cached" if num_gpus <= _CACHED_UP_TO_GPUS else "closed"


def coefficients(
    model: PerformanceModel,
    workload: PlanningWorkload,
    degrees: Sequence[int],
    num_gpus: int,
    method: Method | None = None,
) -> Coefficients:
    """Return the coefficients of each (n, k) that leaves the other phase a worker. ``method`` None: ``num_gpus`` decides."""
    require(bool(degrees), "degrees=(): the planner needs a degree the model fits")
    max_gpus = num_gpus - min(degrees)
    require(
        max_gpus >= min(degrees),
        f"num_gpus={num_gpus} do not hold a prefill and a decode worker of {min(degrees)} GPUs each: give more",
    )
    method = method or default_method(num_gpus)
    replicas = {degree: range(1, max_gpus // degree + 1) for degree in degrees if degree <= max_gpus}
    if method == "closed":
        form = ClosedForm(model, workload)
        return Coefficients(
            prefill={
                (degree, k): latency
                for degree, counts in replicas.items()
                for k, latency in zip(counts, form.prefill(degree, counts), strict=True)
            },
            decode={(degree, k): form.decode(degree, k) for degree, counts in replicas.items() for k in counts},
        )
    tables = []
    for phase in (simulate_prefill, simulate_decode):
        table: dict[Key, PhaseLatency] = {}
        for degree, counts in replicas.items():
            # We simulate all k, or about two per octave and the ends.
            sampled: Sequence[int] = counts
            if method == "cached":
                steps = range(int(np.log2(counts[-1]) * _CACHED_PER_OCTAVE) + 1)
                sampled = sorted({*(round(2 ** (step / _CACHED_PER_OCTAVE)) for step in steps), counts[-1]})
            points = {k: phase(model, workload, degree, k) for k in sampled}
            table.update(((degree, k), points[k] if k in points else _between(points, k)) for k in counts)
        tables.append(table)
    return Coefficients(prefill=tables[0], decode=tables[1])


def simulate_prefill(model: PerformanceModel, workload: PlanningWorkload, degree: int, replicas: int) -> PhaseLatency:
    """Simulate k prefill workers before a ``Sink``. Tasks join the shortest queue, which is first come, first served."""
    simulation = DecodeSimulation(binder=FewestSessions(), router=RemoteOnly(), estimator=model)
    simulation.add(Sink(simulation, worker_id=0, degree=degree, itl_s=model.decode_s(1, degree)))
    for index in range(replicas):
        simulation.add(PrefillWorker(simulation, worker_id=1 + index, degree=degree, cost=ModelCost(model, degree)))
    ttft_s = observe(simulation.run(OpenLoop(sessions=workload.at_rate()))).ttft_s
    p95_s = float(np.percentile(ttft_s, 95))
    return PhaseLatency(seconds=p95_s, of_slo=p95_s / workload.slo.ttft_s)


def simulate_decode(model: PerformanceModel, workload: PlanningWorkload, degree: int, replicas: int) -> PhaseLatency:
    """Simulate k decode workers behind prefills that take no time. A session goes to the worker with the fewest sessions."""
    simulation = DecodeSimulation(binder=FewestSessions(), router=RemoteOnly(), estimator=model)
    for index in range(replicas):
        cost = ModelCost(model, degree)
        simulation.add(DecodeWorker(simulation, kv_capacity=_UNBOUNDED_KV, worker_id=index, degree=degree, cost=cost))
    simulation.add(PrefillWorker(simulation, worker_id=replicas, degree=degree, cost=ModelCost(None, degree)))
    run = simulation.run(OpenLoop(sessions=workload.at_rate()))
    itl_s = observe(run).round_itl_s["mean"]
    valid = itl_s[~np.isnan(itl_s)]
    decode_s = np.array(run.rounds["finished_s"]) - np.array(run.rounds["first_token_s"])
    return PhaseLatency(
        seconds=float(np.percentile(decode_s, 95)),
        of_slo=float(np.percentile(valid, 95)) / workload.slo.itl_s if len(valid) else 0.0,
    )


@dataclass(frozen=True)
class ModelCost:
    """The performance model as the cost of a worker; without a model nothing takes time."""

    model: PerformanceModel | None
    degree: int

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        model = self.model
        return 0.0 if model is None else fsum(model.prefill_s(*chunk, self.degree) for chunk in chunks)

    def decode_line(self, decoding: int) -> DecodeLine:
        return DecodeLine(0.0 if self.model is None else self.model.decode_s(decoding, self.degree), 0.0, 0.0)


def _between(points: dict[int, PhaseLatency], k: int) -> PhaseLatency:
    sampled = sorted(points)

    def interpolate(values: Iterable[float]) -> float:
        logs = np.log([max(value, 1e-12) for value in values])
        return float(np.exp(np.interp(np.log(k), np.log(sampled), logs)))

    return PhaseLatency(
        seconds=interpolate(points[count].seconds for count in sampled),
        of_slo=interpolate(points[count].of_slo for count in sampled),
    )


Objective = Literal["max", "sum"]
"""max: Z bounds the worst phase, eq. (5). sum: Z adds both phases, as they add up in one round end to end."""

TIE = 1e-4
"""The tie-break decides between plans whose objectives differ by less than this share."""


@dataclass(frozen=True, kw_only=True)
class Program(Checked):
    """Choose one entry of ``prefill`` and one of ``decode`` such that the objective of their latencies is least."""

    prefill: Mapping[Key, float]
    decode: Mapping[Key, float]
    num_gpus: int
    uses_all: bool
    """Whether C3 is an equality: no GPU idles. Eq. (5) has at most N; all rows of Table 2 use all GPUs."""
    objective: Objective

    def value(self, prefill: Key, decode: Key) -> float:
        pair = self.prefill[prefill], self.decode[decode]
        return max(pair) if self.objective == "max" else sum(pair)

    def tie_break(self, key: Key, *, is_prefill: bool, least: float) -> float:
        """A phase's part of the tie-break between plans that all reach ``least``. It prefers a small sum of both phases'
        latencies, then few replicas, hence large degrees, then few prefill GPUs."""
        n, k = key
        latency = (self.prefill if is_prefill else self.decode)[key] / max(least, 1e-12)
        return latency + TIE * (k + (n * k / (2 * self.num_gpus) if is_prefill else 0.0)) / self.num_gpus


class PlanCounts(NamedTuple):
    prefill: Key
    decode: Key


def by_enumeration(program: Program, excluded: Sequence[PlanCounts] = ()) -> PlanCounts | None:
    """Return the best choice that is not excluded; None if there is none.

    We try every decode pool that fits the GPUs beside each prefill pool, which is as exact as the paper's integer programming.
    If no GPU may idle, at most one pool of each degree fits.
    """
    decodes = list(program.decode)
    tau_dec = np.array([program.decode[key] for key in decodes])
    gpus = np.array([n * k for n, k in decodes])
    by_gpus = np.argsort(gpus, kind="stable")
    gpus_left = program.num_gpus - np.array([n * k for n, k in program.prefill])
    stops = np.searchsorted(gpus[by_gpus], gpus_left, side="right")
    starts = np.searchsorted(gpus[by_gpus], gpus_left) if program.uses_all else np.zeros_like(stops)
    rows = list(zip(program.prefill, starts.tolist(), stops.tolist(), strict=True))
    index_of = {decode: index for index, decode in enumerate(decodes)}
    banned: dict[Key, list[int]] = {}
    for prefill, decode in excluded:
        if decode in index_of:
            banned.setdefault(prefill, []).append(index_of[decode])

    def pair_with(prefill: Key, start: int, stop: int) -> tuple[npt.NDArray[np.int64], Floats]:
        """Return the decode pools' places in ``decodes``, rising, and the objective with each pool."""
        places = np.sort(by_gpus[start:stop])
        if prefill in banned:
            places = places[~np.isin(places, banned[prefill])]
        tau = program.prefill[prefill]
        values: Floats = np.maximum(tau, tau_dec[places]) if program.objective == "max" else tau + tau_dec[places]
        return places, values

    best_values = [float(pair_with(*row)[1].min(initial=np.inf)) for row in rows]
    least = min(best_values)
    ties_dec = np.array([program.tie_break(key, is_prefill=False, least=least) for key in decodes])
    choice: PlanCounts | None = None
    smallest = np.inf
    for row, value in zip(rows, best_values, strict=True):
        if value > least * (1 + TIE) or value == np.inf:
            continue
        places, values = pair_with(*row)
        tied = places[values <= least * (1 + TIE)]
        tie_breaks = program.tie_break(row[0], is_prefill=True, least=least) + ties_dec[tied]
        winner = int(tie_breaks.argmin())
        if tie_breaks[winner] < smallest:
            choice, smallest = PlanCounts(row[0], decodes[tied[winner]]), float(tie_breaks[winner])
    return choice


@dataclass(frozen=True, kw_only=True)
class PlannerConfig(Checked):
    """Our choices for what the paper leaves open. None was chosen by Table 2 or Figure 4."""

    latency: Literal["of_slo", "seconds"] = "of_slo"
    """Unit of tau: P95 TTFT and P95 ITL over their objectives, or P95 seconds of a prefill and of a round's decode."""
    objective: Objective = "max"
    uses_all: bool = True
    method: Method | None = None
    """None: direct simulation for small clusters, closed forms for large ones."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    deployment: Deployment
    value: float
    """Z."""
    prefill: PhaseLatency
    decode: PhaseLatency


def plan(
    model: PerformanceModel,
    workload: PlanningWorkload,
    degrees: Sequence[int],
    num_gpus: int,
    *,
    top: int = 1,
    config: PlannerConfig | None = None,
) -> tuple[Plan, ...]:
    """The best ``top`` deployments, best first; fewer where there are no more."""
    config = config or PlannerConfig()
    table = coefficients(model, workload, degrees, num_gpus, config.method)
    return solve(table, num_gpus, top=top, config=config)


def solve(table: Coefficients, num_gpus: int, *, top: int = 1, config: PlannerConfig | None = None) -> tuple[Plan, ...]:
    """Return the best ``top`` plans, best first. Each further search excludes the plans found before (no-good cuts)."""
    config = config or PlannerConfig()
    require(top >= 1, f"top={top} must be at least 1")
    program = Program(
        prefill={key: getattr(latency, config.latency) for key, latency in table.prefill.items()},
        decode={key: getattr(latency, config.latency) for key, latency in table.decode.items()},
        num_gpus=num_gpus,
        uses_all=config.uses_all,
        objective=config.objective,
    )
    choices: list[PlanCounts] = []
    while len(choices) < top:
        choice = by_enumeration(program, choices)
        if choice is None:
            break
        choices.append(choice)
    return tuple(
        Plan(
            deployment=Deployment.disaggregated(*prefill, *decode),
            value=program.value(prefill, decode),
            prefill=table.prefill[prefill],
            decode=table.decode[decode],
        )
        for prefill, decode in choices
    )
