"""Phases of a denoising step and the rule that says which step is which (dLLM-Serve §2.3)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol


class Phase(Enum):
    """FULL and BUILD are Refresh (all T positions are query rows); REUSE computes the block only."""

    FULL = "full"
    """Full forward; nothing is cached."""
    BUILD = "build"
    """Full forward; every layer selects and packs its context rows."""
    REUSE = "reuse"
    """Block rows against the packed context and their own fresh keys and values."""

    is_refresh: bool

    def __init__(self, label: str) -> None:
        self.is_refresh = label != "reuse"


Window = Literal["block", "suffix"]
"""What a Reuse step recomputes: the active block, or everything from its start to the end."""


class RefreshRule(Protocol):
    """A cache policy's schedule: the only thing in which cached methods differ as state machines."""

    @property
    def caches(self) -> bool: ...

    @property
    def window(self) -> Window: ...

    def phase(self, step_in_block: int) -> Phase: ...


@dataclass(frozen=True, kw_only=True)
class DelayedCache:
    """Full steps until ``delay``, then one that builds the cache, then reuse.

    Delay 1 is Sparse-dLLM and dLLM-Serve; delay 0 with every row kept is Fast-dLLM's dual cache, and
    with the ``suffix`` window its prefix cache.
    """

    delay: int = 1
    window: Window = "block"
    caches: bool = True

    def phase(self, step_in_block: int) -> Phase:
        if step_in_block == self.delay:
            return Phase.BUILD
        return Phase.FULL if step_in_block < self.delay else Phase.REUSE


@dataclass(frozen=True, kw_only=True)
class NoCache:
    """Every step is a full forward (the LLaDA reference sampler)."""

    caches: bool = False
    window: Window = "block"

    def phase(self, step_in_block: int) -> Phase:
        return Phase.FULL
