"""AMPD's family: sessions of several rounds on co-located or disaggregated workers.

Splits are ranked by the planner's closed forms at the rate where the best of them just meets its objectives, as P95 whatever the
percentile, and the first ``CANDIDATES`` are simulated. Where all prefills are remote none is left out that could serve more by what
its prefill workers have time for alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum

import numpy as np

from engines.ampd.planner import PlanningWorkload, coefficients
from engines.cluster.hardware import Deployment, replications, splits
from engines.cluster.record import ClusterRun, Floats, observe
from engines.cluster.sessions import OpenLoop, Session
from engines.cluster.simulation import Cluster, StopRule
from engines.models.shape import ModelShape
from engines.policies.routing import RemoteOnly
from repro.capacity.objectives import Objective, Sample, Times
from repro.capacity.site import Knobs, Plan, Ranked, Site, alone_s
from repro.runs.record import Obtained
from repro.runs.system import SYSTEMS
from repro.systems.cluster.ampd import ArSystem, ClusterDeployment
from repro.systems.cluster.ampd_settings import ClusterSettings, resolve, sessions_of
from repro.systems.platforms import ArPart
from repro.workloads.card import Provenance

CANDIDATES = 8
"""Most plans of a number of GPUs that are simulated."""
_MOST_LIVE = 20_000
"""More sessions at once: the run is given up, as one of ``repro bench`` is."""
WARM_UP = 0.5
"""Share of the arrivals that fill the workers, whose rounds are not judged."""
_HALVINGS = 5
_BUSY = 0.7
"""About how busy co-located workers are at their limit."""


@dataclass(frozen=True, kw_only=True)
class ClusterSite(Site):
    unit = "sessions/s"
    least_prompts = 2

    @cached_property
    def system(self) -> ArSystem:
        system = SYSTEMS.get(self.cell.system)
        assert isinstance(system, ArSystem)
        return system

    @cached_property
    def _settings(self) -> ClusterSettings:
        return resolve(self.cell, self.system.name, self.system.own)

    @property
    def obtained(self) -> Obtained:
        return self._settings.charged.obtained

    @cached_property
    def _degrees(self) -> tuple[int, ...]:
        """Those that hold the longest session of any seed."""
        workload = self._settings.workload
        longest = max(sessions_of(replace(workload, seed=seed)).longest_tokens for seed in range(self.num_seeds))
        return self._settings.ground.hardware.degrees(min_kv_tokens=longest)

    @cached_property
    def sessions(self) -> tuple[Session, ...]:
        return sessions_of(self._settings.workload).sessions

    @cached_property
    def alone_s(self) -> float:
        cost, num = self._settings.ground.hardware.cost(min(self._degrees)), len(self.sessions)
        token_s = cost.step_s([], 1, round(fsum(each.context_tokens for each in self.sessions) / num))
        elsewhere_s = fsum(entry.delay_s for each in self.sessions for entry in each.rounds[:-1])
        decode_s = token_s * sum(each.decode_tokens for each in self.sessions)
        return (alone_s(cost, self.sessions) + decode_s + elsewhere_s) / num

    @property
    def least_gpus(self) -> int:
        return min(self._degrees) * (2 if self.system.is_disaggregated else 1)

    @property
    def most_gpus(self) -> int:
        return self._settings.platform.part(ArPart).num_gpus

    @property
    def provenance(self) -> Provenance:
        return sessions_of(self._settings.workload).provenance

    def fits(self, gpus: int) -> bool:
        return next(self._deployments(gpus), None) is not None

    def check(self, gpus: int) -> None:
        self._prepared(_knobs(next(self._deployments(gpus))), 1.0, 0)

    def hardware(self) -> tuple[ModelShape, str]:
        hardware = self._settings.ground.hardware
        return hardware.shape, hardware.gpu.name

    # ---- plans -----------------------------------------------------------------------------------------

    def plans(self, gpus: int) -> tuple[Plan, ...]:
        return tuple(self._plan(each) for each in self._deployments(gpus))

    def _deployments(self, gpus: int) -> Iterator[Deployment]:
        degrees = self._degrees
        return splits(gpus, degrees, degrees) if self.system.is_disaggregated else replications(gpus, degrees)

    def _plan(self, deployment: Deployment) -> Plan:
        (decode,) = deployment.decode
        (prefill,) = deployment.prefill or (None,)
        return Plan(
            name=str(deployment),
            gpus=deployment.gpus,
            knobs=_knobs(deployment),
            most=math.inf
            if prefill is None or not self._is_remote
            else self._kept_up(prefill.degree, prefill.replicas),
            prefill=None if prefill is None else (prefill.degree, prefill.replicas),
            decode=(decode.degree, decode.replicas),
        )

    def _kept_up(self, degree: int, replicas: int) -> float:
        """The rate above which so many prefill workers have less time than any run's prompts take of them, one a step."""
        # A session that is alone comes at no rate, and is kept up with at any.
        return min(replicas / each if each else math.inf for each in self._prefill_s[degree])

    @cached_property
    def _is_remote(self) -> bool:
        degree = min(self._degrees)
        knobs = _knobs(Deployment.disaggregated(degree, 1, degree, 1))
        return isinstance(self._prepared(knobs, 1.0, 0).cluster().policies.make_router(0), RemoteOnly)

    @cached_property
    def _prefill_s(self) -> Mapping[int, Sequence[float]]:
        """By degree, for each seed: seconds of a remote prefill worker over the seconds that sessions take to arrive at 1/s."""
        hardware, found = self._settings.ground.hardware, {}
        for degree in self._degrees:
            cost, each = hardware.cost(degree, is_remote=True), []
            for seed in range(self.num_seeds):
                workload = replace(self._settings.workload, seed=seed)
                sessions = sessions_of(workload).sessions
                span_s = sessions[-1].arrival_s * (workload.arrivals.rate or 1.0)
                each.append(alone_s(cost, sessions) / span_s if span_s else 0.0)
            found[degree] = each
        return found

    def ranked(self, gpus: int, rate: float | None) -> Ranked:
        plans = self.plans(gpus)
        if not plans:
            return Ranked((), 0, 0.0)
        if self.system.is_disaggregated:
            start = self._start(gpus, plans) if rate is None else rate
            values = self._values(gpus, plans, start)
        else:
            values = {plan: -self._guess(plan) for plan in plans}
            start = -min(values.values())
        likely = sorted(plans, key=lambda plan: values[plan])
        keeping_up = [plan for plan in likely if rate is None or plan.most >= rate]
        return Ranked(tuple(keeping_up[:CANDIDATES]), len(plans), start)

    def _guess(self, plan: Plan) -> float:
        """A rate at which co-located workers are ``_BUSY``, with as many decodes at once as their objective allows."""
        degree, replicas = plan.decode
        cost, sessions = self._settings.ground.hardware.cost(degree), self.sessions
        limit_s = self._settings.ground.slo.itl_s
        context = fsum(session.context_tokens for session in sessions) / len(sessions)

        def step_s(batch: int) -> float:
            base_s, slope_s, floor_s = cost.decode_line(batch)
            return max(base_s + slope_s * batch * context, floor_s)

        batches = [2**power for power in range(9)]
        batch = max((each for each in batches if step_s(each) <= limit_s), default=1)
        decode_s = sum(session.decode_tokens for session in sessions) * step_s(batch) / batch
        return _BUSY * replicas * len(sessions) / (alone_s(cost, sessions) + decode_s)

    def _start(self, gpus: int, plans: Sequence[Plan]) -> float:
        """The rate at which the least worst phase of any plan is at its objective, by closed forms."""
        cost = self._settings.ground.hardware.cost(min(self._degrees))
        high = gpus * len(self.sessions) / alone_s(cost, self.sessions)
        low = high / 64
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            if min(self._values(gpus, plans, middle).values()) > 1:
                high = middle
            else:
                low = middle
        return low

    def _values(self, gpus: int, plans: Sequence[Plan], rate: float) -> Mapping[Plan, float]:
        """How many times its objective the worse phase of each plan is, or its load what its prefill workers keep up with."""
        ground = replace(self._settings.ground, num_gpus=gpus)
        workload = PlanningWorkload(sessions=self.sessions, rate=rate, slo=ground.slo)
        table = coefficients(ground.performance, workload, self._degrees, gpus, "closed")
        found = {}
        for plan in plans:
            assert plan.prefill is not None, "co-located workers have no phases apart"
            phases = table.prefill[plan.prefill].of_slo, table.decode[plan.decode].of_slo
            found[plan] = max(*phases, rate / self._kept_up(*plan.prefill))
        return found

    # ---- runs ------------------------------------------------------------------------------------------

    def _prepared(self, knobs: Knobs, rate: float, seed: int) -> ClusterDeployment:
        deployment, _ = self.system.prepare(self._cell(knobs, rate=rate, seed=seed))
        assert isinstance(deployment, ClusterDeployment), "a deployment in words is not searched for"
        return deployment

    def run(self, plan: Plan, rate: float, seed: int) -> Sample:
        deployment = self._prepared(plan.knobs, rate, seed)
        sessions = sessions_of(deployment.settings.workload).sessions
        cluster: Cluster = deployment.cluster()
        run = cluster.simulate(OpenLoop(sessions=sessions), seed=seed, stop=StopRule(max_live_sessions=_MOST_LIVE))
        return sample_of(run, self.objectives)


