"""What the search asks of a system on a platform: its plans, likely ones first, and one run of a plan at a rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from math import fsum
from typing import Any, NamedTuple, Protocol, Self

from engines.cluster.sessions import Session
from engines.errors import UserError
from engines.models.shape import ModelShape
from engines.policies.step import Chunk, StepTimes
from repro.capacity.objectives import Sample
from repro.runs.cell import Cell, Scalar
from repro.runs.record import Obtained
from repro.workloads.card import Provenance

_SEARCHED = "is for the search to set: leave it out"
SET_HERE: Mapping[str, str] = {
    **dict.fromkeys(
        ("deployment", "num_gpus", "num_instances", "planning_rate", "transient", "arrivals", "tune"), _SEARCHED
    ),
    "num_prompts": "is for --num-prompts to set, or the search: leave it out",
    **dict.fromkeys(("slo_ttft_s", "slo_itl_s"), "is for --slo to set: leave it out"),
    **dict.fromkeys(("workload", "dataset_path", "dataset_source"), "is for --workload to set: leave it out"),
    **{name: f"is for --{name.replace('_', '-')} to set: leave it out" for name in ("columns", "time_unit", "sort")},
}
"""Knobs that the question or the search sets, or that would make its rates others, and what is said of each."""


class Plan(NamedTuple):
    """As a cell asks for it, so that ``repro bench`` can run it again."""

    name: str
    gpus: int
    knobs: tuple[tuple[str, Scalar], ...]
    most: float
    """A rate that no run of it keeps up with."""
    prefill: tuple[int, int] | None
    """Degree and replicas of the workers that prefill alone; None where all do both."""
    decode: tuple[int, int]
    """The same of the others; 0 replicas where answers are decoded elsewhere."""


class Ranked(NamedTuple):
    plans: tuple[Plan, ...]
    """Those that are worth a simulation, likely ones first."""
    num: int
    """All that there are."""
    start: float
    """About the rate that the best may serve."""


class Site(Protocol):
    @property
    def cell(self) -> Cell: ...

    @property
    def title(self) -> str:
        """The system's."""

    @property
    def obtained(self) -> Obtained: ...

    @property
    def unit(self) -> str:
        """What a rate is of."""

    @property
    def least_gpus(self) -> int:
        """That hold a plan."""

    @property
    def least_prompts(self) -> int:
        """Sessions, or turns, of a run that has a rate and is judged."""

    @property
    def most_gpus(self) -> int:
        """GPUs that the platform has."""

    @property
    def provenance(self) -> Provenance:
        """Where the requests of the first seed come from."""

    @property
    def rounds_per_prompt(self) -> float:
        """Rounds of a session; 1 of a turn."""

    @property
    def alone_s(self) -> float:
        """About the mean time of a session, or a turn, that is alone."""

    def with_prompts(self, num: int) -> Self: ...

    def hardware(self) -> tuple[ModelShape, str]:
        """The model, and the card by its name in the catalogue."""

    def sessions(self) -> tuple[Session, ...]:
        """Those of the first seed."""

    def fits(self, gpus: int) -> bool:
        """Whether a plan uses all of so many GPUs."""

    def check(self, gpus: int) -> None:
        """Raise UserError for whatever would fail in a run."""

    def ranked(self, gpus: int, rate: float | None) -> Ranked:
        """Plans that use all of so many GPUs; for one rate, or for the largest."""

    def run(self, plan: Plan, rate: float, seed: int) -> Sample: ...


def fields_of(site: Any) -> dict[str, Any]:
    """What another process has to be told of a site; whatever else it keeps, a system of any kind among it, follows."""
    return {each.name: getattr(site, each.name) for each in fields(site)}


def asked(cell: Cell, plan: Plan, rate: float, seed: int) -> Cell:
    """The cell of one run."""
    knobs = dict(cell.knobs) | dict(plan.knobs)
    return replace(cell, rate=rate, seed=seed, knobs=tuple(knobs.items()))


def refuse_set_here(knobs: Mapping[str, Scalar]) -> None:
    for name, why in SET_HERE.items():
        if name in knobs:
            raise UserError(f"knob='{name}={knobs[name]}' {why}")


def together(plans: Sequence[Plan], most: int, rate: float | None) -> tuple[Plan, ...]:
    """The first of those that can keep up with the rate."""
    return tuple(plan for plan in plans if rate is None or plan.most >= rate)[:most]


def prompts_of(session: Session) -> Iterator[Chunk]:
    """What each round prefills."""
    history = 0
    for prefill, decode, _ in session.rounds:
        yield Chunk(history, prefill)
        history += prefill + decode


def alone_s(cost: StepTimes, sessions: Iterable[Session]) -> float:
    """Seconds of all their prefills, one prompt a step."""
    return fsum(cost.step_s([chunk], 0, 0) for session in sessions for chunk in prompts_of(session))
