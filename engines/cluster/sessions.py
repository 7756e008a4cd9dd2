"""Sessions and their arrivals. Rounds of prefill and decode alternate with the environment (tools, retrieval, a user; AMPD §1).

Sessions arrive by the clock of a run: in an open loop each at its own time, in a closed loop one after the other for each client. The
events of a run are a heap of times, handlers and arguments: no threads, no wall clock. Events of the same time run in the order they
were scheduled, so a run always repeats itself. No event is cancelled: its handler compares the version it was given with the current.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from engines.errors import UserError, require


class Round(NamedTuple):
    """One prefill and the decode that follows it.

    The first of ``decode_tokens`` comes from the prefill itself, so a round of one token never decodes.
    """

    prefill_tokens: int
    """Tokens that this round adds to the history: the prompt, or what the environment returned."""
    decode_tokens: int
    delay_s: float = 0.0
    """Seconds in the environment after the round, before the next round is ready."""


class Prefix(NamedTuple):
    """Names of the blocks of each round's prompt, including its history. Blocks of the same name hold the same tokens, and follow the
    same tokens. The last block of a prompt, which may be filled in part, needs no name."""

    block_tokens: int
    rounds: tuple[tuple[int, ...], ...]

    def fits(self, lengths: Iterable[Sequence[Any]]) -> bool:
        """Whether there is a name for each whole block of rounds with these prefill and decode tokens."""
        tokens, size = 0, self.block_tokens
        for names, (prefill, decode, *_) in zip(self.rounds, lengths, strict=True):
            tokens += prefill
            if len(names) not in (tokens // size, -(-tokens // size)):
                return False
            tokens += decode or 0
        return True


class PrefixNames:
    """Names the beginnings of number sequences: 0, 1, 2, ... in the order in which they are first seen."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], int] = {}
        """Each name by the name of the beginning before it (-1 for an empty one) and the number that follows."""

    def of(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Returns a name for each beginning of the sequence, the shortest first."""
        names, result, name = self._names, [], -1
        for number in numbers:
            name = names.setdefault((name, number), len(names))
            result.append(name)
        return tuple(result)


@dataclass(frozen=True, slots=True)
class Session:
    """Rounds run one after the other; the history of a round is all tokens of the rounds before it."""

    session_id: int
    arrival_s: float
    rounds: tuple[Round, ...]
    prefix: Prefix | None = field(default=None, repr=False)
    """The names of its prompts' blocks, which tell which tokens other sessions share; None if unknown."""

    def __post_init__(self) -> None:
        if not (self.arrival_s >= 0 and math.isfinite(self.arrival_s)):
            raise UserError(f"session {self.session_id}: arrival_s={self.arrival_s} must be finite and not negative")
        if not self.rounds:
            raise UserError(f"session {self.session_id} has no rounds: give at least one")
        for index, (prefill, decode, delay) in enumerate(self.rounds):
            if prefill < 1 or decode < 1 or not 0 <= delay < math.inf:
                raise UserError(
                    f"session {self.session_id} round {index}: prefill_tokens={prefill}, decode_tokens={decode}, "
                    f"delay_s={delay}: a round prefills and generates at least one token, and waits 0 s or more"
                )

    @property
    def prefill_tokens(self) -> int:
        return sum([entry.prefill_tokens for entry in self.rounds])

    @property
    def decode_tokens(self) -> int:
        return sum([entry.decode_tokens for entry in self.rounds])

    @property
    def context_tokens(self) -> int:
        """Tokens of K/V at the end of the session, the most it ever holds."""
        return self.prefill_tokens + self.decode_tokens


@dataclass(frozen=True, slots=True, eq=False)
class SessionColumns(Sequence[Session]):
    """Sessions of one round each, numbered from 0, as arrays [n]: a million objects would take a gigabyte."""

    arrival_s: npt.NDArray[np.float64]
    """Finite and not negative."""
    prefill: npt.NDArray[np.int64]
    """At least 1 each, like ``decode``."""
    decode: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return tuple(self[index] for index in range(len(self))[place])
        index = range(len(self))[place]
        rounds = (Round(int(self.prefill[index]), int(self.decode[index])),)
        return Session(index, float(self.arrival_s[index]), rounds)


def contexts_of(sessions: Sequence[Session]) -> npt.NDArray[np.int64]:
    """[n] tokens of K/V of each session at its end."""
    if isinstance(sessions, SessionColumns):
        return sessions.prefill + sessions.decode
    return np.array([session.context_tokens for session in sessions], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class OpenLoop:
    """Sessions start at their own ``arrival_s``, whatever the system does."""

    sessions: Iterable[Session]
    """In rising order of ``arrival_s``. They are drawn one at a time, so a generator will do."""


@dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """Each of ``num_clients`` clients runs one session after the other, ``think_s`` apart; ``arrival_s`` is ignored."""

    sessions: Sequence[Session]
    num_clients: int
    think_s: float = 0.0

    def __post_init__(self) -> None:
        require(self.num_clients >= 1, f"num_clients={self.num_clients} must be at least 1")
        require(0 <= self.think_s < math.inf, f"think_s={self.think_s} must be 0 s or more")


Arrivals = OpenLoop | ClosedLoop


Handler = Callable[..., None]


@dataclass(slots=True, eq=False)
class EventLoop:
    """A heap of events. Events of the same time run in the order they were scheduled."""

    now: float = 0.0
    is_stopped: bool = False
    """A handler sets this to end the run; events still scheduled are left."""
    _heap: list[tuple[float, int, Handler, tuple[Any, ...]]] = field(default_factory=list)
    _num_scheduled: int = 0

    def at(self, time_s: float, handler: Handler, *args: Any) -> None:
        self._num_scheduled += 1
        heappush(self._heap, (time_s, self._num_scheduled, handler, args))

    @property
    def num_events(self) -> int:
        """Events handled so far."""
        return self._num_scheduled - len(self._heap)

    def run(self, until_s: float = math.inf) -> None:
        """Handle events until none is left, one stops the loop, or the next is later than ``until_s``."""
        heap = self._heap
        while heap and not self.is_stopped:
            if heap[0][0] > until_s:
                self.now = until_s
                return
            self.now, _, handler, args = heappop(heap)
            handler(*args)


class _Arriving(Protocol):
    @property
    def session_id(self) -> int: ...
    @property
    def arrival_s(self) -> float: ...


Item = TypeVar("Item", bound=_Arriving)


class OpenArrivals(Generic[Item]):
    """Calls ``arrive`` with each item when it is due. An item is drawn when the one before it arrives."""

    def __init__(self, loop: EventLoop, items: Iterable[Item], arrive: Callable[[Item], None]) -> None:
        self._loop, self._items, self._arrive = loop, iter(items), arrive
        self.is_over = False
        """Whether all items have arrived."""
        self._next_arrival(None)

    def _next_arrival(self, item: Item | None) -> None:
        """Draw the next item, then let this one arrive; None stands for the start, before the first item."""
        following = next(self._items, None)
        if following is None:
            self.is_over = True
        elif following.arrival_s >= self._loop.now:
            self._loop.at(following.arrival_s, self._next_arrival, following)
        else:
            raise UserError(
                f"session {following.session_id}: arrival_s={following.arrival_s} is before {self._loop.now}: sort what arrives"
            )
        if item is not None:
            self._arrive(item)


class Clients:
    """Calls ``arrive`` with a client's next session ``think_s`` after the client's last session ended."""

    def __init__(self, loop: EventLoop, closed: ClosedLoop, arrive: Callable[[Session], None]) -> None:
        self._loop, self._sessions, self._arrive = loop, deque(closed.sessions), arrive
        self.think_s = closed.think_s
        self.num_thinking = 0
        """Clients whose next session is scheduled."""
        for _ in range(min(closed.num_clients, len(closed.sessions))):
            self._schedule(0.0)

    @property
    def is_over(self) -> bool:
        """Whether all sessions have begun."""
        return not self._sessions and not self.num_thinking

    def go_on(self, now: float) -> bool:
        """A client's session has ended. Schedule its next one, and return whether there is one."""
        if not self._sessions:
            return False
        self._schedule(now + self.think_s)
        return True

    def _schedule(self, time_s: float) -> None:
        self.num_thinking += 1
        self._loop.at(time_s, self._begin_session, self._sessions.popleft())

    def _begin_session(self, session: Session) -> None:
        self.num_thinking -= 1
        self._arrive(session)
