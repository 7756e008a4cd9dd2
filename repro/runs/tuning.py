"""Equal tuning: a setting that a paper does not print is a free knob, and the same search sets the free knobs of every system.

A system lists in ``free`` the settings that no source prints, on cards those that a user may choose, and their values. A setting that the
cell itself gives is not free. The search (``settled``) first races settings without a default, such as deployments with their steps. It
then races what differs from the best in one choice, until none is better. ``repro capacity`` races by the rate that a plan serves,
``tune=search`` by successive halving of scores on common samples. No comparison uses the search's seeds, so the best of many is not picked
on the very runs that are reported.

Cells of papers' figures keep the search that they were made with. It is one halving of up to ``CANDIDATES`` combinations, a power of two,
in ``TRIALS`` trials: the defaults first, and others drawn at random.
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
"""Most combinations that are tried, and the number of trials in all; both are powers of two."""
TUNING_SEED = 2 * 10**6
"""The first seed of the trials."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A deployment whose free knobs are set by a search when it runs. The seeds of a cell share the search."""

    cell: Cell
    """The cell without the knob ``tune``."""
    default: Deployment
    """The deployment with default settings."""

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
    """Mean scores of the best and the next best setting, on the samples that both had."""


SEARCH, LAYOUT = "search", "deployment"
ROUNDS = 3
"""About how many races a search takes, each a halving; only used to estimate its time."""
JOINT = 3
"""How many axes without a default are searched jointly, by default."""
BEAM = 3
"""How many of the best raced settings the search looks around."""
Choices = tuple[Setting, ...]
"""One setting for each axis of a space; () is the default."""


class Space(NamedTuple):
    axes: tuple[tuple[Setting, ...], ...]

    @property
    def num(self) -> int:
        return prod(map(len, self.axes))

    @property
    def first(self) -> Choices:
        """The default of each axis, or its first setting if it has no default."""
        return tuple(axis[0] for axis in self.axes)

    def joint(self, most: int) -> Iterator[Choices]:
        """All combinations of the first ``most`` axes without a default, such as deployments with their steps; first settings elsewhere."""
        taken = [place for place, axis in enumerate(self.axes) if () not in axis][:most]
        return product(*(axis if place in taken else axis[:1] for place, axis in enumerate(self.axes)))

    def around(self, choices: Choices) -> Iterator[Choices]:
        """The combinations that differ in one choice."""
        for place, axis in enumerate(self.axes):
            for setting in axis:
                if setting != choices[place]:
                    yield (*choices[:place], setting, *choices[place + 1 :])


def flat(choices: Choices) -> Setting:
    return tuple(pair for setting in choices for pair in setting)


def axes_of(cell: Cell, *without: str) -> tuple[tuple[Setting, ...], ...]:
    """The settings that a user may choose in a cell, without the axes of these names."""
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
    """Return the best combination. First race all combinations of the settings without a default. Then race those that differ from one of
    the ``beam`` best in one choice, until none is better. ``race`` returns the best of some and the best so far, or None. ``likely``
    returns the raced combinations, best first."""
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
    """Return the deployment and workload of a cell with the knob ``tune``."""
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
    """Return the cells with searched settings. Cells that differ only in ``varied`` knobs share one search, so a table about a knob varies
    only that knob. ``say`` is called before each search starts."""
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
    """The cell that a cell's search runs on; None if it searches nothing."""
    system = SYSTEMS.get(cell.system)
    try:
        deployment, _ = system.prepare(cell) if cell.knob_values.get(TUNE) is None else tuned(system, cell)
    except UserError:
        return None
    return deployment.cell.with_seed(0) if isinstance(deployment, Tuned) else None


def search_said(cell: Cell) -> str:
    """Says how many settings a search has to choose from, and about how long it takes, judging by one trial."""
    setting = flat(Space(axes_of(cell)).first) if place_of(cell) == CARDS else candidates(cell)[0]
    # The first trial loads things that later trials find loaded.
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
    """The best setting of a cell, whatever its seed."""
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
    """Candidates, as many as a power of two: the defaults, then random combinations of settings that are free and possible in this cell."""
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
    """Return the candidate with the least mean score after ``trials`` trials. Each round shares its trials evenly, on samples that are new
    to all, and then drops half. The first of equal candidates wins."""
    alive = list(range(len(tried)))
    scores: dict[int, list[Score]] = {index: [] for index in alive}
    left, sample = trials, 0
    while len(alive) > 1:
        # The last round takes all trials that are left.
        num = max(1, (left if len(alive) == 2 else min(left, CANDIDATES)) // len(alive))
        for index in alive:
            scores[index] += [trial(tried[index], sample + turn) for turn in range(num)]
        left, sample = left - num * len(alive), sample + num
        alive = sorted(sorted(alive, key=lambda index: _mean(scores[index]))[: len(alive) // 2])
    return tried[alive[0]]


def _mean(scores: Sequence[Score]) -> Score:
    return tuple(fsum(values) / len(scores) for values in zip(*scores, strict=True))


def _with(cell: Cell, setting: Setting) -> tuple[Any, Any]:
    """Prepare the cell with these knobs besides its own."""
    return SYSTEMS.get(cell.system).prepare(_having(cell, setting))


def _having(cell: Cell, setting: Setting) -> Cell:
    return Cell.from_dict({**cell.to_dict(), "knobs": (*cell.knobs, *setting)})


def is_possible(cell: Cell, setting: Setting) -> bool:
    """Whether a cell accepts a setting. Settings without effect are refused, such as pools on one instance."""
    try:
        _with(cell, setting)
    except UserError:
        return False
    return True
