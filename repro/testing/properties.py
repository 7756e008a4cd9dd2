"""Properties of a kind of plug-in, by name, each tried on examples, and the results."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from engines.data import ask
from engines.errors import RunError, UserError, require
from engines.policies.own import accepted_arguments, settings_of

T = TypeVar("T")
Case = TypeVar("Case")


class Source:
    """Draws the parts of examples. ``draw`` gives an example of one of hypothesis's ``strategies``."""

    def __init__(self, draw: Callable[[Any], Any], strategies: Any) -> None:
        self._draw, self._strategies = draw, strategies

    def whole(self, least: int, most: int) -> int:
        """A whole number from ``least`` to ``most``, both included."""
        return int(self._draw(self._strategies.integers(least, most)))

    def one_of(self, options: Sequence[T]) -> T:
        choice: T = self._draw(self._strategies.sampled_from(options))
        return choice


MOST_SHORTER = 150
"""Most examples that are tried to shorten a failed one."""


class Tried(NamedTuple):
    examples: int
    """How many examples were tried, including those that shortened a failure."""
    failure: str | None = None
    """The sentence of the shortest example that failed."""


class _Enough(BaseException):
    """Ends the search for a shorter example; hypothesis lets it pass."""


def tried(draw: Callable[[Source], Case], check: Callable[[Case], None], *, examples: int, seed: int) -> Tried:
    """Try a property on examples. ``check`` raises AssertionError, with one sentence, for a case that fails."""
    from hypothesis import HealthCheck, Phase, Verbosity, configuration, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    num, failures, first = 0, list[str](), 0

    @seeded(seed)
    @settings(
        max_examples=examples,
        phases=(Phase.generate, Phase.shrink),
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=[*HealthCheck],
        verbosity=Verbosity.quiet,
    )
    @given(st.data())
    def run(data: Any) -> None:
        nonlocal num, first
        case = draw(Source(data.draw, st))
        if first and num >= first + MOST_SHORTER:
            raise _Enough
        num += 1
        try:
            check(case)
        except AssertionError as error:
            failures.append(str(error))
            first = first or num
            raise

    # hypothesis stores what it reads in the sources, by default in the working directory. The setting is global, so it is restored.
    old_dir = getattr(configuration, "__hypothesis_home_directory", None)
    with TemporaryDirectory() as folder:
        configuration.set_hypothesis_home_dir(folder)
        try:
            run()
        except _Enough:
            pass
        except Exception:
            # A plug-in that remembers former runs may fail only once, for which hypothesis raises its own error.
            if not failures:
                raise
        finally:
            configuration.set_hypothesis_home_dir(old_dir)
    return Tried(num, failures[-1] if failures else None)


Subject = TypeVar("Subject")

EXAMPLES = 50


@dataclass(frozen=True, kw_only=True)
class Property(Generic[Subject]):
    name: str
    draw: Callable[[Source, Subject], Any]
    """Draws an example."""
    check: Callable[[Subject, Any], None]
    """Raises AssertionError for an example for which the property does not hold."""
    without: Callable[[Subject], str | None] = lambda subject: None
    """Why the property does not apply to this subject; None if it does."""


@dataclass(frozen=True, kw_only=True)
class Kind(Generic[Subject]):
    name: str
    properties: tuple[Property[Subject], ...]


class PropertyResult(NamedTuple):
    name: str
    examples: int = 0
    failure: str | None = None
    """One sentence that begins with the property's name."""
    skipped: str | None = None


def verdicts(
    kind: Kind[Subject], subject: Subject, *, examples: int = EXAMPLES, seed: int = 0, without: Collection[str] = ()
) -> Iterator[PropertyResult]:
    """Yield one result per property, in order. Properties in ``without``, which the author says do not hold, are skipped."""
    names = [prop.name for prop in kind.properties]
    for name in without:
        require(name in names, f"without={name!r} is no property of a {kind.name}: use one of {', '.join(names)}")
    for prop in kind.properties:
        yield verdict(prop, subject, examples=examples, seed=seed, without=without)


def verdict(
    held: Property[Subject], subject: Subject, *, examples: int = EXAMPLES, seed: int = 0, without: Collection[str] = ()
) -> PropertyResult:
    reason = "left out" if held.name in without else held.without(subject)
    if reason is not None:
        return PropertyResult(held.name, skipped=reason)

    def check(case: Any) -> None:
        try:
            held.check(subject, case)
        except (RunError, UserError) as error:
            raise AssertionError(str(error)) from error

    num, failure = tried(lambda source: held.draw(source, subject), check, examples=examples, seed=seed)
    return PropertyResult(held.name, num, None if failure is None else f"{held.name}: {failure}")


