"""The systems whose capacity we search: AMPD's family, LAPS's, and diffusion LLMs.

AMPD's family serves sessions of several rounds on co-located or disaggregated workers. The planner's closed forms rank the splits, at the
rate where the best of them just meets its objectives, as P95 whatever the percentile. We simulate the first ``CANDIDATES``. Where all
prefills are remote none is left out that could serve more by what its prefill workers have time for alone.

LAPS's family serves turns of conversations on prefill instances, one GPU each. Others decode, so a turn has only a TTFT.

Diffusion LLMs serve requests on engines of one GPU each.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from math import fsum, prod
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from engines.ampd.planner import PlanningWorkload, coefficients
from engines.cluster.hardware import Deployment, replications, splits
from engines.cluster.record import ClusterRun, GapLog, sessions_of_rounds
from engines.cluster.sessions import OpenLoop, Session
from engines.cluster.simulation import Cluster, StopRule
from engines.errors import UserError, require
from engines.models.shape import ModelShape
from engines.policies.routing import RemoteOnly
from engines.policies.views import Chunk, StepTimes
from repro.capacity.objectives import Objective, Sample, Times, tightest
from repro.families.cluster.ampd import ArSystem, ClusterDeployment
from repro.families.cluster.ampd_settings import ClusterSettings, replayed_rate, resolve, sessions_of
from repro.families.cluster.deployments import parse_deployment
from repro.families.cluster.laps_record import PREFILL, busy_share, counted
from repro.families.platforms import ArPart, platform
from repro.runs.cell import Cell, Scalar
from repro.runs.family import column
from repro.runs.record import Obtained, RunRecord
from repro.runs.system import SYSTEMS, setting_text
from repro.runs.tuning import Choices, Space, axes_of, flat, is_possible
from repro.workloads.card import Provenance
from repro.workloads.draws import ArrivalConfig
from repro.workloads.sessions import SessionWorkloadConfig

_SEARCHED = "is for the search to set: leave it out"
SET_HERE: Mapping[str, str] = {
    **dict.fromkeys(("deployment", "num_gpus", "num_instances", "planning_rate", "transient", "tune"), _SEARCHED),
    "num_prompts": "is for --num-prompts to set, or the search: leave it out",
    **dict.fromkeys(("slo_ttft_s", "slo_itl_s"), "is for --slo to set: leave it out"),
    **dict.fromkeys(("workload", "dataset_path", "dataset_source"), "is for --workload to set: leave it out"),
    **{
        name: f"is for --{name.replace('_', '-')} to set: leave it out"
        for name in ("columns", "time_unit", "sort", "arrivals")
    },
}
"""Knobs that the question or the search sets, or that would change what rates mean. The value tells a user why they are refused."""


Knobs = tuple[tuple[str, Scalar], ...]


class Plan(NamedTuple):
    """A plan in the form that a cell asks for, so that ``repro bench`` can run it again."""

    name: str
    gpus: int
    knobs: Knobs
    most: float
    """No run of the plan keeps up with a rate above this one."""
    prefill: tuple[int, int] | None
    """Degree and replicas of the workers that only prefill; None if all workers do both."""
    decode: tuple[int, int]
    """Degree and replicas of the other workers, which decode, or of prefill instances."""
    schedule: str = ""
    """How workers fill their steps, and other settings that the search changed from their default."""
    choices: Choices = ()
    """Settings that the search chose: the deployment, and one setting of each further axis."""

    @property
    def is_mixed(self) -> bool:
        """Whether decode workers take some of the prompts."""
        return dict(self.knobs).get("conditional") is not None

    @property
    def share(self) -> float:
        """Share of the GPUs whose workers only prefill."""
        return 0.0 if self.prefill is None else prod(self.prefill) / self.gpus

    def has_share_of(self, other: "Plan") -> bool:
        """Whether both plans use the larger part of their GPUs for the same phase."""
        return bool(np.sign(self.share - 0.5) == np.sign(other.share - 0.5))


class Ranked(NamedTuple):
    space: Space
    """Its first axis holds the deployments that are worth a simulation, likely ones first."""
    num: int
    """How many plans exist."""
    start: float
    """About the rate that the best plan may serve."""


FEWEST_ROUNDS, MOST_ROUNDS = 1000, 12288
"""Bounds on the rounds of a run, if no number of requests is given."""
BEYOND = 5
"""Samples beyond the highest percentile that a run has at least, over all seeds."""
LASTING = 2
"""Arrivals should last this many times as long as a session; if they last less, the rate is only that of a burst."""
_SLOWER = 1.5
"""About how many times as long a session takes under load as alone."""


@dataclass(frozen=True, kw_only=True)
class Site(ABC):
    """A system on a platform, and how its runs are judged."""

    cell: Cell
    """Its seed is not read, nor is its rate where sessions are counted."""
    objectives: tuple[Objective, ...]
    num_seeds: int
    label: str = ""
    """A variant's change to the question's own site."""
    unit: ClassVar[str]
    """The unit of a rate, such as sessions/s."""
    least_prompts: ClassVar[int]
    """The fewest sessions, or turns, of a run that has a rate and can be judged."""

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the fields alone. Another process makes all else from them, including systems of any kind."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def title(self) -> str:
        return SYSTEMS.get(self.cell.system).title

    def cell_of(self, plan: Plan, rate: float, seed: int) -> Cell:
        return self._cell(plan.knobs, rate=rate, seed=seed)

    def sized_for(self, gpus: int, rate: float | None, num_prompts: int | None) -> Self:
        """Return the site with as many requests as given, or as these GPUs, or the rate, make worthwhile."""
        if num_prompts is None and self.is_replayed:
            num_prompts = self.most_prompts
        if num_prompts is None:
            num_prompts = self._num_prompts(self.ranked(gpus, None).start if rate is None else rate)
        return replace(self, cell=self._cell([("num_prompts", num_prompts)]))

    def _num_prompts(self, rate: float) -> int:
        """Sessions, or turns, of a run: enough for arrivals to last, up to the most rounds, and for percentiles to mean something."""
        per_prompt = self.rounds_per_prompt
        lasting = _SLOWER * LASTING * rate * self.alone_s * per_prompt
        needed = max(BEYOND * objective.fewest for objective in self.objectives)
        rounds = max(min(max(lasting, FEWEST_ROUNDS), MOST_ROUNDS), 2 * needed / self.num_seeds)
        return max(1, math.ceil(rounds / per_prompt))

    @property
    def most_prompts(self) -> int:
        """The most sessions, or turns, of a run if no number is given; all of a file that is replayed."""
        if self.is_replayed:
            return round(sum(len(session.rounds) for session in self.sessions) / self.rounds_per_prompt)
        return self._num_prompts(math.inf)

    @property
    def is_replayed(self) -> bool:
        """Whether arrivals are a file's own times, stretched to the rate."""
        return self.cell.knob_values.get("arrivals") == "trace"

    def _cell(self, knobs: Iterable[tuple[str, Scalar]], **changes: Any) -> Cell:
        return replace(self.cell, knobs=tuple((self.cell.knob_values | dict(knobs)).items()), **changes)

    @property
    @abstractmethod
    def obtained(self) -> Obtained: ...

    @property
    @abstractmethod
    def least_gpus(self) -> int:
        """The fewest GPUs that hold a plan."""

    @property
    @abstractmethod
    def most_gpus(self) -> int: ...

    @property
    @abstractmethod
    def provenance(self) -> Provenance: ...

    @property
    def rounds_per_prompt(self) -> float:
        """Mean rounds of a session; 1 for a turn."""
        return sum(len(session.rounds) for session in self.sessions) / len(self.sessions)

    @property
    @abstractmethod
    def alone_s(self) -> float:
        """About the mean time of a session, or a turn, that runs alone. Under load it takes at most ``_SLOWER`` times that."""

    @abstractmethod
    def hardware(self) -> tuple[ModelShape, str]:
        """The model's shape, and the card's name in the catalogue."""

    @property
    @abstractmethod
    def sessions(self) -> Sequence[Session]:
        """Sessions of the first seed."""

    @abstractmethod
    def fits(self, gpus: int) -> bool: ...

    @abstractmethod
    def check(self, gpus: int) -> None:
        """Raise UserError for anything that would fail in a run."""

    @abstractmethod
    def plans(self, gpus: int) -> tuple[Plan, ...]:
        """Every plan that uses all of these GPUs, with one degree per phase."""

    @abstractmethod
    def ranked(self, gpus: int, rate: float | None) -> Ranked:
        """Rank the plans for this many GPUs, at a given rate or at the largest."""

    def is_possible(self, choices: Choices) -> bool:
        return is_possible(self.cell, flat(choices))

    @abstractmethod
    def plan_of(self, choices: Choices) -> Plan: ...

    @abstractmethod
    def run(self, plan: Plan, rate: float, seed: int) -> Sample: ...


