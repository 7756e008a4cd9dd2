"""A measured prefill instance: the tiny decoder on one core of this CPU, its steps planned by the same policies.

Every step is run and timed, once; arrivals, queues and policies live on a clock that the steps put forward. So a run is as
long as its steps, and time a client thinks costs none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import torch

from repro.families.cluster.instance import TINY, MeasuredInstance, measured_instance
from repro.families.cluster.laps_settings import MEASURED_GRID, PrefillSettings

_THREADS = 1
"""The model's products are too small to divide."""
PROFILED = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Prompts whose steps the policies' step model is fitted to: one in a thousand of the workload's is longer."""
REPEATS = 3
"""Repeats of each, of which the shortest counts."""


@contextmanager
def serving(settings: PrefillSettings) -> Iterator[PrefillSettings]:
    """With the instance that the settings have, or this CPU's."""
    if settings.instance is not None:
        yield settings
        return
    before = torch.get_num_threads()
    torch.set_num_threads(_THREADS)
    try:
        yield replace(settings, instance=instance(settings.part.most_tokens))
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=1)
def instance(max_len: int) -> MeasuredInstance:
    """Loaded and profiled once a session: all its systems know the same of it."""
    lengths = tuple(sorted({bucket.length for bucket in MEASURED_GRID}))
    batches = tuple(sorted({bucket.batch for bucket in MEASURED_GRID}))
    setting = replace(TINY, max_len=max_len, lengths=lengths, batches=batches, profile_lengths=PROFILED)
    return measured_instance(setting, captured=MEASURED_GRID, repeats=REPEATS)
