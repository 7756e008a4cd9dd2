"""Sessions of rounds, recorded or yielded: a set of them, and what is said of a wrong one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from engines.cluster.sessions import Prefix, PrefixNames
from engines.errors import UserError
from repro.workloads.card import Origin
from repro.workloads.knobs import TimeUnit

MOST_TOKENS = 2**31 - 1
MOST_SECONDS = 1e12
MOST_DELAY_S = 10**6
"""Between two rounds; twelve days."""
MOST_ROWS = 10**6
_SHOWN = 60
"""Characters of a value in a refusal."""
MESSAGES = ("conversation", "conversations", "messages", "turns")
"""Columns of a whole chat."""
SessionFormat = Literal["sessions_jsonl", "toolbench_dfsdt", "hotpotqa_distractor", "dureader_search"]
"""Formats of session files that a card knows."""


class RecordedRound(NamedTuple):
    prefill_tokens: int
    decode_tokens: int | None
    delay_s: float | None = None
    """From its answer to the next round."""


class TracedSession(NamedTuple):
    """A request is a session of one round."""

    rounds: tuple[RecordedRound, ...]
    arrival_s: float | None = None
    """Seconds from any moment on."""
    prompt: str | None = None
    """The text of its one prompt."""
    where: str = ""
    """File and line of its first row, for what is said of it."""
    prefix: Prefix | None = None
    """Which of its tokens others have too: the file's hash_ids."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainSessions(Sequence[TracedSession]):
    """Requests of a file as arrays [n]: as objects, a million of them take a gigabyte."""

    where: str
    """The file, and what ``numbers`` count in it."""
    numbers: npt.NDArray[np.int64]
    prefill: npt.NDArray[np.int64]
    decode: npt.NDArray[np.int64]
    arrival_s: npt.NDArray[np.float64] | None
    block: int | None = None
    """Tokens of the blocks whose names ``hash_ids`` are, if any."""
    hash_ids: Sequence[list[int]] = field(default=(), repr=False)
    has_prefix: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.prefill)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return tuple(self[each] for each in range(len(self))[place])
        index = range(len(self))[place]
        rounds = (RecordedRound(int(self.prefill[index]), int(self.decode[index])),)
        arrival_s = None if self.arrival_s is None else float(self.arrival_s[index])
        return TracedSession(rounds, arrival_s, None, f"{self.where} {self.numbers[index]}", self.prefix_of(index))

    def first(self, num: int) -> "PlainSessions":
        cut = {name: getattr(self, name)[:num] for name in ("numbers", "prefill", "decode")}
        return replace(self, **cut, arrival_s=None if self.arrival_s is None else self.arrival_s[:num])

    def bare(self) -> "PlainSessions":
        """Sessions that share nothing."""
        return replace(self, block=None)

    def prefix_of(self, index: int) -> Prefix | None:
        if self.block is None or self.has_prefix is None or not self.has_prefix[index]:
            return None
        return Prefix(self.block, (self._names[index],))

    @cached_property
    def _names(self) -> list[tuple[int, ...]]:
        return list(map(PrefixNames().of, self.hash_ids))


def block_of(sessions: Sequence[TracedSession]) -> int | None:
    """Tokens of the blocks that the sessions have names of; None where they have none."""
    if isinstance(sessions, PlainSessions):
        return sessions.block
    return next((each.prefix.block_tokens for each in sessions if each.prefix is not None), None)


@dataclass(frozen=True, kw_only=True)
class Trace:
    name: str
    origin: Origin
    sessions: Sequence[TracedSession]
    columns: Mapping[str, str]
    num_dropped: int = 0
    """Rows left out, without a prompt or an answer: failed calls."""
    noun: Literal["file", "workload"] = "file"
    """What it is of."""
    unit: Literal["row", "session"] = "row"
    """What it is counted in."""
    time: str | None = None
    """The column of times."""
    time_unit: str | None = None
    """The unit of its times, or dates."""
    unclear: str | None = None
    """Why its times cannot be used, if they cannot."""
    remarks: tuple[str, ...] = ()
    """Clauses that say what was made of its rows."""
    uses_times: bool = False
    """Whether delays within sessions follow from its times."""
    span_s: float | None = None
    """From the first to the last of its times."""

    @property
    def how(self) -> str:
        """Where its numbers are from."""
        return "recorded" if self.noun == "file" else "yielded"

    @property
    def num_rounds(self) -> int:
        is_plain = isinstance(self.sessions, PlainSessions)
        return len(self.sessions) if is_plain else sum(len(each.rounds) for each in self.sessions)


@dataclass(frozen=True, kw_only=True)
class TraceFile:
    """What a user says of a file."""

    where: str
    """Its path."""
    columns: str | None = None
    time_unit: TimeUnit | None = None
    sort: bool = False
    gen_length: int | None = None
    """Tokens of the answers that the file tells no length of."""


def bad_field(where: str, field: str, value: object, fix: str) -> UserError:
    # Python writes no number of thousands of digits, and none is worth reading.
    is_long = isinstance(value, int) and not -(10**60) < value < 10**60
    shown = "a number of more than 60 digits" if is_long else repr(value)
    if len(shown) > _SHOWN:
        shown = shown[: _SHOWN - 3] + "..."
    return UserError(f"{where}: field {field!r} is {shown}: {fix}")
