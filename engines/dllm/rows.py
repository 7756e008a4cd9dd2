"""Rules that choose which rows a step computes, and to which keys they attend.

A request has K and V of every position. A step computes some rows from their current tokens, each layer writes their K and V over those
that were there, and then they attend to the keys. A row that is left out keeps what the last step made that computed it, whatever its
token was then, and its mask cannot be committed. So a rule says three things: which rows, which keys, when all rows again.

Positions of tokens have to be known on the host, which therefore waits for every step (``DecodeConfig.learns``).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.dllm.config import Phase, Seen, Window
from engines.dllm.plan import Chosen, Request

Positions = NDArray[np.int64]
"""In ascending order."""
NONE: Positions = np.zeros(0, dtype=np.int64)


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
    def of(self, request: Request) -> "RowRule":
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
