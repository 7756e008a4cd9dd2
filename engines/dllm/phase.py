"""Phases of a denoising step and the rule that says which step is which (dLLM-Serve §2.3).

Which rows a step may leave out because their K and V are good enough as they are (ours).

A row's K and V follow from its own token and from what it attends to. A mask that becomes a token changes its row; the next step
computes it once more, from the token. After that the row changes only as its context does, and a step may keep the K and V it has
(dKV-Cache calls it delayed caching, and does so over the whole answer). The same holds of the prompt and of older blocks where a
later block refreshes.

A row predicts its own token (LLaDA). Where it predicts the next one (Dream), a mask needs the row ahead of it, settled or not.
"""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal, NamedTuple, Protocol, get_args, runtime_checkable

from engines.errors import RunError, UserError, require
from engines.knobs import SOMETHING, Checked, Needs, Only, Range
from engines.named import asked


class Phase(Enum):
    """FULL and BUILD are Refresh (all T positions are query rows); REUSE computes the block only. PARTIAL is between the two, and runs
    as a Reuse does."""

    FULL = "full"
    """Full forward; nothing is cached."""
    BUILD = "build"
    """Full forward; every layer selects and packs its context rows."""
    REUSE = "reuse"
    """Block rows against the packed context and their own fresh keys and values."""
    PARTIAL = "partial"
    """A BUILD that begins at the block before: rows ahead of that keep their keys and values (``Settling.full_every``, which makes one
    of what a rule calls BUILD)."""

    is_refresh: bool

    def __init__(self, label: str) -> None:
        self.is_refresh = label in ("full", "build")


Window = Literal["block", "suffix"]
"""What a Reuse step recomputes: the active block, or everything from its start to the end."""


class Seen(NamedTuple):
    """What a step did for one request, told to a rule that asks (``SeeingRule``)."""

    block: int
    step_in_block: int
    phase: Phase
    committed: int
    masks_left: int
    """In the block, after the step."""
    confidences: tuple[float, ...]
    """What ranked the committed tokens, the model's probability unless the method ranks by another measure; the best first."""


class RefreshRule(Protocol):
    """A cache policy's schedule: the only thing in which cached methods differ as state machines."""

    @property
    def caches(self) -> bool: ...

    @property
    def window(self) -> Window: ...

    def phase(self, step_in_block: int) -> Phase: ...


@runtime_checkable
class SeeingRule(RefreshRule, Protocol):
    """One that decides by what a request's steps did. Every request has a copy of its own, or what ``of(request)`` makes where the rule
    has that, which may keep state: ``see`` is called after each step of the request, before the phase of its next one is asked for."""

    needs: Collection[str]
    """``confidences`` where it heeds them; empty where the counts are enough."""

    def see(self, seen: Seen) -> None: ...


_OF_RULES = " of FULL, BUILD and REUSE"


def check_rule(rule: RefreshRule, num_steps: int) -> None:
    """Raise UserError for one that reuses what was not cached in a block of so many steps. Of one that decides by what a model
    gives (``needs``) nobody knows beforehand."""
    name = type(rule).__name__
    for field, value, known in (("caches", rule.caches, (True, False)), ("window", rule.window, get_args(Window))):
        if value not in known:
            raise UserError(f"refresh rule {name} has {field}={value!r}: give one of {', '.join(map(str, known))}")
    if getattr(rule, "needs", None) or isinstance(rule, SeeingRule):
        return
    has_cache, copy = False, deepcopy(rule)  # it may count what it is asked
    for step in range(num_steps):
        phase = asked(copy.phase, step)
        if not isinstance(phase, Phase) or phase is Phase.PARTIAL:
            raise UserError(
                f"refresh rule {name} answers {phase!r:.80} for step {step} of a block, which is no Phase{_OF_RULES}"
            )
        has_cache = has_cache or phase is Phase.BUILD
        if has_cache and not rule.caches:
            raise UserError(f"refresh rule {name} builds a cache in step {step} of a block, and says that it has none")
        if phase is Phase.REUSE and not has_cache:
            raise UserError(f"refresh rule {name} reuses a cache in step {step} of a block, before one was built")


def check_phase(rule: RefreshRule, phase: object, *, has_cache: bool) -> None:
    """Raise RunError for what a rule answers in the middle of a run that no step can be."""
    name = type(rule).__name__
    if not isinstance(phase, Phase) or phase is Phase.PARTIAL:
        raise RunError(f"refresh rule {name} answers {phase!r:.80}, which is no Phase{_OF_RULES}: correct it")
    if phase is Phase.REUSE and not has_cache:
        raise RunError(f"refresh rule {name} reuses a cache before one was built in the block: correct it")
    if phase is Phase.BUILD and not rule.caches:
        raise RunError(f"refresh rule {name} builds a cache, and says that it has none: correct it")


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


@dataclass(frozen=True, kw_only=True)
class Settling(Checked):
    """The defaults leave out nothing: a Refresh computes every row, and a Reuse step its window."""

    settle_after: Annotated[int, Range(1, 2**10), Only(family="llada")] | None = None
    """A Reuse step leaves out tokens of the block committed more than this many steps ago: they keep their K and V; none by default."""
    full_every: Annotated[int, Range(1, 2**17)] = 1
    """Every so many blocks a Refresh computes all rows; the others' begin at the block before, and the rows ahead keep their K and V."""
    renew_at: Annotated[int, Range(0, 2**17), Needs(settle_after=SOMETHING)] = 0
    """The first step of a block with so many masks left or fewer leaves out nothing; 0 for none."""

    @property
    def settles(self) -> bool:
        """Whether Reuse steps leave rows out."""
        return self.settle_after is not None

    def is_partial(self, block: int) -> bool:
        """Whether the Refresh that begins a block leaves out the rows ahead of the block before."""
        return block % self.full_every != 0

    def settled_before(self, masks: tuple[int, ...]) -> int:
        """Step of the block before which its settled tokens were committed, 0 where none is. ``masks`` were in the block at the start
        of each of its steps, this one's the last."""
        if self.settle_after is None or len(masks) < 2 or masks[-1] <= self.renew_at < masks[-2]:
            return 0
        return max(0, len(masks) - 1 - self.settle_after)


def check_settling(settling: Settling, *, window: str, selection: str, caches: bool) -> None:
    """Refuse what the cache does not allow: rows that settle or are kept lie in it, at places that are known beforehand."""
    asked = settling.settle_after is not None or settling.full_every > 1
    said = f"settle_after={settling.settle_after}" if settling.settles else f"full_every={settling.full_every}"
    require(caches or not asked, f"{said} has no effect without a cache: leave it out")
    require(
        window == "block" or not asked,
        f"{said} needs Reuse steps that compute the block alone, and those of this refresh rule compute what follows too: leave it out",
    )
    require(
        selection == "dense" or settling.full_every == 1,
        f"full_every={settling.full_every} needs every row of the context, and selection={selection!r} keeps some of each head: use "
        f"selection='dense'",
    )
