"""The conformance suite, as classes for pytest and as functions. Authors run it on their scheduler, refresh rule, router or batching
policy."""

from collections.abc import Callable, Collection
from typing import Any, ClassVar
from unittest import SkipTest

from engines.policies.views import OpenQueue
from repro.testing.batchers import BATCHER, ROUTER, BatchingPolicy, Routing
from repro.testing.properties import EXAMPLES, Ahead, Bound, Kind, verdict, verdicts
from repro.testing.schedulers import REFRESH_RULE, SCHEDULER, Refreshing, Scheduling

__all__ = [
    "Ahead",
    "BatcherConformance",
    "RefreshRuleConformance",
    "RouterConformance",
    "SchedulerConformance",
    "check_batcher",
    "check_refresh_rule",
    "check_router",
    "check_scheduler",
]


class _Conformance:
    """A test for each property. ``without`` names properties that the plug-in is known to lack."""

    make: ClassVar[Any]
    """The plug-in, or a callable that returns one."""
    examples: ClassVar[int] = EXAMPLES
    seed: ClassVar[int] = 0
    without: ClassVar[Collection[str]] = ()
    _kind: ClassVar[Kind[Any]]
    _subject: ClassVar[Callable[..., Any]]
    _settings: ClassVar[tuple[str, ...]] = ("longest_wait",)
    """Attributes that the subject takes in addition to ``make``."""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        metafunc.parametrize("held", self._kind.properties, ids=[prop.name for prop in self._kind.properties])

    def test_holds(self, held: Any) -> None:
        suite = type(self)
        subject = suite._subject(make=suite.make, **{name: getattr(suite, name) for name in suite._settings})
        result = verdict(held, subject, examples=suite.examples, seed=suite.seed, without=suite.without)
        if result.skipped is not None:
            raise SkipTest(result.skipped)
        assert result.failure is None, result.failure

    @classmethod
    def check(
        cls, make: Any, *, examples: int = EXAMPLES, seed: int = 0, without: Collection[str] = (), **settings: Any
    ) -> None:
        """Raise AssertionError, with one sentence, for the first property that does not hold. ``settings`` are the class's own."""
        subject = cls._subject(make=make, **settings)
        for result in verdicts(cls._kind, subject, examples=examples, seed=seed, without=without):
            if result.failure is not None:
                raise AssertionError(result.failure)


class SchedulerConformance(_Conformance):
    """``make`` is a subclass of ``Scheduler``, or makes one from config, pool, rule and exact_steps. ``longest_wait(ahead)`` is the most
    steps from a request's submission to its end; the default is the scheduler's own method of that name."""

    longest_wait: ClassVar[Bound | None] = None
    _kind, _subject = SCHEDULER, Scheduling


class RefreshRuleConformance(_Conformance):
    """``make`` is a refresh rule, or a callable that returns one."""

    _kind, _subject = REFRESH_RULE, Refreshing
    _settings = ()


class RouterConformance(_Conformance):
    """``make`` is a router, or makes one from those of model, slo and seed that it takes. ``longest_wait`` is in seconds."""

    longest_wait: ClassVar[Bound | None] = None
    _kind, _subject = ROUTER, Routing


class BatcherConformance(_Conformance):
    """``make`` is a batching policy, or makes one from those of max_num_batched_tokens, max_num_seqs, model and slo that it takes.
    ``queue`` makes the queue that holds its prefills. ``longest_wait`` is in seconds."""

    longest_wait: ClassVar[Bound | None] = None
    queue: ClassVar[Any] = OpenQueue
    _kind, _subject = BATCHER, BatchingPolicy
    _settings = ("longest_wait", "queue")


check_scheduler = SchedulerConformance.check
check_refresh_rule = RefreshRuleConformance.check
check_router = RouterConformance.check
check_batcher = BatcherConformance.check
