"""The schedulers of the packed engine, by the name of the knob."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engines.dllm.config import SchedulerName
from engines.dllm.scheduling.lookahead import LookaheadScheduler
from engines.dllm.scheduling.scheduler import PhaseScheduler, RequestScheduler, Scheduler

SCHEDULERS: Mapping[SchedulerName, type[Scheduler]] = MappingProxyType(
    {"phase": PhaseScheduler, "request": RequestScheduler, "lookahead": LookaheadScheduler}
)
