"""Rules that choose which rows a step computes, and to which keys they attend.

A request has K and V of every position. A step computes some rows from their current tokens. Each layer overwrites the K and V of these
rows, which then attend to the keys. A row that is left out keeps the K and V of the last step that computed it, whatever its token was
then. Its mask cannot be committed. So a rule decides three things: which rows, which keys, and when to compute all rows again.

The host must know the positions of committed tokens, and therefore waits for every step (``DecodeConfig.learns``).
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
    """The state of a request as a step begins."""

    block_start: int
    block_end: int
    step_in_block: int
    masks: Positions
    """Positions of the masks in the whole answer."""
    quota: int
    """Tokens that the schedule wants this step to commit."""

    @property
    def in_block(self) -> Positions:
        return self.masks[(self.masks >= self.block_start) & (self.masks < self.block_end)]


class RowRule(ABC):
    """A refresh rule whose steps are none of FULL, BUILD and REUSE: ``choose`` says what each computes. A rule with ``shift`` 1 serves
    models whose row predicts the next token."""

    caches: ClassVar[bool] = True
    window: ClassVar[Window] = "block"
    needs: Collection[str] = frozenset()
    """``ids`` if which tokens are committed, not only how many, decides how many rows there are; ``attention`` if the rule heeds it."""

    def phase(self, step_in_block: int) -> Phase:
        return Phase.REUSE

    @abstractmethod
    def of(self, request: Request) -> "RowRule":
        """Return the request's own rule, which keeps state."""

    @abstractmethod
    def choose(self, at: Standing) -> Chosen: ...

    def see(self, seen: Seen) -> None:
        return


class Rows:
    """The positions of a request that hold masks, as state from which rules choose."""

    def __init__(self, first: int, end: int) -> None:
        self.masks: Positions = np.arange(first, end)

    def committed(self, chosen: Chosen, count: int, places: Any) -> tuple[int, ...]:
        """Unmask the tokens that a step committed and return their positions: if ``places`` is None, the first that it could commit."""
        if places is None:
            places = array_of(chosen.places)[:count].tolist()
        self.masks = self.masks[~np.isin(self.masks, places)]
        return tuple(places)
