"""Properties of a batching policy of autoregressive systems, on the queue that it takes prefills from. Also those of a router: ``route``
between decode and prefill workers, or ``pick`` among prefill instances. Both are judged in simulated clusters with their ledger."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Self

from engines.cluster.decode import DecodeWorker
from engines.cluster.record import ClusterRun, Table
from engines.cluster.sessions import OpenLoop, Round, Session
from engines.cluster.simulation import DecodeSimulation
from engines.cluster.worker import Parts, PrefillWorker
from engines.cost.roofline import DecodeLine
from engines.laps.cluster import OpenTurns, PrefillCluster, Turn
from engines.laps.latency import StepModel
from engines.laps.system import InstancesInTurn, PrefillSystem, Spatial
from engines.policies.batching import ONE_BY_ONE
from engines.policies.own import accepted_arguments
from engines.policies.routing import Binder, LeastKvMemory, Local, Router
from engines.policies.views import Batching, Chunk, NextStep, OpenQueue, PrefillQueue, Share, Situation, Slo
from repro.testing.properties import (
    Bound,
    Kind,
    PlugIn,
    Property,
    Source,
    Stay,
    bound_of,
    check_alike,
    check_waits,
    made,
    no_starvation,
)

STEPS = StepModel(base_s=5e-3, request_s=0.0, floor_s=0.0, token_s=1e-4, alpha=0.0, history_s=0.0, shapes={})
"""The time of a step. Policies that ask for a model get this one."""
DECODE_S = 8e-3
SLO = Slo(ttft_s=0.4, itl_s=0.05)


class Linear:
    """The cost of a step in any mode, and the estimates that policies get for a prefill and a transfer."""

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        prefill_s = STEPS.step_s(chunks, 0, 0) if chunks else 0.0
        return prefill_s + (DECODE_S if decoding else 0.0)

    def decode_line(self, decoding: int) -> DecodeLine:
        return DecodeLine(DECODE_S, 0.0, 0.0)

    def prefill_s(self, history: int, tokens: int, degree: int) -> float:
        return STEPS.prefill_s(history, tokens)

    def transfer_s(self, tokens: int, source_degree: int, target_degree: int) -> float:
        return 1e-6 * tokens


class Step(NamedTuple):
    start_s: float
    shares: tuple[tuple[int, int], ...]
    """(task id, tokens)"""
    decoding: int
    """Sequences that advance in the same step."""
    needs: int
    """Tokens of K/V that the step admits."""
    room: int


class Watched:
    def __init__(self, batching: Batching) -> None:
        self.steps: list[Step] = []
        self.batching = batching
        # The ledger's errors name the class of the policy.
        self.__class__ = type(type(batching).__name__, (Watched,), {})  # type: ignore[assignment]

    def next_step(self, at: Situation, now: float) -> NextStep:
        begun_ids = {task.task_id for task in at.begun}
        plan = self.batching.next_step(at, now)
        if isinstance(plan, NextStep) and all(isinstance(share, Share) for share in plan.shares) and plan.shares:
            shares = tuple((task.task_id, tokens) for task, tokens in plan.shares)
            needs = sum(at.need_of(task) for task, _ in plan.shares if task.task_id not in begun_ids)
            self.steps.append(Step(now, shares, at.decoding if plan.decodes else 0, needs, at.room))
        return plan


# ---- decisions that later events and other names must not change -----------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PrefillCase:
    cap: int
    """max_num_batched_tokens, for policies that take or have it."""
    max_num_seqs: int

    @property
    def arrivals(self) -> tuple[Any, ...]:
        """The arrivals, each with its ``arrival_s`` and ``session_id``."""
        raise NotImplementedError

    def until(self, time_s: float) -> Self:
        """The case without arrivals at or after ``time_s``."""
        return self.of(arrival for arrival in self.arrivals if arrival.arrival_s < time_s)

    def named_otherwise(self, factor: int) -> Self:
        raise NotImplementedError

    def of(self, arrivals: Iterable[Any]) -> Self:
        raise NotImplementedError


def unchanged_decisions(
    cases: Callable[[Source, Any], PrefillCase],
    decided: Callable[[Any, Any], Sequence[Any]],
    said: Callable[[int, Any, Any], str | None],
    count: str,
) -> tuple[Property[Any], Property[Any]]:
    """The properties causality and independence of ids. Each decision is a tuple that begins with its time."""

    def cut(source: Source, subject: Any) -> tuple[PrefillCase, float]:
        case = cases(source, subject)
        return case, source.one_of(case.arrivals).arrival_s

    def causality(subject: Any, case_and_time: tuple[PrefillCase, float]) -> None:
        """Runs the whole case first. If the policy kept state elsewhere, the second run would then know its future."""
        case, time_s = case_and_time
        prefix = case.until(time_s)
        if not prefix.arrivals:
            return
        whole, part = ([each for each in decided(subject, one) if each[0] < time_s] for one in (case, prefix))
        check_alike(whole, part, f"nothing comes from {time_s:.4g} s on", said=said, count=count)

    def otherwise(source: Source, subject: Any) -> tuple[PrefillCase, int]:
        return cases(source, subject), source.one_of((1, 37, 1008))

    def same_names(subject: Any, case_and_factor: tuple[PrefillCase, int]) -> None:
        case, factor = case_and_factor
        ids = sorted({arrival.session_id for arrival in case.arrivals})
        names = ", ".join(f"{session_id} is {other_name(session_id, factor)}" for session_id in ids)
        renamed = decided(subject, case.named_otherwise(factor))
        check_alike(decided(subject, case), renamed, f"ids of sessions are others ({names})", said=said, count=count)

    return (
        Property(name="causality", draw=cut, check=causality),
        Property(name="independence of ids", draw=otherwise, check=same_names),
    )


def other_name(session_id: int, factor: int) -> int:
    """Another id, by a factor modulo a prime. A factor of 1,008 reverses the order."""
    return (factor * (session_id + 1)) % 1009


# ---- prefill instances -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PrefillExample(PrefillCase):
    """An example of the load on prefill instances."""

    turns: tuple[Turn, ...]
    num_instances: int = 1
    """With two or more, the first serves the short pool and the others the long one, for routers that look at pools."""
    shares_cache: bool = True

    def simulate(
        self,
        batching: Batching = ONE_BY_ONE,
        make_queue: Callable[[], PrefillQueue] = PrefillQueue,
        make_router: Callable[[], Any] = InstancesInTurn,
    ) -> Table:
        """The table of requests, in order of arrival."""
        system = PrefillSystem(
            make_batching=lambda: batching,
            make_queue=make_queue,
            make_router=make_router,
            work_s=STEPS.work_s,
            spatial=None if self.num_instances == 1 else Spatial(num_short=1, pooling="each"),
        )
        cluster = PrefillCluster(
            system=system,
            cost=Linear(),
            num_instances=self.num_instances,
            cache="shared" if self.shares_cache else "instance",
        )
        return cluster.simulate(OpenTurns(turns=self.turns)).requests

    @property
    def arrivals(self) -> tuple[Turn, ...]:
        return self.turns

    def of(self, arrivals: Iterable[Turn]) -> "PrefillExample":
        return replace(self, turns=tuple(arrivals))

    def named_otherwise(self, factor: int) -> "PrefillExample":
        return self.of(turn._replace(session_id=other_name(turn.session_id, factor)) for turn in self.turns)


def draw_turns(source: Source, cap: int, **fields: Any) -> PrefillExample:
    """Draw up to a dozen turns, in bursts."""
    now_ms, turns = 0, []
    for index in range(source.whole(1, 12)):
        now_ms += source.one_of((0, 0, 1, 7, 40, 200))
        tokens = source.whole(1, source.one_of((cap, max(1, cap // 16))))
        turns.append(_turn(source, now_ms * 1e-3, index, tokens))
    return PrefillExample(turns=tuple(turns), cap=cap, max_num_seqs=source.whole(1, 6), **fields)


def draw_siege(source: Source, cap: int, **fields: Any) -> PrefillExample:
    """Draw one turn after a few others, and then a stream of equal turns that come faster than they are served."""
    lengths = (max(1, cap // 16), max(1, cap // 4), cap)
    turns = [_turn(source, 0.0, index, source.one_of(lengths)) for index in range(source.whole(1, 3))]
    turns.append(_turn(source, source.whole(0, 5) * 1e-3, len(turns), source.one_of(lengths)))
    tokens, turn, begin_s = source.one_of(lengths), source.one_of((0, 1)), turns[-1].arrival_s
    # This is too fast even for policies that run many prefills in a step.
    gap_s = 0.8 * STEPS.token_s * tokens / fields.get("num_instances", 1)
    for index in range(max(80, 40 * cap // (tokens + 50))):
        turns.append(Turn(begin_s + gap_s * index, len(turns), turn, turn, tokens))
    return PrefillExample(turns=tuple(turns), cap=cap, max_num_seqs=source.whole(1, 6), **fields)


def _turn(source: Source, arrival_s: float, index: int, tokens: int) -> Turn:
    """Draw the first turn of a conversation, or another turn of an earlier one."""
    if index and source.one_of((False, False, True)):
        return Turn(arrival_s, source.whole(0, index - 1), 1, source.whole(1, 300), tokens)
    return Turn(arrival_s, index, 0, 0, tokens)


def stays_of(requests: Table) -> list[Stay]:
    """The stay of every request. Raises AssertionError if one is never prefilled."""
    stays = []
    columns = (requests[name] for name in ("request_id", "arrival_s", "finished_s", "tokens"))
    for request_id, arrival_s, finished_s, tokens in zip(*columns, strict=True):
        if finished_s is None:
            raise AssertionError(
                f"request {request_id}, which comes at {arrival_s:.4g} s with {tokens} tokens, is never prefilled"
            )
        stays.append(Stay(request_id, arrival_s, finished_s, STEPS.prefill_s(0, tokens)))
    return stays


# ---- workers that decode -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sessions(PrefillCase):
    """An example of the load on a cluster that decodes. Prefill workers are numbered from 100."""

    sessions: tuple[Session, ...]
    num_homes: int = 1
    num_prefills: int = 0
    kv_capacity: int = 10**9

    def simulate(
        self,
        *,
        router: Router | None = None,
        batching: Batching = ONE_BY_ONE,
        make_queue: Callable[[], PrefillQueue] = PrefillQueue,
        binder: Binder | None = None,
    ) -> ClusterRun:
        cluster = DecodeSimulation(binder=binder or LeastKvMemory(), router=router or Local(), estimator=Linear())
        for index in range(self.num_homes):
            parts = Parts(worker_id=index, cost=Linear(), queue=make_queue(), batching=batching)
            cluster.add(DecodeWorker(cluster, kv_capacity=self.kv_capacity, **parts))
        for index in range(self.num_prefills):
            cluster.add(PrefillWorker(cluster, worker_id=100 + index, cost=Linear(), queue=PrefillQueue()))
        return cluster.run(OpenLoop(sessions=self.sessions))

    @property
    def arrivals(self) -> tuple[Session, ...]:
        return self.sessions

    def of(self, arrivals: Iterable[Session]) -> "Sessions":
        return replace(self, sessions=tuple(arrivals))

    def named_otherwise(self, factor: int) -> "Sessions":
        return self.of(replace(session, session_id=other_name(session.session_id, factor)) for session in self.sessions)


def draw_sessions(source: Source, cap: int, *, is_tight: bool = False, **fields: Any) -> Sessions:
    """Draw up to eight sessions of up to three rounds. With ``is_tight``, a worker has K/V for the largest session and little more."""
    now_ms, sessions = 0, []
    for index in range(source.whole(1, 8)):
        now_ms += source.one_of((0, 0, 1, 30, 200))
        rounds = [
            Round(source.whole(1, cap), source.whole(1, 30), source.one_of((0.0, 0.013, 0.3)))
            for _ in range(source.whole(1, 3))
        ]
        sessions.append(Session(index, now_ms * 1e-3, tuple(rounds)))
    if is_tight:
        fields["kv_capacity"] = max(session.context_tokens for session in sessions) + 1 + source.whole(0, 2 * cap)
    return Sessions(sessions=tuple(sessions), cap=cap, max_num_seqs=8, **fields)


def draw_session_siege(source: Source, cap: int, **fields: Any) -> Sessions:
    turns = draw_siege(source, cap, num_instances=fields.get("num_prefills", 1)).turns
    num_tokens = source.whole(1, 8)
    sessions = [Session(index, turn.arrival_s, (Round(turn.tokens, num_tokens),)) for index, turn in enumerate(turns)]
    return Sessions(sessions=tuple(sessions), cap=cap, max_num_seqs=8, **fields)


def check_sessions(run: ClusterRun, sessions: Sequence[Session]) -> None:
    """Check that every round of every session is served once, and that every token of its prefill is computed."""
    for which, status in zip(run.sessions["session_id"], run.sessions["status"], strict=True):
        if status != "ok":
            raise AssertionError(
                f"session {which} is not finished when nothing happens any more, at {run.facts['end_s']:.4g} s"
            )
    due = sorted((session.session_id, index) for session in sessions for index in range(len(session.rounds)))
    if sorted(zip(run.rounds["session_id"], run.rounds["round"], strict=True)) != due:
        raise AssertionError(f"{len(run.rounds['round'])} rounds were served, {len(due)} are due")
    for which, computed, tokens in zip(
        *(run.tasks[name] for name in ("task_id", "computed_tokens", "tokens")), strict=True
    ):
        if computed is None or computed < tokens:
            raise AssertionError(f"prefill {which} ends with {computed} tokens computed, {tokens} are due")


# -- batching policies ------------------------------------------------------------------------------------

_SIZES = ("max_num_batched_tokens", "max_num_seqs")
_LONGEST = 2048
"""Tokens of the longest prompt if a policy has no token budget."""


@dataclass(frozen=True, kw_only=True)
class BatchingPolicy(PlugIn):
    """The policy that ``make`` is, or makes. ``make`` gets those of ``max_num_batched_tokens``, ``max_num_seqs``, ``model`` and ``slo``
    that it takes."""

    queue: Callable[[], PrefillQueue] = OpenQueue
    longest_wait: Bound | None = None
    title = "batching policy"
    methods = ("next_step",)
    told = f"of {' and '.join(_SIZES)}, model and slo"

    def first(self) -> Batching:
        return self.policy(_LONGEST, 8)

    def policy(self, cap: int, max_num_seqs: int) -> Batching:
        sizes = dict(zip(_SIZES, (cap, max_num_seqs), strict=True))
        batching: Batching = made(self.make, **sizes, model=STEPS, slo=SLO)
        return batching

    def watched(self, case: PrefillExample | Sessions) -> Watched:
        return Watched(self.policy(case.cap, case.max_num_seqs))

    @cached_property
    def takes_cap(self) -> bool:
        return _SIZES[0] in accepted_arguments(self.make, *_SIZES)

    @cached_property
    def takes_places(self) -> bool:
        return _SIZES[1] in accepted_arguments(self.make, *_SIZES)

    @cached_property
    def own_cap(self) -> int | None:
        return None if self.takes_cap else getattr(self.one, _SIZES[0], None)

    @cached_property
    def bound(self) -> Bound:
        return bound_of(self.one, self.longest_wait)

    def cap(self, source: Source) -> int:
        """The token budget of an example. No prompt is longer, because a policy may run prompts whole."""
        return source.whole(16, 512) if self.takes_cap else self.own_cap or _LONGEST


def _turns(source: Source, subject: BatchingPolicy) -> PrefillExample:
    return draw_turns(source, subject.cap(source))


def _besieged(source: Source, subject: BatchingPolicy) -> PrefillExample:
    return draw_siege(source, subject.cap(source))


def _of_cap(source: Source, subject: BatchingPolicy, *, is_tight: bool = False) -> Sessions:
    return draw_sessions(source, subject.cap(source), is_tight=is_tight)


def _steps(subject: BatchingPolicy, turns: PrefillExample) -> list[Step]:
    watched = subject.watched(turns)
    turns.simulate(watched, subject.queue)
    return watched.steps


def _apart(index: int, step: Step, other: Step) -> str | None:
    if (step.start_s, step.shares) == (other.start_s, other.shares):
        return None
    theirs = f"{_listed(other.shares)} at {other.start_s:.4g} s"
    return f"the step at {step.start_s:.4g} s runs prefills {_listed(step.shares)}, and {theirs}"


def _conservation(subject: BatchingPolicy, case: Sessions) -> None:
    run = case.simulate(batching=subject.watched(case), make_queue=subject.queue)
    check_sessions(run, case.sessions)


def _cap(subject: BatchingPolicy, case: PrefillExample) -> None:
    for step in _steps(subject, case):
        tokens = sum(tokens for _, tokens in step.shares) + step.decoding
        if tokens > case.cap:
            raise AssertionError(
                f"the step at {step.start_s:.4g} s computes {tokens} tokens of prefills {_listed(step.shares)}, "
                f"max_num_batched_tokens={case.cap}"
            )
        if subject.takes_places and len(step.shares) > case.max_num_seqs:
            raise AssertionError(
                f"the step at {step.start_s:.4g} s runs {len(step.shares)} prefills, max_num_seqs={case.max_num_seqs}"
            )


def _memory(subject: BatchingPolicy, case: Sessions) -> None:
    watched = subject.watched(case)
    run = case.simulate(batching=watched, make_queue=subject.queue)
    for step in watched.steps:
        if step.needs > step.room:
            raise AssertionError(
                f"the step at {step.start_s:.4g} s admits prefills {_listed(step.shares)} with {step.needs} tokens of K/V, there "
                f"is room for {step.room}"
            )
    check_sessions(run, case.sessions)


def _listed(shares: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{task_id} ({tokens} tokens)" for task_id, tokens in shares)


def _no_starvation(subject: BatchingPolicy, case: PrefillExample) -> None:
    watched = subject.watched(case)
    stays = stays_of(case.simulate(watched, subject.queue))
    step_s = max(STEPS.prefill_s(0, sum(tokens for _, tokens in step.shares)) for step in watched.steps)
    check_waits(stays, step=step_s, bound=bound_of(watched.batching, subject.longest_wait), unit="s")


def _no_cap(subject: BatchingPolicy) -> str | None:
    return None if subject.takes_cap or subject.own_cap else "it takes and has no max_num_batched_tokens"


_CAUSALITY, _INDEPENDENCE = unchanged_decisions(_turns, _steps, _apart, "steps begin")
BATCHER: Kind[BatchingPolicy] = Kind(
    name="batcher",
    properties=(
        Property(name="conservation", draw=_of_cap, check=_conservation),
        Property(name="cap", draw=_turns, check=_cap, without=_no_cap),
        Property(name="little memory", draw=partial(_of_cap, is_tight=True), check=_memory),
        _CAUSALITY,
        no_starvation(_besieged, _no_starvation),
        _INDEPENDENCE,
    ),
)


# -- routers ----------------------------------------------------------------------------------------------

_LONGEST_ROUTED = 1024
"""Tokens of the longest prompt."""


@dataclass(frozen=True, kw_only=True)
class Routing(PlugIn):
    """The router that ``make`` is, or makes. ``make`` gets those of ``model``, ``slo`` and ``seed`` that it takes."""

    longest_wait: Bound | None = None
    title = "router"
    methods = ("route", "pick")
    told = "of model, slo and seed"

    def first(self) -> Any:
        return self.router()

    def router(self) -> Any:
        return made(self.make, model=Linear(), slo=SLO, seed=0)

    @cached_property
    def routes(self) -> bool:
        return hasattr(self.one, "route")

    @cached_property
    def bound(self) -> Bound:
        return bound_of(self.one, self.longest_wait)


def _placed(subject: Routing, case: PrefillExample | Sessions) -> list[tuple[float, int]]:
    """(time of routing, worker) of every prefill, in order of routing."""
    if isinstance(case, Sessions):
        tasks = case.simulate(router=subject.router()).tasks
        return list(zip(tasks["ready_s"], tasks["worker_id"], strict=True))
    requests = case.simulate(make_router=subject.router)
    return list(zip(requests["arrival_s"], requests["instance"], strict=True))


def _routed_apart(index: int, one: tuple[float, int], other: tuple[float, int]) -> str | None:
    if one[1] == other[1]:
        return None
    return f"prefill {index}, of {one[0]:.4g} s, goes to worker {one[1]}, and to {other[1]}"


def _cases(source: Source, subject: Routing) -> PrefillExample | Sessions:
    if subject.routes:
        return draw_sessions(source, _LONGEST_ROUTED, num_homes=source.whole(1, 2), num_prefills=source.whole(1, 3))
    shares_cache = source.one_of((False, True))
    return draw_turns(source, _LONGEST_ROUTED, num_instances=source.whole(2, 4), shares_cache=shares_cache)


def _routed_siege(source: Source, subject: Routing) -> PrefillExample | Sessions:
    if subject.routes:
        return draw_session_siege(source, _LONGEST_ROUTED, num_homes=1, num_prefills=source.whole(1, 2))
    return draw_siege(source, _LONGEST_ROUTED, num_instances=source.whole(2, 3))


def _routed_once(subject: Routing, case: PrefillExample | Sessions) -> None:
    """Each prefill goes to an existing worker, and is computed there once."""
    if isinstance(case, Sessions):
        check_sessions(case.simulate(router=subject.router()), case.sessions)
    else:
        stays_of(case.simulate(make_router=subject.router))


def _routed_waits(subject: Routing, case: PrefillExample | Sessions) -> None:
    if isinstance(case, Sessions):
        tasks = case.simulate(router=subject.router()).tasks
        columns = (tasks[name] for name in ("task_id", "ready_s", "finished_s", "tokens"))
        stays = [
            Stay(task_id, ready_s, finished_s, Linear().prefill_s(0, tokens, 1))
            for task_id, ready_s, finished_s, tokens in zip(*columns, strict=True)
        ]
    else:
        stays = stays_of(case.simulate(make_router=subject.router))
    check_waits(stays, step=max(stay.work for stay in stays), bound=subject.bound, unit="s")


_ROUTED_CAUSALITY, _ROUTED_INDEPENDENCE = unchanged_decisions(_cases, _placed, _routed_apart, "prefills are routed")
ROUTER: Kind[Routing] = Kind(
    name="router",
    properties=(
        Property(name="conservation", draw=_cases, check=_routed_once),
        _ROUTED_CAUSALITY,
        no_starvation(_routed_siege, _routed_waits),
        _ROUTED_INDEPENDENCE,
    ),
)
