"""Equal tuning: a setting that a paper does not print is a free knob, and the same search sets the free knobs of every system.

A system lists in ``free`` the settings that no source prints, on cards those that a user may choose, and their values. A setting that the
cell itself gives is not free. The search (``best_choices``) first races settings without a default, such as deployments with their
steps. It then races what differs from the best in one choice, until none is better. ``repro capacity`` races by the rate that a plan
serves, ``tune=search`` by successive halving of scores on common samples. No comparison uses the search's seeds, so the best of many is not
picked on the very runs that are reported.

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
from repro.files import file_cache
from repro.runs.cell import Cell
from repro.runs.family import Score
from repro.runs.record import Obtained, OnProgress, RunRecord
from repro.runs.system import CARDS, PAPER, SYSTEMS, TUNE, Deployment, Setting, System, Tune, free_of, reseeded

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
        free = [(setting.what, setting.said) for setting in free_of(self.cell.system, place_of(self.cell))]
        text = repr((self.default.basis, free, CANDIDATES, TRIALS, TUNING_SEED))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def modules(self) -> tuple[str, ...]:
        modules: tuple[str, ...] = getattr(self.default, "modules", ())
        return modules

    @property
    def defaults(self) -> Mapping[str, Any]:
        return getattr(self.default, "defaults", {})

    def check_machine(self) -> None:
        self.default.check_machine()

    def run(self, workload: Any, on_progress: OnProgress | None = None) -> RunRecord:
        result = search_result(self.cell.with_seed(0))
        deployment, _ = _prepare_with(self.cell, result.chosen)
        record = deployment.run(workload, on_progress)
        facts = {"chosen": dict(result.chosen), "candidates": result.num_candidates, "trials": result.num_trials}
        if result.next_best is not None:
            facts["next_best"] = {"setting": dict(result.next_best), "scores": [*map(list, result.scores)]}
        return record.with_manifest(facts={**record.facts, "tuned": facts})


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

    def joint(self, num_axes: int) -> Iterator[Choices]:
        """All combinations of the first ``num_axes`` axes without a default, such as deployments with steps; first settings elsewhere."""
        combined = [index for index, axis in enumerate(self.axes) if () not in axis][:num_axes]
        return product(*(axis if index in combined else axis[:1] for index, axis in enumerate(self.axes)))

    def neighbours(self, choices: Choices) -> Iterator[Choices]:
        """The combinations that differ in one choice."""
        for index, axis in enumerate(self.axes):
            for setting in axis:
                if setting != choices[index]:
                    yield (*choices[:index], setting, *choices[index + 1 :])


def flat(choices: Choices) -> Setting:
    return tuple(pair for setting in choices for pair in setting)


def axes_of(cell: Cell, *excluded: str) -> tuple[tuple[Setting, ...], ...]:
    """The settings that a user may choose in a cell, without the axes of these names."""
    axes = []
    for free in free_of(cell.system, CARDS):
        settings = () if free.what in excluded else free.among(cell)
        if settings:
            axes.append(((), *settings) if free.has_default else settings)
    return tuple(axes)


def place_of(cell: Cell) -> str:
    find_place = getattr(SYSTEMS.get(cell.system), "place_of", None)
    return PAPER if find_place is None else str(find_place(cell))


def best_choices(
    space: Space,
    is_possible: Callable[[Choices], bool],
    race: Callable[[Sequence[Choices], T | None], T | None],
    ranked: Callable[[], Sequence[Choices]],
    beam: int = BEAM,
    joint: int = JOINT,
) -> T | None:
    """Return the best combination. First race all combinations of the settings without a default. Then race those that differ from one of
    the ``beam`` best in one choice, until none is better. ``race`` returns the best of some and the best so far, or None. ``ranked``
    returns the raced combinations, best first."""
    tried: set[Choices] = set()

    def race_new(combinations: Iterable[Choices], best: T | None) -> T | None:
        untried = [choices for choices in dict.fromkeys(combinations) if choices not in tried and is_possible(choices)]
        tried.update(untried)
        return race(untried, best) if untried else best

    best = race_new(space.joint(joint), None)
    while best is not None:
        winner = race_new([choices for base in ranked()[:beam] for choices in space.neighbours(base)], best)
        if winner == best:
            break
        best = winner
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


def with_tuned_knobs(cells: Sequence[Cell], varied: Collection[str], report: Callable[[str], object]) -> list[Cell]:
    """Return the cells with searched settings. Cells that differ only in ``varied`` knobs share one search, so a table about a knob varies
    only that knob. ``report`` is called before each search starts."""
    chosen: dict[Cell, Setting] = {}
    results = []
    for cell in cells:
        base = replace(cell.with_seed(0), figure=None)
        for name in varied:
            base = base.without(name)
        search = search_of(base) if len(base.knobs) < len(cell.knobs) else None
        if search is not None and base not in chosen:
            report(f"{search_text(search)}, once for all values of {', '.join(varied)}")
            chosen[base] = search_result(search).chosen
        fixed = {name: value for name, value in cell.knobs if value not in (SEARCH, None) or name not in (TUNE, LAYOUT)}
        knobs = {name: value for name, value in chosen.get(base, ()) if name not in varied} | fixed
        filled = replace(cell, knobs=tuple(knobs.items()))
        results.append(filled if base in chosen and is_possible(filled, ()) else cell)
    return results


def search_of(cell: Cell) -> Cell | None:
    """The cell that a cell's search runs on; None if it searches nothing."""
    system = SYSTEMS.get(cell.system)
    try:
        deployment, _ = system.prepare(cell) if cell.knob_values.get(TUNE) is None else tuned(system, cell)
    except UserError:
        return None
    return deployment.cell.with_seed(0) if isinstance(deployment, Tuned) else None


