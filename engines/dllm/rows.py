"""Rules that choose which rows a step computes, and to which keys they attend.

A request has K and V of every position. A step computes some rows from their current tokens, each layer writes their K and V over those
that were there, and then they attend to the keys. A row that is left out keeps what the last step made that computed it, whatever its
token was then, and its mask cannot be committed. So a rule says three things: which rows, which keys, when all rows again.

Positions of tokens have to be known on the host, which therefore waits for every step (``DecodeConfig.learns``).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from engines.dllm.config import Phase, Seen, Window

if TYPE_CHECKING:
    from engines.dllm.plan import Request

Positions = NDArray[np.int64]
"""In ascending order."""
Numbers = NDArray[Any]
NONE: Positions = np.zeros(0, dtype=np.int64)
SIZE = NONE.itemsize
"""Bytes of a position."""


class Chosen(NamedTuple):
    """What a step computes. Arrays are kept as their bytes: the engine compares every plan with what is due."""

    rows: bytes = b""
    """Positions, as int64s; so the next two."""
    keys: bytes = b""
    """None for all."""
    places: bytes = b""
    """Masks of the block that get logits."""
    weights: bytes = b""
    """float64 of each place, by which its confidence is multiplied before it is ranked: below 0 it is not committed. None for all 1."""
    commit: int = 0

    @classmethod
    def of(
        cls, rows: Positions, places: Positions, commit: int, keys: Positions = NONE, weights: Numbers = NONE
    ) -> Self:
        own, attended, asked = (each.astype(np.int64).tobytes() for each in (rows, keys, places))
        return cls(own, attended, asked, weights.astype(np.float64).tobytes(), commit)

    @property
    def num_rows(self) -> int:
        return len(self.rows) // SIZE


NOTHING_CHOSEN = Chosen()


def array_of(positions: bytes) -> Positions:
    return np.frombuffer(positions, dtype=np.int64)


class Standing(NamedTuple):
    """Where a request stands as a step begins."""

    block_start: int
    block_end: int
    step_in_block: int
    masks: Positions
    """Those of the whole answer."""
    quota: int
    """Tokens that the schedule wants of this step."""

    @property
    def in_block(self) -> Positions:
        return self.masks[(self.masks >= self.block_start) & (self.masks < self.block_end)]


class RowRule(ABC):
    """A refresh rule whose steps are none of FULL, BUILD and REUSE: ``choose`` says what each computes. A class with ``shift`` 1 serves
    models whose row predicts the next token."""

    caches: ClassVar[bool] = True
    window: ClassVar[Window] = "block"
    needs: Collection[str] = frozenset()
    """``ids`` where which tokens are committed, and not only how many, decides how many rows there are; ``attention`` where it heeds it."""

    def phase(self, step_in_block: int) -> Phase:
        return Phase.REUSE

    @abstractmethod
    def of(self, request: "Request") -> "RowRule":
        """A request's own, which keeps state."""

    @abstractmethod
    def choose(self, at: Standing) -> Chosen: ...

    def see(self, seen: Seen) -> None:
        return


class Rows:
    """Which positions of a request hold masks, as a state that a rule is asked by."""

    def __init__(self, first: int, end: int) -> None:
        self.masks: Positions = np.arange(first, end)

    def committed(self, chosen: Chosen, count: int, places: Any) -> tuple[int, ...]:
        """Positions of the tokens that a step committed; where nobody says which, the first that it could."""
        if places is None:
            places = array_of(chosen.places)[:count].tolist()
        self.masks = self.masks[~np.isin(self.masks, places)]
        return tuple(places)
