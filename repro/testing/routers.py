"""What a router of autoregressive systems is held to: ``route`` between decode and prefill workers, or ``pick`` among prefill
instances."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engines.errors import RunError, UserError
from engines.policies.views import Slo
from repro.testing.examples import Source
from repro.testing.prefills import (
    SLO,
    Linear,
    Sessions,
    Turns,
    check_sessions,
    draw_session_siege,
    draw_sessions,
    draw_siege,
    draw_turns,
    other_name,
    stays_of,
)
from repro.testing.properties import Bound, Kind, Property, Stay, bound_of, check_waits, made, no_starvation

_LONGEST = 1024
"""Tokens of the longest prompt."""
_ASKED = ("route", "pick")


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The router that ``make`` is, or gives; it is told ``model``, ``slo`` and ``seed`` where it takes them."""

    make: Any
    longest_wait: Bound | None = None
    slo: Slo = SLO

    def __post_init__(self) -> None:
        if not any(hasattr(self._one, name) for name in _ASKED):
            raise UserError(
                f"{self._one!r:.80} is no router, it has no route() and no pick(): name one, or what makes one"
            )

    @cached_property
    def _one(self) -> Any:
        try:
            return self.router()
        except RunError as error:
            raise UserError(f"no router is made of model, slo and seed: {error}") from error

    def router(self) -> Any:
        return made(self.make, model=Linear(), slo=self.slo, seed=0)

    @cached_property
    def routes(self) -> bool:
        return hasattr(self._one, "route")

    @cached_property
    def bound(self) -> Bound:
        return bound_of(self._one, self.longest_wait)

    def placed(self, case: Turns | Sessions) -> list[tuple[float, int]]:
        """(when it is routed, worker) of every prefill, in that order."""
        if isinstance(case, Sessions):
            tasks = case.simulate(router=self.router()).tasks
            return list(zip(tasks["ready_s"], tasks["worker_id"], strict=True))
        requests = case.simulate(make_router=self.router)
        return list(zip(requests["arrival_s"], requests["instance"], strict=True))


def _cases(source: Source, subject: Routing) -> Turns | Sessions:
    if subject.routes:
        return draw_sessions(source, _LONGEST, num_homes=source.whole(1, 2), num_prefills=source.whole(1, 3))
    shares_cache = source.one_of((False, True))
    return draw_turns(source, _LONGEST, num_instances=source.whole(2, 4), shares_cache=shares_cache)


def _besieged(source: Source, subject: Routing) -> Turns | Sessions:
    if subject.routes:
        return draw_session_siege(source, _LONGEST, num_homes=1, num_prefills=source.whole(1, 2))
    return draw_siege(source, _LONGEST, num_instances=source.whole(2, 3))


def _cut(source: Source, subject: Routing) -> tuple[Turns | Sessions, float]:
    case = _cases(source, subject)
    arrivals = case.sessions if isinstance(case, Sessions) else case.turns
    return case, source.one_of([each.arrival_s for each in arrivals])


def _otherwise(source: Source, subject: Routing) -> tuple[Turns | Sessions, int]:
    return _cases(source, subject), source.one_of((1, 37, 1008))


def _conservation(subject: Routing, case: Turns | Sessions) -> None:
    """Each prefill goes to a worker that there is, and is computed there once."""
    if isinstance(case, Sessions):
        check_sessions(case.simulate(router=subject.router()), case.sessions)
    else:
        stays_of(case.simulate(make_router=subject.router))


def _causality(subject: Routing, case_and_time: tuple[Turns | Sessions, float]) -> None:
    """All of it runs first: what the router keeps of it elsewhere would be the future of the second run."""
    case, time_s = case_and_time
    whole, cut = (
        [(ready_s, worker) for ready_s, worker in subject.placed(each) if ready_s < time_s]
        for each in (case, case.until(time_s))
    )
    _check_alike(whole, cut, f"nothing comes from {time_s:.4g} s on")


def _same_names(subject: Routing, case_and_factor: tuple[Turns | Sessions, int]) -> None:
    case, factor = case_and_factor
    arrivals = case.sessions if isinstance(case, Sessions) else case.turns
    said = ", ".join(
        f"{which} is {other_name(which, factor)}" for which in sorted({each.session_id for each in arrivals})
    )
    where = f"ids of sessions are others ({said})"
    _check_alike(subject.placed(case), subject.placed(case.named_otherwise(factor)), where)


def _check_alike(placed: Sequence[tuple[float, int]], others: Sequence[tuple[float, int]], where: str) -> None:
    for which, ((ready_s, worker), (_, other)) in enumerate(zip(placed, others, strict=False)):
        if worker != other:
            raise AssertionError(
                f"prefill {which}, of {ready_s:.4g} s, goes to worker {worker}, and to {other} where {where}"
            )
    if len(placed) != len(others):
        raise AssertionError(f"{len(placed)} prefills are routed, and {len(others)} where {where}")


def _no_starvation(subject: Routing, case: Turns | Sessions) -> None:
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


ROUTER: Kind[Routing] = Kind(
    name="router",
    properties=(
        Property(name="conservation", draw=_cases, check=_conservation),
        Property(name="causality", draw=_cut, check=_causality),
        no_starvation(_besieged, _no_starvation),
        Property(name="independence of ids", draw=_otherwise, check=_same_names),
    ),
)
