"""Equal tuning: what a paper does not print is a free knob, and one search of the same size sets those of every system.

A system declares in ``free`` which settings no source prints, and what each may be. With ``tune=search`` a run sets them by
successive halving: up to ``CANDIDATES`` of the combinations, the defaults first and the others drawn at random, and ``TRIALS``
simulated trials in all, whatever the system; half of the candidates are dropped after each round. Samples are of seeds that no
comparison has, so the best of many is not picked on the very runs that are reported. What a cell itself sets is not free.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from math import fsum
from typing import Any, NamedTuple, TypeVar

from engines.errors import UserError, require
from engines.knobs import check_value
from repro.files import kept
from repro.runs.cell import Cell
from repro.runs.family import Score
from repro.runs.record import Obtained, OnProgress, RunRecord
from repro.runs.system import SYSTEMS, TUNE, Deployment, Setting, System, Tune, free_of

CANDIDATES, TRIALS = 16, 64
"""Most combinations that are tried, and how often one is in all: powers of two."""
TUNING_SEED = 2 * 10**6
"""The first of the seeds that trials have."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A deployment whose free knobs a search sets once it runs: the seeds of a cell share it."""

    cell: Cell
    """Without ``tune``."""
    default: Deployment
    """As it is by default."""

    @property
    def obtained(self) -> Obtained:
        return self.default.obtained

    @property
    def basis(self) -> str:
        free = [(each.what, each.said) for each in free_of(self.cell.system)]
        text = repr((self.default.basis, free, CANDIDATES, TRIALS, TUNING_SEED))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def modules(self) -> tuple[str, ...]:
        return (*self.default.modules, __name__)

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.default.facts

    @property
    def defaults(self) -> Mapping[str, Any]:
        return getattr(self.default, "defaults", {})

    def check_machine(self) -> None:
        self.default.check_machine()

    def run(self, workload: Any, on_progress: OnProgress | None = None) -> RunRecord:
        found = searched(self.cell.with_seed(0))
        deployment, _ = _with(self.cell, found.chosen)
        record = deployment.run(workload, on_progress)
        told = {"chosen": dict(found.chosen), "candidates": found.num_candidates, "trials": found.num_trials}
        return record.with_manifest(facts={**record.facts, "tuned": told})


class SearchResult(NamedTuple):
    chosen: Setting
    num_candidates: int

    @property
    def num_trials(self) -> int:
        """None where nothing can be set otherwise."""
        return TRIALS if self.num_candidates > 1 else 0


def tuned(system: System, cell: Cell) -> tuple[Any, Any]:
    """Returns the deployment and workload of a cell that says ``tune``."""
    tune = cell.knob_values[TUNE]
    check_value(Tune, TUNE, tune)
    plain = cell.without(TUNE)
    deployment, workload = system.prepare(plain)
    if tune == "off" or isinstance(deployment, Tuned):
        return deployment, workload
    require(
        bool(free_of(cell.system)) and system.family.score is not None,
        f"tune={tune!r}: system={cell.system!r} declares no free knobs, leave it out",
    )
    require(
        deployment.obtained != "measured",
        f"tune={tune!r} takes {TRIALS} trials, which are simulated ones: leave it out where runs are measured",
    )
    return Tuned(cell=replace(plain, figure=None), default=deployment), workload


@kept(maxsize=1024)
def searched(cell: Cell) -> SearchResult:
    """The best of a cell's candidates, whatever its seed."""
    family = SYSTEMS.get(cell.system).family
    score = family.score
    assert score is not None
    tried = candidates(cell)

    def trial(setting: Setting, sample: int) -> Score:
        deployment, workload = _with(cell.with_seed(TUNING_SEED + sample), setting)
        return score(deployment.run(workload))

    return SearchResult(halved(tried, trial), len(tried))


def candidates(cell: Cell) -> list[Setting]:
    """A power of two of them: the defaults, then combinations of what is free in this cell and can be set in it."""
    axes = [
        [*([()] if each.has_default else []), *(setting for setting in each.among(cell) if _is_possible(cell, setting))]
        or [()]
        for each in free_of(cell.system)
    ]
    default, *others = (tuple(pair for part in parts for pair in part) for parts in product(*axes))
    random.Random(0).shuffle(others)
    drawn = islice((each for each in others if _is_possible(cell, each)), CANDIDATES - 1)
    found = [default, *drawn]
    return found[: 1 << len(found).bit_length() - 1]


def halved(tried: Sequence[T], trial: Callable[[T, int], Score], trials: int = TRIALS) -> T:
    """The one with the least mean score after ``trials`` trials, those of a round shared out evenly on samples that are new to
    all; half are dropped after each. The first of equals."""
    alive = list(range(len(tried)))
    scores: dict[int, list[Score]] = {index: [] for index in alive}
    left, sample = trials, 0
    while len(alive) > 1:
        # The last round takes what is left.
        num = max(1, (left if len(alive) == 2 else min(left, CANDIDATES)) // len(alive))
        for index in alive:
            scores[index] += [trial(tried[index], sample + turn) for turn in range(num)]
        left, sample = left - num * len(alive), sample + num
        alive = sorted(sorted(alive, key=lambda index: _mean(scores[index]))[: len(alive) // 2])
    return tried[alive[0]]


def _mean(scores: Sequence[Score]) -> Score:
    return tuple(fsum(values) / len(scores) for values in zip(*scores, strict=True))


def _with(cell: Cell, setting: Setting) -> tuple[Any, Any]:
    """As ``replace``: the cell with these knobs too."""
    knobs = (*cell.knobs, *setting)
    asked = Cell.from_dict({**cell.to_dict(), "knobs": knobs})
    return SYSTEMS.get(cell.system).prepare(asked)


def _is_possible(cell: Cell, setting: Setting) -> bool:
    """What has no effect in a cell, as pools have none on one instance, is refused."""
    try:
        _with(cell, setting)
    except UserError:
        return False
    return True
