"""The end of a run on several ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from engines.dllm.config import EngineConfig, NoCache
from engines.dllm.scheduling import KvPool, PhaseScheduler
from engines.parallel.group import TensorParallel
from repro.families.dllm import on_torch


class Closing:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def close(self) -> None:
        self._events.append("closed")


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_are_released_before_the_group_is_left(monkeypatch, fails):
    """A communicator waits for the graphs that hold its collectives."""
    events: list[str] = []

    @contextmanager
    def local_ranks(*_: object) -> Iterator[TensorParallel]:
        try:
            yield TensorParallel()
        finally:
            events.append("left")

    measured = SimpleNamespace(scheduler=lambda: PhaseScheduler(EngineConfig(), KvPool(0), NoCache()))
    monkeypatch.setattr(on_torch, "local_ranks", local_ranks)
    monkeypatch.setattr(on_torch, "replace", lambda deployment, **_: deployment)
    monkeypatch.setattr(on_torch, "assemble", lambda *_: (Closing(events), measured))
    deployment: Any = SimpleNamespace(settings=SimpleNamespace(tensor_parallel=2, device="cpu"))
    if fails:
        with pytest.raises(ZeroDivisionError), on_torch.serving(deployment):
            raise ZeroDivisionError
    else:
        with on_torch.serving(deployment):
            pass
    assert events[0] == "closed"
    assert events[-1] == "left"