def made(make: Any, **offered: Any) -> Any:
    """A plug-in for one run: a copy of ``make`` if it is one, else what it returns, called with those of ``offered`` that it takes."""
    if not callable(make):
        return deepcopy(make)
    if (settings := settings_of(make)) not in (None, make):
        offered["own"] = settings()
    return ask(make, **{name: value for name, value in offered.items() if name in accepted_arguments(make, *offered)})


@dataclass(frozen=True, kw_only=True)
class PlugIn(ABC):
    """A plug-in under test: ``make`` itself, or what it returns."""

    make: Any
    title: ClassVar[str]
    methods: ClassVar[tuple[str, ...]]
    """A plug-in has at least one of these."""
    told: ClassVar[str]
    """The arguments it can be made from, in words."""

    def __post_init__(self) -> None:
        if not any(hasattr(self.one, name) for name in self.methods):
            lacks = " and no ".join(f"{name}()" for name in self.methods)
            raise UserError(f"{self.one!r:.80} is no {self.title}, it has no {lacks}: name one, or what makes one")

    @cached_property
    def one(self) -> Any:
        try:
            return self.first()
        except RunError as error:
            raise UserError(f"no {self.title} is made {self.told}: {error}") from error

    @abstractmethod
    def first(self) -> Any: ...


def check_alike(
    ones: Sequence[T], others: Sequence[T], where: str, *, said: Callable[[int, T, T], str | None], count: str
) -> None:
    """Check that two runs decide alike. ``said`` tells how two decisions differ, None if they do not. ``count`` names what is counted."""
    for index, (one, other) in enumerate(zip(ones, others, strict=False)):
        if (words := said(index, one, other)) is not None:
            raise AssertionError(f"{words} where {where}")
    if len(ones) != len(others):
        raise AssertionError(f"{len(ones)} {count}, and {len(others)} where {where}")


# ---- no starvation -----------------------------------------------------------------------------------------


class Ahead(NamedTuple):
    """The load when a request comes: itself, and those that came before it and have not ended."""

    requests: int
    work: float
    """The time they would take one after the other, each alone: in seconds, or for a scheduler in steps."""
    longest: float
    """The longest time that any request of the run takes alone, including later ones."""
    step: float
    """The longest step of the run; 1 if the unit is steps."""


Bound = Callable[[Ahead], float]


def in_order(ahead: Ahead) -> float:
    """The longest time of a request if none overtakes another. One step may be running when it comes, and it shares its last step."""
    return ahead.work + 2 * ahead.step


def bound_of(plug_in: Any, longest_wait: Bound | None) -> Bound:
    """The stated bound: ``longest_wait``, the plug-in's own, or else ``in_order``."""
    chosen: Bound = longest_wait or getattr(plug_in, "longest_wait", None) or in_order
    return chosen


def unbounded(bound: Bound) -> str | None:
    is_infinite = ask(bound, Ahead(1, 1.0, 1.0, 1.0)) == math.inf
    return "its longest_wait is infinite: a request may wait for ever" if is_infinite else None


def no_starvation(draw: Callable[[Source, Any], Any], check: Callable[[Any, Any], None]) -> Property[Any]:
    """The property "no starvation" for kinds whose subjects have a ``bound``."""
    return Property(name="no starvation", draw=draw, check=check, without=lambda subject: unbounded(subject.bound))


class Stay(NamedTuple):
    request: int
    came: float
    ended: float
    work: float
    """How long the request takes alone."""


def check_waits(stays: Collection[Stay], *, step: float, bound: Bound, unit: str) -> None:
    """Check that every stay is within the bound. ``stays`` are in order of arrival."""
    longest = max(stay.work for stay in stays)
    present: list[Stay] = []
    for stay in stays:
        present = [other for other in present if other.ended > stay.came]
        present.append(stay)
        ahead = Ahead(len(present), sum(other.work for other in present), longest, step)
        limit, took = ask(bound, ahead), stay.ended - stay.came
        if not took <= limit * (1 + 1e-9) + 1e-9:
            arrival = f"in step {stay.came:g}" if unit == "steps" else f"at {stay.came:.4g} {unit}"
            others = f"{ahead.requests - 1} other{'' if ahead.requests == 2 else 's'}"
            raise AssertionError(
                f"request {stay.request} comes {arrival} and ends {took:.4g} {unit} later; behind {others}, "
                f"{ahead.work:.4g} {unit} of work with its own, {limit:.4g} {unit} is the most "
                + ("that first come, first served takes" if bound is in_order else "by its longest_wait")
            )
