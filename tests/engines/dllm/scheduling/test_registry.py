"""Schedulers by name, and one's own as ``module:NAME``."""

from __future__ import annotations

import pytest

from engines.dllm import config
from engines.dllm.config import EngineConfig
from engines.dllm.scheduling.registry import SCHEDULERS, scheduler_of
from engines.dllm.scheduling.scheduler import PhaseScheduler
from engines.errors import UserError


def test_every_name_of_the_knob_is_known() -> None:
    assert tuple(SCHEDULERS) == config.SCHEDULER_NAMES
    assert all(scheduler_of(name) is kind for name, kind in SCHEDULERS.items())


def test_ones_own() -> None:
    where = "engines.dllm.scheduling.scheduler:PhaseScheduler"
    assert scheduler_of(where) is PhaseScheduler
    assert EngineConfig(scheduler=where).scheduler == where


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "nosuch.module:Scheduler",
            r"scheduler='nosuch\.module:Scheduler': there is no module nosuch: correct it or install it",
        ),
        (
            "engines.dllm.config:SCHEDULER_NAMES",
            r"is no subclass of engines\.dllm\.scheduling\.scheduler\.Scheduler: name one",
        ),
        (":Scheduler", r"scheduler=':Scheduler': '' is no module: write module:NAME"),
        ("engines.dllm.config:nosuch", "has no 'nosuch': write module:NAME"),
        ("engines.dllm.engine:Engine", "is no subclass of"),
    ],
)
def test_what_is_no_scheduler_is_refused(name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        scheduler_of(name)