def refuse_set_here(knobs: Mapping[str, Scalar]) -> None:
    for name, reason in SET_HERE.items():
        if name in knobs:
            raise UserError(f"knob='{name}={knobs[name]}' {reason}")


def prompts_of(session: Session) -> Iterator[Chunk]:
    """Yield what each round prefills."""
    history = 0
    for prefill, decode, _ in session.rounds:
        yield Chunk(history, prefill)
        history += prefill + decode


def alone_s(cost: StepTimes, sessions: Iterable[Session]) -> float:
    """Seconds to prefill all rounds of the sessions, one prompt per step."""
    return fsum(cost.step_s([chunk], 0, 0) for session in sessions for chunk in prompts_of(session))


CANDIDATES = 8
"""The most deployments that we simulate for a number of GPUs."""
MIXED = 2
"""If decode workers may prefill too, this many candidates are chosen to have about a quarter of the GPUs for prefill alone."""
_MOST_LIVE = 20_000
"""We give up a run with more sessions at once, as ``repro bench`` does."""
WARM_UP = 0.5
"""Share of the arrivals that fill the workers; we do not judge their rounds."""
_HALVINGS = 5
_BUSY = 0.7
"""About how busy co-located workers are at their limit."""


@dataclass(frozen=True, kw_only=True)
class ClusterSite(Site):
    held: str = ""
    """The only deployment that we look at; by default all of them."""
    window_s: tuple[float, float] | None = None
    """Serve only sessions that arrive in this interval, without its end; None serves all."""
    unit = "sessions/s"
    least_prompts = 2

    @cached_property
    def system(self) -> ArSystem:
        system = SYSTEMS.get(self.cell.system)
        assert isinstance(system, ArSystem)
        return system

    @cached_property
    def _settings(self) -> ClusterSettings:
        return resolve(self.cell, self.system)

    @property
    def obtained(self) -> Obtained:
        return self._settings.obtained

    @cached_property
    def _degrees(self) -> tuple[int, ...]:
        """Degrees that hold the longest session of any seed."""
        workload = self._settings.workload
        longest = max(sessions_of(replace(workload, seed=seed)).longest_tokens for seed in range(self.num_seeds))
        return self._settings.ground.hardware.degrees(min_kv_tokens=longest)

    @cached_property
    def sessions(self) -> Sequence[Session]:
        return sessions_of(self._settings.workload).sessions

    @property
    def sessions_at_file_times(self) -> Sequence[Session]:
        """Sessions at the times of their file, in seconds from the first one."""
        return sessions_of(self._replayed_workload).sessions

    @property
    def file_rate(self) -> float | None:
        """Sessions/s at these times; None if all come at one time."""
        return replayed_rate(self._replayed_workload)

    @property
    def _replayed_workload(self) -> SessionWorkloadConfig:
        return replace(self._settings.workload, arrivals=ArrivalConfig(kind="trace"))

    @cached_property
    def _mean_context(self) -> float:
        return fsum(session.context_tokens for session in self.sessions) / len(self.sessions)

    @cached_property
    def _kv_tokens(self) -> float:
        """Tokens of K/V that a session holds, summed over all its decode steps."""
        return fsum(session.context_tokens * session.decode_tokens for session in self.sessions) / len(self.sessions)

    @cached_property
    def alone_s(self) -> float:
        cost, num_sessions = self._settings.ground.hardware.cost(min(self._degrees)), len(self.sessions)
        token_s = cost.step_s([], 1, round(fsum(session.context_tokens for session in self.sessions) / num_sessions))
        elsewhere_s = fsum(entry.delay_s for session in self.sessions for entry in session.rounds[:-1])
        pace_s = max(token_s, (tightest(self.objectives, "itl", "tpot") or 0.0) / _SLOWER)
        decode_s = pace_s * sum(session.decode_tokens for session in self.sessions)
        return (alone_s(cost, self.sessions) + decode_s + elsewhere_s) / num_sessions

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
        self._prepare(_knobs(next(self._deployments(gpus))), 1.0, 0)

    def hardware(self) -> tuple[ModelShape, str]:
        hardware = self._settings.ground.hardware
        return hardware.shape, hardware.gpu.name

    @cached_property
    def axes(self) -> tuple[tuple[Knobs, ...], ...]:
        """The search space besides the deployment: the settings of each axis, with () for the default."""
        axes = () if self.held else axes_of(self.cell, "deployment")
        # Who prefills depends on the deployment more than the other choices do.
        return tuple(sorted(axes, key=lambda axis: "conditional" not in dict(axis[-1])))

    # ---- plans -----------------------------------------------------------------------------------------

    def plans(self, gpus: int) -> tuple[Plan, ...]:
        return tuple(map(self.plan_of, product(map(_knobs, self._deployments(gpus)), *self.axes)))

    def _deployments(self, gpus: int) -> Iterator[Deployment]:
        degrees = self._degrees
        deployments = splits(gpus, degrees, degrees) if self.system.is_disaggregated else replications(gpus, degrees)
        return (deployment for deployment in deployments if self.held in ("", str(deployment)))

    def plan_of(self, choices: Choices) -> Plan:
        deployment = parse_deployment(str(dict(choices[0])["deployment"]))
        schedule = flat(choices[1:])
        (decode,) = deployment.decode
        (prefill,) = deployment.prefill or (None,)
        return Plan(
            name=str(deployment),
            gpus=deployment.gpus,
            knobs=flat(choices),
            most=math.inf
            if prefill is None or not self._is_remote or self._is_unbounded(schedule)
            else self._max_rate(prefill.degree, prefill.replicas),
            prefill=None if prefill is None else (prefill.degree, prefill.replicas),
            decode=(decode.degree, decode.replicas),
            schedule=self._schedule_text(schedule),
            choices=choices,
        )

    def plans_like(self, gpus: int, plan: Plan) -> list[Plan]:
        """Return the plans for this many GPUs that differ from a plan only in the deployment."""
        return [self.plan_of((_knobs(deployment), *plan.choices[1:])) for deployment in self._deployments(gpus)]

    def _is_unbounded(self, schedule: Knobs) -> bool:
        """Whether closed forms give no bound, because a step holds several prompts or decode workers prefill too."""
        default = getattr(self._settings.own, "scheduling", None)
        knobs = self.cell.knob_values | dict(schedule)
        return knobs.get("scheduling", default) == "chunked" or knobs.get("conditional") is not None

    def _schedule_text(self, schedule: Knobs) -> str:
        """Describe a schedule that was searched, including what the question sets of it; empty if the question sets all."""
        knobs, names = self.cell.knob_values | dict(schedule), ("scheduling", "max_num_batched_tokens")
        is_searched = any(name in dict(schedule) for name in names)
        steps = [str(knobs[name]) for name in names if name in knobs and is_searched]
        rest = [f"{name}={value}" for name, value in schedule if name not in names and value is not None]
        return " ".join([*steps, *rest])

    def _max_rate(self, degree: int, replicas: int) -> float:
        """The rate above which these prefill workers have less time than some seed's prompts take, at one prompt per step."""
        # A single session has no rate, so the workers keep up with it at any.
        return min(replicas / busy if busy else math.inf for busy in self._prefill_s[degree])

    @cached_property
    def _is_remote(self) -> bool:
        degree = min(self._degrees)
        knobs = _knobs(Deployment.disaggregated(degree, 1, degree, 1))
        return isinstance(self._prepare(knobs, 1.0, 0).cluster().policies.make_router(0), RemoteOnly)

    @cached_property
    def _prefill_s(self) -> Mapping[int, Sequence[float]]:
        """By degree, for each seed: a remote prefill worker's seconds over the seconds that sessions take to arrive at 1/s."""
        hardware, by_degree = self._settings.ground.hardware, {}
        for degree in self._degrees:
            cost, shares = hardware.cost(degree, is_remote=True), []
            for seed in range(self.num_seeds):
                workload = replace(self._settings.workload, seed=seed)
                sessions = sessions_of(workload).sessions
                span_s = sessions[-1].arrival_s * (workload.arrivals.rate or 1.0)
                shares.append(alone_s(cost, sessions) / span_s if span_s else 0.0)
            by_degree[degree] = shares
        return by_degree

    def ranked(self, gpus: int, rate: float | None) -> Ranked:
        plans = [self.plan_of((_knobs(deployment), *((),) * len(self.axes))) for deployment in self._deployments(gpus)]
        if not plans:
            return Ranked(Space(((),)), 0, 0.0)
        if self.system.is_disaggregated:
            start = self._start(gpus, plans) if rate is None else rate
            values = self._values(gpus, plans, start)
        else:
            values = {plan: -self._guess(plan) for plan in plans}
            start = -min(values.values())
        likely = sorted(plans, key=lambda plan: values[plan])
        keeping_up = [plan for plan in likely if rate is None or plan.most >= rate]
        if self.cell.knob_values.get("conditional") or (self.axes and "conditional" in dict(self.axes[0][-1])):
            # If decode workers take prompts, fewer workers need to prefill alone.
            likely, rest = keeping_up[: CANDIDATES - MIXED], keeping_up[CANDIDATES - MIXED :]
            keeping_up = likely + sorted(rest, key=lambda plan: abs(plan.share - 0.25))
        space = Space((tuple(plan.choices[0] for plan in keeping_up[:CANDIDATES]), *self.axes))
        return Ranked(space, len(plans) * prod(map(len, self.axes)), start)

    def _guess(self, plan: Plan) -> float:
        """A rate at which co-located workers are ``_BUSY``, with as many decodes at once as the ITL objective allows."""
        degree, replicas = plan.decode
        cost, sessions = self._settings.ground.hardware.cost(degree), self.sessions
        limit_s = self._settings.ground.slo.itl_s
        context = self._mean_context

        def step_s(batch: int) -> float:
            base_s, slope_s, floor_s = cost.decode_line(batch)
            return max(base_s + slope_s * batch * context, floor_s)

        capacity = self._settings.ground.hardware.kv_capacity(degree) / context
        batches = [2**power for power in range(11) if 2**power <= capacity]
        batch = max((size for size in batches if step_s(size) <= limit_s), default=1)
        decode_s = sum(session.decode_tokens for session in sessions) * step_s(batch) / batch
        return _BUSY * replicas * len(sessions) / (alone_s(cost, sessions) + decode_s)

    def _start(self, gpus: int, plans: Sequence[Plan]) -> float:
        """By closed forms, the rate at which the best plan's worse phase is at its objective."""
        cost = self._settings.ground.hardware.cost(min(self._degrees))
        high = gpus * len(self.sessions) / alone_s(cost, self.sessions)
        low = high / 64
        for _ in range(_HALVINGS):
            mid_rate = math.sqrt(low * high)
            if min(self._values(gpus, plans, mid_rate).values()) > 1:
                high = mid_rate
            else:
                low = mid_rate
        return low

    def _values(self, gpus: int, plans: Sequence[Plan], rate: float) -> Mapping[Plan, float]:
        """For each plan, the worst of: a phase over its objective, the rate over what its prefill workers or K/V allow."""
        ground = replace(self._settings.ground, num_gpus=gpus)
        workload = PlanningWorkload(sessions=self.sessions, rate=rate, slo=ground.slo)
        table = coefficients(ground.performance, workload, self._degrees, gpus, "closed")
        values = {}
        for plan in plans:
            assert plan.prefill is not None, "co-located workers have no phases apart"
            phases = table.prefill[plan.prefill].of_slo, table.decode[plan.decode].of_slo
            values[plan] = max(*phases, rate / self._max_rate(*plan.prefill), rate / self._kv_rate(*plan.decode))
        return values

    def _kv_rate(self, degree: int, replicas: int) -> float:
        """The rate at which the K/V of sessions fills the workers while they decode, at the pace of a session alone."""
        hardware = self._settings.ground.hardware
        token_s = hardware.cost(degree).step_s([], 1, round(self._mean_context))
        return replicas * hardware.kv_capacity(degree) / (self._kv_tokens * token_s)

    # ---- runs ------------------------------------------------------------------------------------------

    def _prepare(self, knobs: Knobs, rate: float, seed: int) -> ClusterDeployment:
        deployment, _ = self.system.prepare(self._cell(knobs, rate=rate, seed=seed))
        assert isinstance(deployment, ClusterDeployment), "a deployment in words is not searched for"
        return deployment

    def run(self, plan: Plan, rate: float, seed: int) -> Sample:
        deployment = self._prepare(plan.knobs, rate, seed)
        sessions = sessions_of(deployment.settings.workload).sessions
        if self.window_s is not None:
            begin_s, end_s = self.window_s
            sessions = tuple(session for session in sessions if begin_s <= session.arrival_s < end_s)
        cluster: Cluster = deployment.cluster()
        run = cluster.simulate(OpenLoop(sessions=sessions), seed=seed, stop=StopRule(max_live_sessions=_MOST_LIVE))
        return sample_of(run, self.objectives, is_whole=self.is_replayed)


