"""Sessions of rounds, recorded or yielded: their types, sets of them, and errors about wrong ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from engines.cluster.sessions import Prefix
from engines.errors import UserError
from repro.workloads.card import Origin
from repro.workloads.knobs import TimeUnit

MOST_TOKENS = 2**31 - 1
MOST_SECONDS = 1e12
MOST_DELAY_S = 10**6
"""The most seconds between two rounds: twelve days."""
MOST_ROWS = 10**6
_SHOWN = 60
"""The most characters of a value that an error shows."""
MESSAGES = ("conversation", "conversations", "messages", "turns")
"""Columns that can hold a whole chat."""
SessionFormat = Literal["sessions_jsonl", "toolbench_dfsdt", "hotpotqa_distractor", "dureader_search"]
"""Formats of session files that a card can name."""


class RecordedRound(NamedTuple):
    prefill_tokens: int
    decode_tokens: int | None
    delay_s: float | None = None
    """Seconds from this round's answer to the next round."""


class TracedSession(NamedTuple):
    """A session of rounds. A request is a session of one round."""

    rounds: tuple[RecordedRound, ...]
    arrival_s: float | None = None
    """The arrival in seconds, counted from any moment."""
    prompt: str | None = None
    """The prompt's text, if there is one round."""
    where: str = ""
    """File and line of the first row, for errors."""
    prefix: Prefix | None = None
    """Which tokens the session shares with others, from the file's hash_ids."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainSessions(Sequence[TracedSession]):
    """The requests of a file without ``hash_ids``, as arrays [n], because a million of them take a gigabyte as objects."""

    where: str
    """The file, and the kind of entry that ``numbers`` count (line or row)."""
    numbers: npt.NDArray[np.int64]
    prefill: npt.NDArray[np.int64]
    decode: npt.NDArray[np.int64]
    arrival_s: npt.NDArray[np.float64] | None

    def __len__(self) -> int:
        return len(self.prefill)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            arrays: dict[str, Any] = {
                name: value[position] for name, value in vars(self).items() if isinstance(value, np.ndarray)
            }
            return replace(self, **arrays)
        rounds = (RecordedRound(int(self.prefill[position]), int(self.decode[position])),)
        arrival_s = None if self.arrival_s is None else float(self.arrival_s[position])
        return TracedSession(rounds, arrival_s, where=f"{self.where} {self.numbers[position]}")


def block_of(sessions: Sequence[TracedSession]) -> int | None:
    """Tokens in each of the sessions' named blocks; None if the sessions name no blocks."""
    prefixes = () if isinstance(sessions, PlainSessions) else (session.prefix for session in sessions)
    return next((prefix.block_tokens for prefix in prefixes if prefix is not None), None)


@dataclass(frozen=True, kw_only=True)
class Trace:
    name: str
    origin: Origin
    sessions: Sequence[TracedSession]
    columns: Mapping[str, str]
    num_dropped: int = 0
    """Rows left out because they have no prompt or no answer, such as failed calls."""
    noun: Literal["file", "workload"] = "file"
    """How descriptions name the source."""
    unit: Literal["row", "session"] = "row"
    """How descriptions name one entry."""
    time: str | None = None
    """The column of times."""
    time_unit: str | None = None
    """The unit of times, or "dates"."""
    unclear: str | None = None
    """Why the times cannot be used, if they cannot."""
    remarks: tuple[str, ...] = ()
    """Clauses for the description that say how we read the rows."""
    uses_times: bool = False
    """Whether we derive delays within sessions from the times."""
    span_s: float | None = None
    """Seconds from the first to the last time."""

    @property
    def how(self) -> str:
        """How we got the numbers, in a word for descriptions."""
        return "recorded" if self.noun == "file" else "yielded"

    @property
    def num_rounds(self) -> int:
        is_plain = isinstance(self.sessions, PlainSessions)
        return len(self.sessions) if is_plain else sum(len(session.rounds) for session in self.sessions)


@dataclass(frozen=True, kw_only=True)
class TraceFile:
    """A file and a user's options for reading it."""

    where: str
    """The file's path."""
    columns: str | None = None
    time_unit: TimeUnit | None = None
    sort: bool = False
    gen_length: int | None = None
    """Tokens of answers whose length the file does not give."""


def bad_field(location: str, field: str, value: object, fix: str) -> UserError:
    # Python refuses to print a number of thousands of digits, and nobody would read it.
    is_long = isinstance(value, int) and not -(10**60) < value < 10**60
    shown = "a number of more than 60 digits" if is_long else repr(value)
    if len(shown) > _SHOWN:
        shown = shown[: _SHOWN - 3] + "..."
    return UserError(f"{location}: field {field!r} is {shown}: {fix}")
