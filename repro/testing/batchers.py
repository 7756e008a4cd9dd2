"""Properties of a batching policy of autoregressive systems, on the queue that it takes prefills from. Also those of a router: ``route``
between decode and prefill workers, or ``pick`` among prefill instances."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from engines.policies.own import accepted_arguments
from engines.policies.views import Batching, OpenQueue, PrefillQueue
from repro.testing.prefills import (
    SLO,
    STEPS,
    Linear,
    PrefillExample,
    Sessions,
    Step,
    Watched,
    check_sessions,
    draw_session_siege,
    draw_sessions,
    draw_siege,
    draw_turns,
    stays_of,
    unchanged_decisions,
)
from repro.testing.properties import (
    Bound,
    Kind,
    PlugIn,
    Property,
    Source,
    Stay,
    bound_of,
    check_waits,
    made,
    no_starvation,
)

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
