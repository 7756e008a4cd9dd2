"""Arrivals as events: open ones, each at its own time, and clients of a closed loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from engines.ar.session import ClosedLoop, Session


class _Arriving(Protocol):
    @property
    def arrival_s(self) -> float: ...


Item = TypeVar("Item", bound=_Arriving)


class _Schedule(Protocol):
    def at(self, time_s: float, handler: Callable[..., None], *args: Any) -> None: ...


class OpenArrivals(Generic[Item]):
    """``arrive`` is called with each item when it is due; one is drawn when the one before it arrives."""

    def __init__(self, loop: _Schedule, items: Iterable[Item], arrive: Callable[[Item], None]) -> None:
        self._loop, self._items, self._arrive = loop, iter(items), arrive
        self.is_over = False
        """Whether all have arrived."""
        self._draw()

    def _draw(self) -> None:
        item = next(self._items, None)
        if item is None:
            self.is_over = True
        else:
            self._loop.at(item.arrival_s, self._due, item)

    def _due(self, item: Item) -> None:
        self._draw()
        self._arrive(item)


class Clients:
    """``arrive`` is called with a client's next session ``think_s`` after it has ended the one before."""

    def __init__(self, loop: _Schedule, closed: ClosedLoop, arrive: Callable[[Session], None]) -> None:
        self._loop, self._sessions, self._arrive = loop, deque(closed.sessions), arrive
        self.think_s = closed.think_s
        self.num_thinking = 0
        """Clients whose next session is scheduled."""
        for _ in range(min(closed.num_clients, len(closed.sessions))):
            self._come(0.0)

    @property
    def is_over(self) -> bool:
        """Whether all sessions have begun."""
        return not self._sessions and not self.num_thinking

    def go_on(self, now: float) -> bool:
        """A client's session has ended; whether there is another for it."""
        if not self._sessions:
            return False
        self._come(now + self.think_s)
        return True

    def _come(self, time_s: float) -> None:
        self.num_thinking += 1
        self._loop.at(time_s, self._due, self._sessions.popleft())

    def _due(self, session: Session) -> None:
        self.num_thinking -= 1
        self._arrive(session)
