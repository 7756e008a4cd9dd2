"""What a router of autoregressive systems is held to: ``route`` between decode and prefill workers, or ``pick`` among prefill
instances."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from repro.testing.prefills import (
    SLO,
    Linear,
    PrefillExample,
    Sessions,
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

_LONGEST = 1024
"""Tokens of the longest prompt."""


@dataclass(frozen=True, kw_only=True)
class Routing(PlugIn):
    """The router that ``make`` is, or gives; it is told ``model``, ``slo`` and ``seed`` where it takes them."""

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
    """(when it is routed, worker) of every prefill, in that order."""
    if isinstance(case, Sessions):
        tasks = case.simulate(router=subject.router()).tasks
        return list(zip(tasks["ready_s"], tasks["worker_id"], strict=True))
    requests = case.simulate(make_router=subject.router)
    return list(zip(requests["arrival_s"], requests["instance"], strict=True))


def _apart(index: int, one: tuple[float, int], other: tuple[float, int]) -> str | None:
    if one[1] == other[1]:
        return None
    return f"prefill {index}, of {one[0]:.4g} s, goes to worker {one[1]}, and to {other[1]}"


def _cases(source: Source, subject: Routing) -> PrefillExample | Sessions:
    if subject.routes:
        return draw_sessions(source, _LONGEST, num_homes=source.whole(1, 2), num_prefills=source.whole(1, 3))
    shares_cache = source.one_of((False, True))
    return draw_turns(source, _LONGEST, num_instances=source.whole(2, 4), shares_cache=shares_cache)


def _besieged(source: Source, subject: Routing) -> PrefillExample | Sessions:
    if subject.routes:
        return draw_session_siege(source, _LONGEST, num_homes=1, num_prefills=source.whole(1, 2))
    return draw_siege(source, _LONGEST, num_instances=source.whole(2, 3))


def _conservation(subject: Routing, case: PrefillExample | Sessions) -> None:
    """Each prefill goes to a worker that there is, and is computed there once."""
    if isinstance(case, Sessions):
        check_sessions(case.simulate(router=subject.router()), case.sessions)
    else:
        stays_of(case.simulate(make_router=subject.router))


def _no_starvation(subject: Routing, case: PrefillExample | Sessions) -> None:
    if isinstance(case, Sessions):
        tasks = case.simulate(router=subject.router()).tasks
        columns = (tasks[name] for name in ("task_id", "ready_s", "finished_s", "tokens"))
        stays = [
            Stay(which, ready_s, finished_s, Linear().prefill_s(0, tokens, 1))
            for which, ready_s, finished_s, tokens in zip(*columns, strict=True)
        ]
    else:
        stays = stays_of(case.simulate(make_router=subject.router))
    check_waits(stays, step=max(stay.work for stay in stays), bound=subject.bound, unit="s")


_CAUSALITY, _INDEPENDENCE = unchanged_decisions(_cases, _placed, _apart, "prefills are routed")
ROUTER: Kind[Routing] = Kind(
    name="router",
    properties=(
        Property(name="conservation", draw=_cases, check=_conservation),
        _CAUSALITY,
        no_starvation(_besieged, _no_starvation),
        _INDEPENDENCE,
    ),
)
