"""Schedulers by name, and one's own as ``module:NAME``."""

from engines.dllm import config
from engines.dllm.config import EngineConfig
from engines.dllm.scheduling.registry import SCHEDULERS, scheduler_of
from engines.dllm.scheduling.scheduler import PhaseScheduler


def test_every_name_of_the_knob_is_known():
    assert tuple(SCHEDULERS) == config.SCHEDULER_NAMES
    assert all(scheduler_of(name) is kind for name, kind in SCHEDULERS.items())


def test_ones_own():
    where = "engines.dllm.scheduling.scheduler:PhaseScheduler"
    assert scheduler_of(where) is PhaseScheduler
    assert EngineConfig(scheduler=where).scheduler == where
