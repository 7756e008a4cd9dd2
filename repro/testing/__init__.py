"""The conformance suite: what the author of a scheduler, a refresh rule, a router or a batching policy runs on it."""

from repro.testing.conformance import (
    BatcherConformance,
    RefreshRuleConformance,
    RouterConformance,
    SchedulerConformance,
    check_batcher,
    check_refresh_rule,
    check_router,
    check_scheduler,
)
from repro.testing.properties import Ahead

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
