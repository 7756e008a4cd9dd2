"""A request whose blocks are canvases (DiffusionGemma); no torch.

What is final is causal, so that any of its tokens may be the last that is computed, or known from another request. A canvas lies behind
all of them, wherever that is. Each forward decides all its places anew, and so nothing is left to fill: every place stays a hole until
the likeliest tokens of the last forward become final. That forward computed other K/V than a final token has, and none is kept.
"""

from dataclasses import dataclass

import numpy as np

from engines.blockdiffusion.rules import Bools
from engines.blockdiffusion.sequence import BlockSequence
from engines.runtime.rows import Ints

_MOST_STEPS = 4096
"""What ``rules.Steps`` allows a canvas."""


@dataclass(slots=True, eq=False)
class CanvasSequence(BlockSequence):
    likeliest: Ints | None = None
    """[B] what the last forward found."""
    repeats: int = 0
    """Forwards right before the last that found the same."""

    @property
    def grain(self) -> int:
        return 1

    @property
    def longest(self) -> int:
        return self.request.prompt_len + -(-self.request.gen_length // self.block) * self.block

    @property
    def draw(self) -> int:
        """Tells canvas and step."""
        return (len(self.final) - self.request.prompt_len) // self.block * _MOST_STEPS + self.step

    def saw(self, likeliest: Ints, noise: Ints) -> int:
        """Book what a forward found; ``repeats`` with it."""
        is_same = self.likeliest is not None and np.array_equal(self.likeliest, likeliest)
        self.repeats = self.repeats + 1 if is_same else 0
        self.likeliest, self.ids = likeliest, noise
        return self.repeats

    def denoised(self, tokens: Ints, take: Bools, *, was_done: bool) -> None:
        BlockSequence.denoised(self, tokens, take, was_done=was_done)
        self.holes = ~self.given

    def finish_block(self, *, has_kv: bool) -> None:
        assert self.likeliest is not None, "a canvas ends with a forward"
        self.ids = self.likeliest
        BlockSequence.finish_block(self, has_kv=False)

    def caught_up(self, tokens: int) -> tuple[int, int]:
        """How many canvases are complete with that, and how many of the tokens are the prompt's."""
        prompt, before = self.request.prompt_len, self.computed
        self.computed += tokens
        committed = max(0, self.computed - prompt) // self.block - max(0, before - prompt) // self.block
        prefilled = min(self.computed, prompt) - min(before, prompt)
        self.committed += committed
        self.prefilled += prefilled
        return committed, prefilled

    def evict(self) -> None:
        """Its canvas begins anew, with the same draws."""
        BlockSequence.evict(self)
        self._forget()

    def _open(self, opening: Ints) -> None:
        BlockSequence._open(self, opening)
        self._forget()

    def _forget(self) -> None:
        self.likeliest, self.repeats = None, 0
