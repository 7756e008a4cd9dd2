"""Policies of one's own in AMPD's place, simulated and live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.ampd.policies import RoutingConfig
from engines.knobs import knobs_of
from engines.policies.on_time import LateShare
from engines.policies.own import BINDER, QUEUE, ROUTER, Own, check_beside, named_in

POLICIES = (ROUTER, BINDER, QUEUE)
_REPLACED = {
    "router": (*knobs_of(RoutingConfig), "adaptive_routing", "dispatch"),
    "queue": ("prefill_reordering", "queue_order", "w", *knobs_of(LateShare)),
}
"""Knobs of what each stands in place of."""


@dataclass(frozen=True, kw_only=True)
class OwnPolicies:
    router: str | None = None
    """A router of one's own as module:NAME, made for every run, with what it takes of model, slo and seed."""
    binder: str | None = None
    """A binder of one's own as module:NAME, which says where a new session lives; made likewise."""
    queue: str | None = None
    """An order of waiting prefills of one's own as module:NAME, a PrefillQueue made for every worker, with slo where it takes that."""


def own_policies(given: Mapping[str, Any]) -> dict[str, Own]:
    """By kind. Refuses knobs beside them of what they replace."""
    found = named_in(given, POLICIES)
    check_beside(found, _REPLACED, given)
    return found