def _knobs(deployment: Deployment) -> Knobs:
    return (("num_gpus", deployment.gpus), ("deployment", str(deployment)))


def sample_of(run: ClusterRun, objectives: Sequence[Objective], *, is_whole: bool = False) -> Sample:
    """Sample the rounds that are ready in the second half of the arrivals, as the first half fills the workers; all rounds if
    ``is_whole``. The load exceeds 1 for a run that was given up, or whose prefills had less time than they took."""
    session = sessions_of_rounds(run.sessions["session_id"], run.rounds)
    ready_s, first_token_s, finished_s = (
        np.asarray(run.rounds[name], dtype=np.float64) for name in ("ready_s", "first_token_s", "finished_s")
    )
    first_s, last_s = run.sessions["arrival_s"][0], run.sessions["arrival_s"][-1]
    counts = (ready_s >= first_s + WARM_UP * (last_s - first_s)) & (ready_s <= last_s)
    if is_whole:
        counts = np.ones(len(ready_s), dtype=np.bool_)
    by_round = {"ttft": first_token_s - ready_s, "e2el": finished_s - ready_s}
    times = {name: Times.of(values[counts]) for name, values in by_round.items()}
    if any(objective.metric in ("itl", "tpot") for objective in objectives):  # computing these takes as long as the run
        assert isinstance(run.gaps, GapLog), "a simulated run logs gaps by worker"
        gaps = run.gaps.of_rounds(counts)
        num_gaps = gaps.num_gaps(len(ready_s))
        times["itl"] = Times(*gaps.spread())
    if any(objective.metric == "tpot" for objective in objectives):
        with np.errstate(invalid="ignore"):  # NaN for a round of one token
            by_round["tpot"] = np.bincount(gaps.row, gaps.gap_s * gaps.tokens, len(ready_s)) / num_gaps
        times["tpot"] = Times.of(by_round["tpot"][counts & (num_gaps > 0)])
    good = counts & ~np.isnan(finished_s)
    for objective in objectives:
        if objective.metric == "itl":
            good &= rounds_within(gaps, len(ready_s), objective.limit_s)
        else:
            # A token that never came keeps no limit; a round of one token has no gap to limit.
            good &= (by_round[objective.metric] <= objective.limit_s) | (objective.metric == "tpot" and num_gaps == 0)
    num_counted, num_missed = (np.bincount(session[mask]) for mask in (counts, counts & ~good))
    end_s, arrival_s = (np.asarray(run.sessions[name], dtype=np.float64) for name in ("finished_s", "arrival_s"))
    stay_s = end_s - arrival_s
    return Sample(
        times=times,
        num_rounds=int(counts.sum()),
        num_good=int(good.sum()),
        num_sessions=int(np.count_nonzero(num_counted)),
        num_good_sessions=int(np.count_nonzero(num_counted) - np.count_nonzero(num_missed)),
        longest_s=float(np.max(times["ttft"].values, initial=0.0)),
        load=math.inf if run.facts["stop_reason"] else run.facts["prefill_load"] or 0.0,
        span_s=last_s - first_s,
        stay_s=math.inf if np.isnan(stay_s).all() else float(np.nanmean(stay_s)),
    )


