"""Examples that a property is tried on: by hypothesis, which shortens what fails, where it is installed, else drawn by numpy."""

from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

T = TypeVar("T")
Case = TypeVar("Case")


class Source(Protocol):
    """What examples are made of."""

    def whole(self, least: int, most: int) -> int:
        """A number from ``least`` to ``most``, both allowed."""
        ...

    def one_of(self, options: Sequence[T]) -> T: ...


MOST_SHORTER = 150
"""Examples that are tried to shorten one that failed."""


class Tried(NamedTuple):
    examples: int
    """How many were tried, those that shortened a failure included."""
    failure: str | None = None
    """The sentence of the shortest one that failed, or of the first."""


def tried(draw: Callable[[Source], Case], check: Callable[[Case], None], *, examples: int, seed: int) -> Tried:
    """``check`` raises AssertionError, of one sentence, for a case that fails."""
    num, failures, first = 0, list[str](), 0

    def checked(case: Case) -> None:
        nonlocal num, first
        if first and num >= first + MOST_SHORTER:
            raise _Enough
        num += 1
        try:
            check(case)
        except AssertionError as error:
            failures.append(str(error))
            first = first or num
            raise

    try:
        (_by_hypothesis if has_hypothesis() else _by_numpy)(draw, checked, examples, seed)
    except _Enough:
        pass
    except Exception:
        # What remembers former runs fails once and not again, of which hypothesis complains in its own words.
        if not failures:
            raise
    return Tried(num, failures[-1] if failures else None)


class _Enough(BaseException):
    """Ends the search for a shorter example; hypothesis lets it pass."""


def has_hypothesis() -> bool:
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        return False
    return True


class _Numpy:
    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def whole(self, least: int, most: int) -> int:
        return int(self._rng.integers(least, most + 1))

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.whole(0, len(options) - 1)]


def _by_numpy(draw: Callable[[Source], Case], check: Callable[[Case], None], examples: int, seed: int) -> None:
    for index in range(examples):
        check(draw(_Numpy(np.random.default_rng((seed, index)))))


class _Hypothesis:
    def __init__(self, draw: Callable[[Any], Any], strategies: Any) -> None:
        self._draw, self._strategies = draw, strategies

    def whole(self, least: int, most: int) -> int:
        return int(self._draw(self._strategies.integers(least, most)))

    def one_of(self, options: Sequence[T]) -> T:
        found: T = self._draw(self._strategies.sampled_from(options))
        return found


class _Held:
    """An example that hypothesis does not write out."""

    def __init__(self, case: Any) -> None:
        self.case = case


def _by_hypothesis(draw: Callable[[Source], Case], check: Callable[[Case], None], examples: int, seed: int) -> None:
    from hypothesis import HealthCheck, Phase, Verbosity, configuration, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    @st.composite
    def cases(drawn: Any) -> _Held:
        return _Held(draw(_Hypothesis(drawn, st)))

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
    @given(cases())
    def run(held: _Held) -> None:
        check(held.case)

    # It writes down what it reads in the sources, beside who started it; a folder that is set stays for what comes later.
    before = getattr(configuration, "__hypothesis_home_directory", None)
    with TemporaryDirectory() as folder:
        configuration.set_hypothesis_home_dir(folder)
        try:
            run()
        finally:
            configuration.set_hypothesis_home_dir(before)
