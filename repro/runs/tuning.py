"""Equal tuning: what a paper does not print is a free knob, and one search sets those of every system.

A system declares in ``free`` which settings no source prints, and on cards what a user may choose, and what each may be. What a cell
itself sets is not free. The search (``settled``) races what has no default, such as deployments with their steps; then whatever
differs from the best in one choice, until none is better. ``repro capacity`` races by the rate that a plan serves, ``tune=search`` by
successive halving of scores on common samples. Their seeds are those that no comparison has, so that the best of many is not picked
on the very runs that are reported.

Cells of papers' figures keep the search that they were made with: one halving of up to ``CANDIDATES`` combinations, the defaults
first and the others drawn at random, of a power of two, in ``TRIALS`` trials.
"""

import hashlib
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, product
from math import fsum, prod
from typing import Any, NamedTuple, TypeVar

from engines.errors import UserError, require
from engines.knobs import check_value
from repro.files import kept
from repro.runs.cell import Cell
from repro.runs.family import Score
from repro.runs.record import Obtained, OnProgress, RunRecord
from repro.runs.system import CARDS, PAPER, SYSTEMS, TUNE, Deployment, Setting, System, Tune, free_of

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
        free = [(each.what, each.said) for each in free_of(self.cell.system, place_of(self.cell))]
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
        if found.next_best is not None:
            told["next_best"] = {"setting": dict(found.next_best), "scores": [*map(list, found.scores)]}
        return record.with_manifest(facts={**record.facts, "tuned": told})


class SearchResult(NamedTuple):
    chosen: Setting
    num_candidates: int
    num_trials: int
    next_best: Setting | None = None
    scores: tuple[Score, ...] = ()
    """Mean scores of the best and the next best, on the samples that both had."""


SEARCH, LAYOUT = "search", "deployment"
ROUNDS = 3
"""About so many races of a search's halvings."""
JOINT = 3
"""Axes without a default all of whose combinations are raced, where it is not said."""
BEAM = 3
"""The best of those that were raced, around which others are looked for."""
Choices = tuple[Setting, ...]
"""One setting of each axis of a space, () being what it is by default."""


class Space(NamedTuple):
    axes: tuple[tuple[Setting, ...], ...]

    @property
    def num(self) -> int:
        return prod(map(len, self.axes))

    @property
    def first(self) -> Choices:
        """The defaults, and of what has none the first."""
        return tuple(axis[0] for axis in self.axes)

    def joint(self, most: int) -> Iterator[Choices]:
        """All combinations of so many axes without a default, such as deployments with their steps, and the first of the others."""
        taken = [place for place, axis in enumerate(self.axes) if () not in axis][:most]
        return product(*(axis if place in taken else axis[:1] for place, axis in enumerate(self.axes)))

    def around(self, choices: Choices) -> Iterator[Choices]:
        """Those that differ in one choice."""
        for place, axis in enumerate(self.axes):
            for setting in axis:
                if setting != choices[place]:
                    yield (*choices[:place], setting, *choices[place + 1 :])


def flat(choices: Choices) -> Setting:
    return tuple(pair for setting in choices for pair in setting)


def axes_of(cell: Cell, *without: str) -> tuple[tuple[Setting, ...], ...]:
    """What a user may choose in a cell, but for axes of these names."""
    axes = []
    for each in free_of(cell.system, CARDS):
        settings = () if each.what in without else each.among(cell)
        if settings:
            axes.append(((), *settings) if each.has_default else settings)
    return tuple(axes)


def place_of(cell: Cell) -> str:
    told = getattr(SYSTEMS.get(cell.system), "place_of", None)
    return PAPER if told is None else str(told(cell))


def settled(
    space: Space,
    is_possible: Callable[[Choices], bool],
    race: Callable[[Sequence[Choices], T | None], T | None],
    likely: Callable[[], Sequence[Choices]],
    beam: int = BEAM,
    joint: int = JOINT,
) -> T | None:
    """The best combination of what has no default; then of what differs from one of the best in one choice, until nothing of that is
    better. ``race`` says which of some, or the best so far, is best, and None where none is; ``likely`` are those that were raced,
    best first."""
    tried: set[Choices] = set()

    def better(some: Iterable[Choices], best: T | None) -> T | None:
        new = [each for each in dict.fromkeys(some) if each not in tried and is_possible(each)]
        tried.update(new)
        return race(new, best) if new else best

    best = better(space.joint(joint), None)
    while best is not None:
        found = better([each for base in likely()[:beam] for each in space.around(base)], best)
        if found == best:
            break
        best = found
    return best


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


