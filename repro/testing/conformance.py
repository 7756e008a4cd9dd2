"""The suites as functions, and as classes for pytest: what the author of a plug-in runs on it."""

from collections.abc import Callable, Collection
from typing import Any, ClassVar
from unittest import SkipTest

from engines.policies.views import OpenQueue, PrefillQueue
from repro.testing.batchers import BATCHER, BatchingPolicy
from repro.testing.properties import EXAMPLES, Bound, Kind, check_all, verdict
from repro.testing.routers import ROUTER, Routing
from repro.testing.rules import REFRESH_RULE, Refreshing
from repro.testing.schedulers import SCHEDULER, Scheduling


def check_scheduler(
    make: Any,
    *,
    longest_wait: Bound | None = None,
    without: Collection[str] = (),
    examples: int = EXAMPLES,
    seed: int = 0,
) -> None:
    """Raise AssertionError, of one sentence, for the first property that a scheduler does not hold.

    ``make`` is a subclass of ``Scheduler``, or gives one of config, pool, rule and exact_steps. ``longest_wait`` of ``Ahead``, or else
    the scheduler's own method of that name, is the most steps from a request's submission to its end. ``without`` names properties that
    it is known not to have.
    """
    subject = Scheduling(make=make, longest_wait=longest_wait)
    check_all(SCHEDULER, subject, examples=examples, seed=seed, without=without)


def check_refresh_rule(make: Any, *, without: Collection[str] = (), examples: int = EXAMPLES, seed: int = 0) -> None:
    """Raise AssertionError for the first property that a refresh rule, or the one that ``make()`` gives, does not hold."""
    check_all(REFRESH_RULE, Refreshing(make=make), examples=examples, seed=seed, without=without)


def check_router(
    make: Any,
    *,
    longest_wait: Bound | None = None,
    without: Collection[str] = (),
    examples: int = EXAMPLES,
    seed: int = 0,
) -> None:
    """Raise AssertionError for the first property that a router does not hold.

    ``make`` is a router, or gives one of what it takes of model, slo and seed. ``longest_wait`` is in seconds.
    """
    subject = Routing(make=make, longest_wait=longest_wait)
    check_all(ROUTER, subject, examples=examples, seed=seed, without=without)


def check_batcher(
    make: Any,
    *,
    queue: Callable[[], PrefillQueue] = OpenQueue,
    longest_wait: Bound | None = None,
    without: Collection[str] = (),
    examples: int = EXAMPLES,
    seed: int = 0,
) -> None:
    """Raise AssertionError for the first property that a batching policy does not hold, on the queue that it takes prefills from.

    ``make`` is a policy, or gives one of what it takes of max_num_batched_tokens, max_num_seqs, model and slo. ``longest_wait`` is in
    seconds.
    """
    subject = BatchingPolicy(make=make, queue=queue, longest_wait=longest_wait)
    check_all(BATCHER, subject, examples=examples, seed=seed, without=without)


class _Conformance:
    """A test for each property; settings are those of the functions above."""

    make: ClassVar[Any]
    examples: ClassVar[int] = EXAMPLES
    seed: ClassVar[int] = 0
    without: ClassVar[Collection[str]] = ()
    _kind: ClassVar[Kind[Any]]
    _subject: ClassVar[Callable[..., Any]]
    _settings: ClassVar[tuple[str, ...]] = ("longest_wait",)
    """Attributes that the subject takes besides ``make``."""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        metafunc.parametrize("held", self._kind.properties, ids=[each.name for each in self._kind.properties])

    def test_holds(self, held: Any) -> None:
        mine = type(self)
        subject = mine._subject(make=mine.make, **{name: getattr(mine, name) for name in mine._settings})
        found = verdict(held, subject, examples=mine.examples, seed=mine.seed, without=mine.without)
        if found.skipped is not None:
            raise SkipTest(found.skipped)
        assert found.failure is None, found.failure


class SchedulerConformance(_Conformance):
    longest_wait: ClassVar[Bound | None] = None
    _kind, _subject = SCHEDULER, Scheduling


class RefreshRuleConformance(_Conformance):
    _kind, _subject = REFRESH_RULE, Refreshing
    _settings = ()


class RouterConformance(_Conformance):
    longest_wait: ClassVar[Bound | None] = None
    _kind, _subject = ROUTER, Routing


class BatcherConformance(_Conformance):
    longest_wait: ClassVar[Bound | None] = None
    queue: ClassVar[Any] = OpenQueue
    _kind, _subject = BATCHER, BatchingPolicy
    _settings = ("longest_wait", "queue")