def rounds_within(gaps: GapLog, num_rounds: int, limit_s: float) -> npt.NDArray[np.bool_]:
    """Return which rounds have a P95 of their own gaps within a limit, or no gap. We sort only the rounds whose P95 lies between a gap
    within the limit and one beyond."""
    num_gaps, num_within = gaps.num_gaps(num_rounds), gaps.num_gaps(num_rounds, limit_s)
    rank = 0.95 * (num_gaps - 1)
    keeps = (num_within > np.ceil(rank)) | (num_gaps == 0)
    is_open = ~keeps & (num_within > np.floor(rank))
    p95_s = gaps.of_rounds(is_open).stats(np.arange(num_rounds), num_rounds)["p95"]
    return keeps | (is_open & (p95_s <= limit_s))


@dataclass(frozen=True, kw_only=True)
class RecordSite(Site):
    """Serves turns or requests, of one round each, on instances of one GPU each. A run is judged by its record."""

    least_gpus = 1
    least_prompts = 20
    rounds_per_prompt = 1.0

    @cached_property
    def _prepared(self) -> tuple[Any, Any]:
        return SYSTEMS.get(self.cell.system).prepare(self.cell)

    @property
    def obtained(self) -> Obtained:
        obtained: Obtained = self._prepared[0].obtained
        return obtained

    @property
    def provenance(self) -> Provenance:
        provenance: Provenance = self._prepared[1].provenance
        return provenance

    def fits(self, gpus: int) -> bool:
        return gpus <= self.most_gpus

    def _record(self, cell: Cell) -> RunRecord:
        deployment, workload = SYSTEMS.get(cell.system).prepare(cell)
        record: RunRecord = deployment.run(workload)
        return record

    def _sample(self, times: Mapping[str, Times], load: float, span_s: float, stay_s: float) -> Sample:
        good = np.all([times[objective.metric].values <= objective.limit_s for objective in self.objectives], axis=0)
        return Sample(
            times=times,
            num_rounds=len(good),
            num_good=int(good.sum()),
            num_sessions=len(good),
            num_good_sessions=int(good.sum()),
            longest_s=float(np.max(times["ttft"].values, initial=0.0)),
            load=load,
            span_s=span_s,
            stay_s=stay_s,
        )