def held(cells: Sequence[Cell], varied: Collection[str], say: Callable[[str], object]) -> list[Cell]:
    """Cells that search, and differ in ``varied`` knobs alone, with what one search chose for all of them: a table about a knob then
    varies it alone. ``say`` hears of each search before it starts."""
    found: dict[Cell, Setting] = {}
    made = []
    for cell in cells:
        bare = replace(cell.with_seed(0), figure=None)
        for name in varied:
            bare = bare.without(name)
        search = search_of(bare) if len(bare.knobs) < len(cell.knobs) else None
        if search is not None and bare not in found:
            say(f"{search_said(search)}, once for all values of {', '.join(varied)}")
            found[bare] = searched(search).chosen
        given = {name: value for name, value in cell.knobs if value not in (SEARCH, None) or name not in (TUNE, LAYOUT)}
        knobs = {name: value for name, value in found.get(bare, ()) if name not in varied} | given
        again = replace(cell, knobs=tuple(knobs.items()))
        made.append(again if bare in found and is_possible(again, ()) else cell)
    return made


def search_of(cell: Cell) -> Cell | None:
    """The cell that a cell's search is made of; None where it searches nothing."""
    system = SYSTEMS.get(cell.system)
    try:
        deployment, _ = system.prepare(cell) if cell.knob_values.get(TUNE) is None else tuned(system, cell)
    except UserError:
        return None
    return deployment.cell.with_seed(0) if isinstance(deployment, Tuned) else None


def search_said(cell: Cell) -> str:
    """How many settings a search has to choose from, and about how long it takes, by one trial."""
    setting = flat(Space(axes_of(cell)).first) if place_of(cell) == CARDS else candidates(cell)[0]
    # The first one loads what others find loaded.
    for _ in range(2):
        began = time.perf_counter()
        deployment, workload = _with(cell.with_seed(TUNING_SEED), setting)
        deployment.run(workload)
    num = Space(axes_of(cell)).num if place_of(cell) == CARDS else len(candidates(cell))
    trials = TRIALS * (ROUNDS if place_of(cell) == CARDS else 1)
    seconds = trials * (time.perf_counter() - began)
    return f"{cell.system}: a search of {num} settings, about {trials} trials and {seconds:.0f} s"


@kept(maxsize=1024)
def searched(cell: Cell) -> SearchResult:
    """The best of a cell's candidates, whatever its seed."""
    system = SYSTEMS.get(cell.system)
    family, reseeded = system.family, getattr(system, "reseeded", None)
    score = family.score
    assert score is not None
    if family.trial is not None:
        cell = family.trial(cell)

    @cache
    def first(setting: Setting) -> tuple[Any, Any]:
        return _with(cell.with_seed(TUNING_SEED), setting)

    @cache
    def trial(setting: Setting, sample: int) -> Score:
        seeded = cell.with_seed(TUNING_SEED + sample)
        again = None if reseeded is None else reseeded(first(setting)[0], _having(seeded, setting))
        deployment, workload = _with(seeded, setting) if again is None else again
        return score(deployment.run(workload))

    if place_of(cell) == PAPER:
        tried = candidates(cell)
        return SearchResult(halved(tried, trial), len(tried), trial.cache_info().currsize)
    made: dict[Choices, list[Score]] = {}

    def noted(choices: Choices, sample: int) -> Score:
        found = trial(flat(choices), sample)
        if sample == len(of := made.setdefault(choices, [])):
            of.append(found)
        return found

    def likely() -> list[Choices]:
        return sorted(made, key=lambda each: (-len(made[each]), _mean(made[each])))

    space = Space(axes_of(cell))

    def race(some: Sequence[Choices], best: Choices | None) -> Choices:
        return halved(some if best is None else [best, *some], noted)

    best = settled(space, lambda each: is_possible(cell, flat(each)), race, likely)
    require(best is not None, f"tune: no setting of system={cell.system!r} is possible here, give deployment=...")
    assert best is not None
    others = [each for each in likely() if each != best]
    if not others:
        return SearchResult(flat(best), 1, 0)
    both = made[best], made[others[0]]
    scores = tuple(_mean(each[: min(map(len, both))]) for each in both)
    return SearchResult(flat(best), len(made), trial.cache_info().currsize, flat(others[0]), scores)


def candidates(cell: Cell) -> list[Setting]:
    """A power of two of them: the defaults, then combinations of what is free in this cell and can be set in it."""
    axes = [
        [*([()] if each.has_default else []), *(setting for setting in each.among(cell) if is_possible(cell, setting))]
        or [()]
        for each in free_of(cell.system)
    ]
    default, *others = (tuple(pair for part in parts for pair in part) for parts in product(*axes))
    random.Random(0).shuffle(others)
    drawn = islice((each for each in others if is_possible(cell, each)), CANDIDATES - 1)
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
    """Like ``System.prepare`` of the cell with these knobs too."""
    return SYSTEMS.get(cell.system).prepare(_having(cell, setting))


def _having(cell: Cell, setting: Setting) -> Cell:
    return Cell.from_dict({**cell.to_dict(), "knobs": (*cell.knobs, *setting)})


def is_possible(cell: Cell, setting: Setting) -> bool:
    """What has no effect in a cell, as pools have none on one instance, is refused."""
    try:
        _with(cell, setting)
    except UserError:
        return False
    return True
