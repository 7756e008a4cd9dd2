"""The end of a run on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from engines.parallel.group import TensorParallel
from repro.systems import ranks


class Closing:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def close(self) -> None:
        self._events.append("closed")


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_are_released_before_the_group_is_left(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """A communicator waits for the graphs that hold its collectives."""
    events: list[str] = []

    @contextmanager
    def local_ranks(*_: object) -> Iterator[TensorParallel]:
        try:
            yield TensorParallel()
        finally:
            events.append("left")

    monkeypatch.setattr(ranks, "local_ranks", local_ranks)
    assembled = SimpleNamespace(engine=SimpleNamespace(executor=Closing(events)))
    experiment: Any = SimpleNamespace(
        settings=SimpleNamespace(tensor_parallel=2, device="cpu"),
        system=SimpleNamespace(assemble=lambda *_: assembled),
        resources=None,
        cell=None,
    )
    if fails:
        with pytest.raises(ZeroDivisionError), ranks.leading(experiment):
            raise ZeroDivisionError
    else:
        with ranks.leading(experiment):
            pass
    assert events[0] == "closed"
    assert events[-1] == "left"