@dataclass(frozen=True, kw_only=True)
class InstanceSite(RecordSite):
    unit = "turns/s"

    @property
    def most_gpus(self) -> int:
        return int(self._prepared[0].settings.part.most_instances)

    def check(self, gpus: int) -> None:
        SYSTEMS.get(self.cell.system).prepare(self.cell_of(self.plans(gpus)[0], 1.0, 0))

    def hardware(self) -> tuple[ModelShape, str]:
        settings = self._prepared[0].settings
        assert settings.part.gpu is not None, "a measured platform is refused"
        return settings.simulated_shape, str(settings.part.gpu)

    @property
    def sessions(self) -> Sequence[Session]:
        (stream,) = self._prepared[1].streams
        sessions: Sequence[Session] = stream.sessions
        return sessions

    @property
    def alone_s(self) -> float:
        num_rounds = sum(len(session.rounds) for session in self.sessions)
        return alone_s(self._prepared[0].settings.cost, self.sessions) / num_rounds

    def _axes_on(self, gpus: int) -> tuple[tuple[Knobs, ...], ...]:
        """The axes for this many instances, the first of which holds their only deployment."""
        instances = (("num_instances", gpus),)
        return (instances,), *axes_of(self._cell(instances))

    def plan_of(self, choices: Choices) -> Plan:
        gpus = int(str(dict(choices[0])["num_instances"]))
        schedule = setting_text(flat(choices[1:]))
        return Plan(f"TP1x{gpus}", gpus, flat(choices), math.inf, None, (1, gpus), schedule, choices)

    def plans(self, gpus: int) -> tuple[Plan, ...]:
        return tuple(map(self.plan_of, product(*self._axes_on(gpus))))

    def ranked(self, gpus: int, rate: float | None) -> Ranked:
        space = Space(self._axes_on(gpus))
        return Ranked(space, space.num, gpus / self.alone_s)

    def run(self, plan: Plan, rate: float, seed: int) -> Sample:
        record = self._record(self.cell_of(plan, rate, seed))
        arrival_s = column(record, "arrival_s")
        late_s = column(record, "finished_s") - arrival_s
        is_sound = not any(reason for check in PREFILL.checks for reason in check(record))
        load = (busy_share(record) or 0.0) if is_sound else math.inf
        span_s = float(arrival_s.max() - arrival_s.min())
        return self._sample({"ttft": Times.of(late_s[counted(record)])}, load, span_s, float(np.nanmean(late_s)))


