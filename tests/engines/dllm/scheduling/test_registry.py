"""Schedulers by name, and one's own as ``module:NAME``."""

from support.refusals import refuses

from engines.dllm.config import EngineConfig
from engines.dllm.scheduling.registry import SCHEDULERS, scheduler_of
from engines.dllm.scheduling.scheduler import PhaseScheduler


def test_every_name_is_found_and_no_other():
    assert all(scheduler_of(name) is kind for name, kind in SCHEDULERS.items())
    with refuses("scheduler='phases'"):
        scheduler_of("phases")


def test_ones_own():
    where = "engines.dllm.scheduling.scheduler:PhaseScheduler"
    assert scheduler_of(where) is PhaseScheduler
    assert EngineConfig(scheduler=where).scheduler == where
