"""A measured prefill instance: the tiny decoder on one core of this CPU, whose steps the same policies plan.

We run and time every step once. Arrivals, queues and policies follow a virtual clock that each step advances. So a run takes as long
as its steps, and clients' think time costs nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import torch

from repro.families.cluster.instance import TINY, MeasuredInstance, measured_instance
from repro.families.cluster.laps_settings import MEASURED_GRID, PrefillSettings

_THREADS = 1
"""One thread, because the model's matrix products are too small to divide."""
PROFILED = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Prompt lengths of the steps to which we fit the policies' step model. One in a thousand of the workload's prompts is longer."""
REPEATS = 3
"""How often we run each profiled step. The fastest run counts."""


@contextmanager
def serving(settings: PrefillSettings) -> Iterator[PrefillSettings]:
    """Yield the settings with an instance: their own if they have one, else this CPU's."""
    if settings.instance is not None:
        yield settings
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(_THREADS)
    try:
        yield replace(settings, instance=instance(settings.part.most_tokens))
    finally:
        torch.set_num_threads(num_threads)


@lru_cache(maxsize=1)
def instance(max_len: int) -> MeasuredInstance:
    """The instance of this CPU. We load and profile it once per process, so that all systems know the same of it."""
    lengths = tuple(sorted({bucket.length for bucket in MEASURED_GRID}))
    batches = tuple(sorted({bucket.batch for bucket in MEASURED_GRID}))
    setting = replace(TINY, max_len=max_len, lengths=lengths, batches=batches, profile_lengths=PROFILED)
    return measured_instance(setting, captured=MEASURED_GRID, repeats=REPEATS)