def search_text(cell: Cell) -> str:
    """Says how many settings a search has to choose from, and about how long it takes, judging by one trial."""
    setting = flat(Space(axes_of(cell)).first) if place_of(cell) == CARDS else candidates(cell)[0]
    # The first trial loads things that later trials find loaded.
    for _ in range(2):
        began = time.perf_counter()
        deployment, workload = _prepare_with(cell.with_seed(TUNING_SEED), setting)
        deployment.run(workload)
    num = Space(axes_of(cell)).num if place_of(cell) == CARDS else len(candidates(cell))
    trials = TRIALS * (ROUNDS if place_of(cell) == CARDS else 1)
    seconds = trials * (time.perf_counter() - began)
    return f"{cell.system}: a search of {num} settings, about {trials} trials and {seconds:.0f} s"


@file_cache(maxsize=1024)
def search_result(cell: Cell) -> SearchResult:
    """The best setting of a cell, whatever its seed."""
    system = SYSTEMS.get(cell.system)
    family, score = system.family, system.family.score
    assert score is not None
    if family.trial is not None:
        cell = family.trial(cell)

    @cache
    def first_sample(setting: Setting) -> tuple[Any, Any]:
        return _prepare_with(cell.with_seed(TUNING_SEED), setting)

    @cache
    def trial(setting: Setting, sample: int) -> Score:
        deployment, workload = first_sample(setting)
        if sample:
            seeded = _with_setting(cell.with_seed(TUNING_SEED + sample), setting)
            deployment, workload = reseeded(system, deployment, seeded) or system.prepare(seeded)
        return score(deployment.run(workload))

    if place_of(cell) == PAPER:
        settings = candidates(cell)
        return SearchResult(successive_halving(settings, trial), len(settings), trial.cache_info().currsize)
    scores_of: dict[Choices, list[Score]] = {}

    def record_trial(choices: Choices, sample: int) -> Score:
        result = trial(flat(choices), sample)
        if sample == len(earlier := scores_of.setdefault(choices, [])):
            earlier.append(result)
        return result

    def ranked() -> list[Choices]:
        return sorted(scores_of, key=lambda each: (-len(scores_of[each]), _mean(scores_of[each])))

    space = Space(axes_of(cell))

    def race(choices: Sequence[Choices], best: Choices | None) -> Choices:
        return successive_halving(choices if best is None else [best, *choices], record_trial)

    best = best_choices(space, lambda each: is_possible(cell, flat(each)), race, ranked)
    require(best is not None, f"tune: no setting of system={cell.system!r} is possible here, give deployment=...")
    assert best is not None
    others = [choices for choices in ranked() if choices != best]
    if not others:
        return SearchResult(flat(best), 1, 0)
    both = scores_of[best], scores_of[others[0]]
    scores = tuple(_mean(series[: min(map(len, both))]) for series in both)
    return SearchResult(flat(best), len(scores_of), trial.cache_info().currsize, flat(others[0]), scores)


def candidates(cell: Cell) -> list[Setting]:
    """Candidates, as many as a power of two: the defaults, then random combinations of settings that are free and possible in this cell."""
    axes = [
        [*([()] if free.has_default else []), *(setting for setting in free.among(cell) if is_possible(cell, setting))]
        or [()]
        for free in free_of(cell.system)
    ]
    default, *others = (tuple(pair for part in parts for pair in part) for parts in product(*axes))
    random.Random(0).shuffle(others)
    drawn = islice((setting for setting in others if is_possible(cell, setting)), CANDIDATES - 1)
    settings = [default, *drawn]
    return settings[: 1 << len(settings).bit_length() - 1]


def successive_halving(candidates: Sequence[T], trial: Callable[[T, int], Score], trials: int = TRIALS) -> T:
    """Return the candidate with the least mean score after ``trials`` trials. Each round shares its trials evenly, on samples that are new
    to all, and then drops half. The first of equal candidates wins."""
    alive = list(range(len(candidates)))
    scores: dict[int, list[Score]] = {index: [] for index in alive}
    num_left, sample = trials, 0
    while len(alive) > 1:
        # The last round takes all trials that are left.
        num = max(1, (num_left if len(alive) == 2 else min(num_left, CANDIDATES)) // len(alive))
        for index in alive:
            scores[index] += [trial(candidates[index], sample + turn) for turn in range(num)]
        num_left, sample = num_left - num * len(alive), sample + num
        alive = sorted(sorted(alive, key=lambda index: _mean(scores[index]))[: len(alive) // 2])
    return candidates[alive[0]]


def _mean(scores: Sequence[Score]) -> Score:
    return tuple(fsum(values) / len(scores) for values in zip(*scores, strict=True))


def _prepare_with(cell: Cell, setting: Setting) -> tuple[Any, Any]:
    """Prepare the cell with these knobs besides its own."""
    return SYSTEMS.get(cell.system).prepare(_with_setting(cell, setting))


def _with_setting(cell: Cell, setting: Setting) -> Cell:
    return Cell.from_dict({**cell.to_dict(), "knobs": (*cell.knobs, *setting)})


def is_possible(cell: Cell, setting: Setting) -> bool:
    """Whether a cell accepts a setting. Settings without effect are refused, such as pools on one instance."""
    try:
        _prepare_with(cell, setting)
    except UserError:
        return False
    return True
