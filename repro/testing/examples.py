"""Examples that a property is tried on: drawn by hypothesis, which shortens what fails."""

from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Case = TypeVar("Case")


class Source:
    """What examples are made of; ``draw`` gives an example of one of hypothesis's ``strategies``."""

    def __init__(self, draw: Callable[[Any], Any], strategies: Any) -> None:
        self._draw, self._strategies = draw, strategies

    def whole(self, least: int, most: int) -> int:
        """A number from ``least`` to ``most``, both allowed."""
        return int(self._draw(self._strategies.integers(least, most)))

    def one_of(self, options: Sequence[T]) -> T:
        found: T = self._draw(self._strategies.sampled_from(options))
        return found


MOST_SHORTER = 150
"""Examples that are tried to shorten one that failed."""


class Tried(NamedTuple):
    examples: int
    """How many were tried, those that shortened a failure included."""
    failure: str | None = None
    """The sentence of the shortest one that failed."""


class _Enough(BaseException):
    """Ends the search for a shorter example; hypothesis lets it pass."""


def tried(draw: Callable[[Source], Case], check: Callable[[Case], None], *, examples: int, seed: int) -> Tried:
    """``check`` raises AssertionError, of one sentence, for a case that fails."""
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

    # It writes down what it reads in the sources, beside who started it; a folder that is set stays for what comes later.
    before = getattr(configuration, "__hypothesis_home_directory", None)
    with TemporaryDirectory() as folder:
        configuration.set_hypothesis_home_dir(folder)
        try:
            run()
        except _Enough:
            pass
        except Exception:
            # What remembers former runs fails once and not again, of which hypothesis complains in its own words.
            if not failures:
                raise
        finally:
            configuration.set_hypothesis_home_dir(before)
    return Tried(num, failures[-1] if failures else None)
