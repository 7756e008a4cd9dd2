"""One property of a plug-in, judged."""

from typing import Any
from unittest import mock

from repro.testing.batchers import BATCHER, ROUTER, BatchingPolicy, Routing
from repro.testing.properties import PropertyResult, verdict
from repro.testing.schedulers import REFRESH_RULE, SCHEDULER, Refreshing, Scheduling

SUITES = {
    "scheduler": (SCHEDULER, Scheduling),
    "rule": (REFRESH_RULE, Refreshing),
    "router": (ROUTER, Routing),
    "batcher": (BATCHER, BatchingPolicy),
}


def judged(kind: str, name: str, make: Any, *, examples: int = 50, **given: Any) -> PropertyResult:
    """By the first example that fails: making it smaller takes seconds."""
    suite, subject = SUITES[kind]
    (held,) = [each for each in suite.properties if each.name == name]
    with mock.patch("repro.testing.properties.MOST_SHORTER", 0):
        return verdict(held, subject(make=make, **given), examples=examples)
