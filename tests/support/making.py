"""Plug-ins that are made, by functions that say of what kind they are and one that does not."""

from functools import partial

from engines.dllm.scheduling.scheduler import PhaseScheduler, Scheduler
from engines.policies.batching import Chunked


def made_scheduler(config, pool, rule, *, exact_steps) -> Scheduler:
    return PhaseScheduler(config, pool, rule, exact_steps=exact_steps)


PARTLY = partial(Chunked, max_num_batched_tokens=64)


def unsaid():
    return object()
