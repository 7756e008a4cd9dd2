"""Phases of a denoising step and the rule that says which step is which (dLLM-Serve §2.3)."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol, get_args

from engines.errors import UserError
from engines.named import asked


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


def check_rule(rule: RefreshRule, num_steps: int) -> None:
    """Raise UserError for one that reuses what was not cached in a block of so many steps. Of one that decides by what a model
    gives (``needs``) nobody knows beforehand."""
    name = type(rule).__name__
    for field, value, known in (("caches", rule.caches, (True, False)), ("window", rule.window, get_args(Window))):
        if value not in known:
            raise UserError(f"refresh rule {name} has {field}={value!r}: give one of {', '.join(map(str, known))}")
    if getattr(rule, "needs", None):
        return
    has_cache, copy = False, deepcopy(rule)  # it may count what it is asked
    for step in range(num_steps):
        phase = asked(copy.phase, step)
        if not isinstance(phase, Phase):
            raise UserError(f"refresh rule {name} answers {phase!r:.80} for step {step} of a block, which is no Phase")
        has_cache = has_cache or phase is Phase.BUILD
        if has_cache and not rule.caches:
            raise UserError(f"refresh rule {name} builds a cache in step {step} of a block, and says that it has none")
        if phase is Phase.REUSE and not has_cache:
            raise UserError(f"refresh rule {name} reuses a cache in step {step} of a block, before one was built")


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
