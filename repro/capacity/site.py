"""What the search asks of a system on a platform: its plans, likely ones first, and one run of a plan at a rate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import fsum
from typing import Any, ClassVar, NamedTuple, Self

from engines.cluster.sessions import Session
from engines.errors import UserError
from engines.models.shape import ModelShape
from engines.policies.views import Chunk, StepTimes
from repro.capacity.objectives import Objective, Sample
from repro.runs.cell import Cell, Scalar
from repro.runs.record import Obtained
from repro.runs.system import SYSTEMS
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


Knobs = tuple[tuple[str, Scalar], ...]


class Plan(NamedTuple):
    """As a cell asks for it, so that ``repro bench`` can run it again."""

    name: str
    gpus: int
    knobs: Knobs
    most: float
    """A rate that no run of it keeps up with."""
    prefill: tuple[int, int] | None
    """Degree and replicas of the workers that prefill alone; None where all do both."""
    decode: tuple[int, int]
    """The same of the others, which decode, or prefill instances."""


class Ranked(NamedTuple):
    plans: tuple[Plan, ...]
    """Those that are worth a simulation, likely ones first."""
    num: int
    """All that there are."""
    start: float
    """About the rate that the best may serve."""


FEWEST_ROUNDS, MOST_ROUNDS = 1000, 3072
"""Rounds of a run, where no number of requests is asked for."""
BEYOND = 5
"""Samples beyond the highest percentile, of all seeds together, that a run has at least."""
LASTING = 2
"""Times that arrivals last as long as a session, below which a rate is one of a burst."""
_SLOWER = 1.5
"""About how much longer a session takes under load than alone."""


@dataclass(frozen=True, kw_only=True)
class Site(ABC):
    """A system on a platform, and how its runs are judged."""

    cell: Cell
    """Its seed is not read, nor is its rate where sessions are counted."""
    objectives: tuple[Objective, ...]
    num_seeds: int
    unit: ClassVar[str]
    """The unit of a rate, such as sessions/s."""
    least_prompts: ClassVar[int]
    """Sessions, or turns, of a run that has a rate and is judged."""

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: another process makes of them whatever else is kept, a system of any kind among it."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def title(self) -> str:
        return SYSTEMS.get(self.cell.system).title

    def of_run(self, plan: Plan, rate: float, seed: int) -> Cell:
        """The cell of one run."""
        return self._cell(plan.knobs, rate=rate, seed=seed)

    def of_size(self, gpus: int, rate: float | None, num_prompts: int | None) -> Self:
        """With as many requests as are asked for, or as so many GPUs, or the rate, make worth it."""
        if num_prompts is None:
            num_prompts = self._num_prompts(self.ranked(gpus, None).start if rate is None else rate)
        return replace(self, cell=self._cell([("num_prompts", num_prompts)]))

    def _num_prompts(self, rate: float) -> int:
        """Sessions, or turns, of a run: so many that arrivals last, as far as the most rounds allow, and that percentiles mean something."""
        per_prompt = self.rounds_per_prompt
        lasting = _SLOWER * LASTING * rate * self.alone_s * per_prompt
        needed = max(BEYOND * each.fewest for each in self.objectives)
        rounds = max(min(max(lasting, FEWEST_ROUNDS), MOST_ROUNDS), 2 * needed / self.num_seeds)
        return max(1, math.ceil(rounds / per_prompt))

    def _cell(self, knobs: Iterable[tuple[str, Scalar]], **changes: Any) -> Cell:
        return replace(self.cell, knobs=tuple((self.cell.knob_values | dict(knobs)).items()), **changes)

    @property
    @abstractmethod
    def obtained(self) -> Obtained: ...

    @property
    @abstractmethod
    def least_gpus(self) -> int:
        """That hold a plan."""

    @property
    @abstractmethod
    def most_gpus(self) -> int:
        """GPUs that the platform has."""

    @property
    @abstractmethod
    def provenance(self) -> Provenance:
        """Where the requests of the first seed come from."""

    @property
    def rounds_per_prompt(self) -> float:
        """Rounds of a session; 1 of a turn."""
        return sum(len(each.rounds) for each in self.sessions) / len(self.sessions)

    @property
    @abstractmethod
    def alone_s(self) -> float:
        """About the mean time of a session, or a turn, that is alone."""

    @abstractmethod
    def hardware(self) -> tuple[ModelShape, str]:
        """The model, and the card by its name in the catalogue."""

    @property
    @abstractmethod
    def sessions(self) -> tuple[Session, ...]:
        """Those of the first seed."""

    @abstractmethod
    def fits(self, gpus: int) -> bool:
        """Whether a plan uses all of so many GPUs."""

    @abstractmethod
    def check(self, gpus: int) -> None:
        """Raise UserError for whatever would fail in a run."""

    @abstractmethod
    def plans(self, gpus: int) -> tuple[Plan, ...]:
        """Every one that uses all of so many GPUs, with one degree a phase."""

    @abstractmethod
    def ranked(self, gpus: int, rate: float | None) -> Ranked:
        """Plans that use all of so many GPUs; for one rate, or for the largest."""

    @abstractmethod
    def run(self, plan: Plan, rate: float, seed: int) -> Sample: ...


def refuse_set_here(knobs: Mapping[str, Scalar]) -> None:
    for name, why in SET_HERE.items():
        if name in knobs:
            raise UserError(f"knob='{name}={knobs[name]}' {why}")


def prompts_of(session: Session) -> Iterator[Chunk]:
    """What each round prefills."""
    history = 0
    for prefill, decode, _ in session.rounds:
        yield Chunk(history, prefill)
        history += prefill + decode


def alone_s(cost: StepTimes, sessions: Iterable[Session]) -> float:
    """Seconds of all their prefills, one prompt a step."""
    return fsum(cost.step_s([chunk], 0, 0) for session in sessions for chunk in prompts_of(session))
