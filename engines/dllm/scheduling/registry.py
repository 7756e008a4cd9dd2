"""The schedulers of the packed engine, by the name of the knob."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from engines.dllm.scheduling.lookahead import LookaheadScheduler
from engines.dllm.scheduling.scheduler import PhaseScheduler, RequestScheduler, Scheduler
from engines.errors import UserError

SCHEDULERS: Mapping[str, type[Scheduler]] = MappingProxyType(
    {"phase": PhaseScheduler, "request": RequestScheduler, "lookahead": LookaheadScheduler}
)


def scheduler_of(name: str) -> type[Scheduler]:
    """One of ``SCHEDULERS``, or a subclass of ``Scheduler`` as ``module:NAME``."""
    if name in SCHEDULERS:
        return SCHEDULERS[name]
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute, None)
    except (ImportError, ValueError) as error:
        raise UserError(f"scheduler={name!r} cannot be imported ({error}): correct it or install it") from error
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        raise UserError(f"scheduler={name!r} is no subclass of engines.dllm.scheduling.scheduler.Scheduler: name one")
    return found