@dataclass(frozen=True, kw_only=True)
class RequestSite(RecordSite):
    """A diffusion LLM on engines of one GPU each. Requests choose an engine at random, so we simulate one at its share of the rate."""

    unit = "requests/s"
    most_gpus = 4096

    @property
    def most_prompts(self) -> int:
        return len(self._prepared[1].requests) if self.is_replayed else super().most_prompts

    def fits(self, gpus: int) -> bool:
        require(
            gpus == 1 or not self.is_replayed,
            f"gpus={gpus}: the times of arrivals='trace' are of all requests, which part among several GPUs here: use --gpus 1",
        )
        return super().fits(gpus)

    def check(self, gpus: int) -> None:
        short_site = self.sized_for(gpus, 1.0, self.least_prompts)
        short_site.run(short_site.plans(gpus)[0], 1.0, 0)

    def hardware(self) -> tuple[ModelShape, str]:
        settings = self._prepared[0].settings
        return settings.shape, str(platform(self.cell.platform).gpu)

    @property
    def sessions(self) -> Sequence[Session]:
        raise AssertionError("requests are no sessions")

    @cached_property
    def alone_s(self) -> float:
        record = self._record(replace(self._cell([("num_prompts", 1)]), rate=None))
        return float(column(record, "finished_s")[0])

    def plan_of(self, choices: Choices) -> Plan:
        gpus = int(str(dict(choices[0])["gpus"]))
        return Plan(f"TP1x{gpus}", gpus, (), math.inf, None, (1, gpus), choices=choices)

    def is_possible(self, choices: Choices) -> bool:
        return True

    def plans(self, gpus: int) -> tuple[Plan, ...]:
        return (self.plan_of(((("gpus", gpus),),)),)

    def ranked(self, gpus: int, rate: float | None) -> Ranked:
        return Ranked(Space((((("gpus", gpus),),),)), 1, gpus / self.alone_s)

    def cell_of(self, plan: Plan, rate: float, seed: int) -> Cell:
        return self._cell(plan.knobs, rate=rate / plan.gpus, seed=seed)

    def sized_for(self, gpus: int, rate: float | None, num_prompts: int | None) -> Self:
        return super().sized_for(1, None if rate is None else rate / gpus, num_prompts)

    def run(self, plan: Plan, rate: float, seed: int) -> Sample:
        """Judge the requests that come in the second half of the arrivals. The load exceeds 1 if arrivals do not last ``LASTING`` times
        as long as a request, as when any number comes at once."""
        record = self._record(self.cell_of(plan, rate, seed))
        arrival_s = column(record, "arrival_s")
        span_s = float(arrival_s.max() - arrival_s.min())
        latencies = {
            name: column(record, stamp) - arrival_s
            for name, stamp in (("ttft", "first_output_s"), ("e2el", "finished_s"))
        }
        stay_s = float(np.nanmean(latencies["e2el"]))
        counts = arrival_s >= arrival_s.min() + (0 if self.is_replayed else WARM_UP * span_s)
        times = {name: Times.of(values[counts]) for name, values in latencies.items()}
        load = LASTING * stay_s / span_s if span_s else math.inf
        return self._sample(times, load, span_s, stay_s)
