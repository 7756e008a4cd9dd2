"""The schedulers of the packed engine, by the name of the knob."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engines.dllm.scheduling.lookahead import LookaheadScheduler
from engines.dllm.scheduling.scheduler import PhaseScheduler, RequestScheduler, Scheduler
from engines.errors import UserError
from engines.named import load_named, where_of

SCHEDULERS: Mapping[str, type[Scheduler]] = MappingProxyType(
    {"phase": PhaseScheduler, "request": RequestScheduler, "lookahead": LookaheadScheduler}
)


def scheduler_of(name: str) -> type[Scheduler]:
    """One of ``SCHEDULERS``, or a subclass of ``Scheduler`` as ``module:NAME`` or by the name that an installed package gives it."""
    if name in SCHEDULERS:
        return SCHEDULERS[name]
    found = load_named("scheduler", where_of("scheduler", name, SCHEDULERS))
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        raise UserError(f"scheduler={name!r} is no subclass of engines.dllm.scheduling.scheduler.Scheduler: name one")
    return found