def _knobs(deployment: Deployment) -> Knobs:
    return (("num_gpus", deployment.gpus), ("deployment", str(deployment)))


def sample_of(run: ClusterRun, objectives: Sequence[Objective]) -> Sample:
    """By round, of those that are ready in the second half of the arrivals: the first fills the workers. A run that was given up, or
    whose prefills had less time than they took, is none that could go on."""
    seen = observe(run)
    ready_s, finished_s = (np.asarray(run.rounds[name], dtype=np.float64) for name in ("ready_s", "finished_s"))
    first_s, last_s = run.sessions["arrival_s"][0], run.sessions["arrival_s"][-1]
    counts = (ready_s >= first_s + WARM_UP * (last_s - first_s)) & (ready_s <= last_s)
    row, gap_s, tokens = run.gaps
    by_round: Mapping[str, Floats] = {
        "ttft": seen.ttft_s,
        "e2el": finished_s - ready_s,
        "tpot": seen.round_itl_s["mean"],
        "itl": seen.round_itl_s["p95"],
    }
    times = {name: Times.of(by_round[name][counts]) for name in ("ttft", "e2el")}
    has_gaps = counts & ~np.isnan(by_round["tpot"])
    times["tpot"] = Times.of(by_round["tpot"][has_gaps])
    times["itl"] = Times(gap_s[counts[row]], tokens[counts[row]])
    good = seen.round_done & counts
    for each in objectives:
        seconds = by_round[each.metric]
        # What never came keeps no limit; a round of one token has no gap to limit.
        good &= (seconds <= each.limit_s) | (np.isnan(seconds) & (each.metric in ("tpot", "itl")))
    return Sample(
        times=times,
        num_rounds=int(counts.sum()),
        num_good=int(good.sum()),
        longest_s=float(np.max(times["ttft"].values, initial=0.0)),
        load=math.inf if run.facts["stop_reason"] else run.facts["prefill_load"] or 0.0,
        span_s=last_s - first_s,
        stay_s=float(np.nanmean(seen.e2el_s)) if seen.session_done.any() else math.inf,
    )
