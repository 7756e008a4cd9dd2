"""An event loop whose time moves only when nothing is left to do: what sleeps is exact, and takes no time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everything waits, and nothing will happen"
        self.now += timeout
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._selector_here = _Selector()
        super().__init__(self._selector_here)

    def time(self) -> float:
        return self._selector_here.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
