"""Window-Diffusion: a window of masks slides over the answer. Masks behind it do not exist until the next Refresh.

Every ``refresh_interval`` steps compute all rows and begin a period. Its keys are all tokens then known, and the first masks. The other
steps of the period compute the first ``active`` masks and the tokens that they committed themselves. A step commits no more than the
masks it computes, while published code overwrites known tokens.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from baselines.dllm.options import WindowOptions
from engines.dllm.config import DecodeConfig, Seen
from engines.dllm.method import LEAP, PARALLEL, SERVED, Method, Options, Sampler
from engines.dllm.plan import Chosen, Request
from engines.dllm.rows import NONE, Positions, RowRule, Standing


@dataclass
class SlidingWindow(RowRule):
    refresh: int
    width: int
    active: int
    total_len: int = 0
    keys: Positions = field(default_factory=NONE.copy)
    again: Positions = field(default_factory=NONE.copy)
    """Committed tokens that a step computes too."""

    def of(self, request: Request) -> "SlidingWindow":
        return replace(self, total_len=request.total_len)

    def choose(self, at: Standing) -> Chosen:
        all_rows, step = np.arange(self.total_len), at.step_in_block
        if step % self.refresh == 0:
            return Chosen.of(all_rows, at.masks, at.quota)
        if step % self.refresh == 1:
            self.keys = np.setdiff1d(all_rows, at.masks[self.width :])
        active = at.masks[: self.active]
        rows = np.union1d(active, self.again)
        return Chosen.of(rows, active, min(at.quota, len(active)), keys=self.keys)

    def see(self, seen: Seen) -> None:
        assert seen.learned is not None
        committed = np.array(seen.learned.places, dtype=np.int64)
        # Tokens that the Refresh committed leave after one step.
        is_first = seen.step_in_block % self.refresh < 2
        self.again = committed if is_first else np.union1d(self.again, committed)


class WindowDiffusion(Method):
    name = "window-diffusion"
    title = "Window-Diffusion"
    heeds = {"llada": PARALLEL | LEAP}
    own = WindowOptions

    def _sampler(self, family: str, own: WindowOptions, options: Options) -> Sampler:
        rule = SlidingWindow(own.refresh_interval or 32, own.window_width, own.active)
        return Sampler(rule=rule, decode=DecodeConfig(learns="places"), exact_steps=False, **SERVED)

    def has_blocks(self, family: str, options: Options) -> bool:
        return False


WINDOW_DIFFUSION = WindowDiffusion()
