"""Which rows a step may leave out because their K and V are good enough as they are (ours).

A row's K and V follow from its own token and from what it attends to. A mask that becomes a token changes its row; the next step
computes it once more, from the token. After that the row changes only as its context does, and a step may keep the K and V it has
(dKV-Cache calls it delayed caching, and does so over the whole answer). The same holds of the prompt and of older blocks where a
later block refreshes.

A row predicts its own token (LLaDA). Where it predicts the next one (Dream), a mask needs the row ahead of it, settled or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from engines.errors import require
from engines.knobs import SOMETHING, Checked, Needs, Only, Range


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

    def settled_before(self, masks: Sequence[int]) -> int:
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
