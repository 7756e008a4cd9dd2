"""SGLang's schedule of block diffusion: a step makes K/V of prompts or denoises, prompts first, and a block ends with one more forward.

That forward has the final block for its input, so its K/V is the block's: a commit of its own, with as many rows as a denoise. First-done
lets each request go on with its next block then; synchronous holds all that denoise together until the last of their blocks has ended,
and computes those that wait for it again with every forward.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from engines.blockdiffusion.plan import Executor, StepPlan, Work
from engines.blockdiffusion.rules import Bools, anywhere
from engines.blockdiffusion.scheduler import Batching, BlockEngineConfig, BlockScheduler
from engines.blockdiffusion.sequence import Sequence
from engines.errors import require


def check_batching(batching: Batching, shifts: bool) -> None:
    require(
        batching == "mixed" or not shifts,
        f"batching={batching!r} of a model whose blocks begin with a token of the one before: SGLang serves none, use mixed",
    )


class SeparateScheduler(BlockScheduler):
    def __init__(self, executor: Executor, config: BlockEngineConfig) -> None:
        check_batching(config.batching, executor.shifts)
        super().__init__(executor, config)
        self._left: dict[int, int] = {}
        """Forwards still to come of blocks that their rule has done with, by the order of their requests."""
        self._batch: set[int] = set()
        """Orders of those that are held together."""

    def plan(self) -> StepPlan | None:
        budget = self.config.max_num_batched_tokens
        works: list[Work] = []
        admitted: list[int] = []
        preempted: list[int] = []
        in_step: set[int] = set()
        held = [each for each in self.running if each.order in self._batch and not each.missing]
        while not held and self.waiting and self._admit(self.waiting[0], budget):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            admitted.append(sequence.request.request_id)
            self._grow(sequence, len(sequence.final) + self.block, in_step, preempted)
        due = [each for each in self.running if each.missing]
        denoises = bool(held) or not due
        chosen = held or due or self.running
        for sequence in sorted(chosen, key=lambda each: (each.served, each.order)):
            if sequence.slot < 0:  # preempted for the sake of one before it
                continue
            work = self._work(sequence, budget, in_step, preempted, denoises=denoises)
            if work is not None:
                budget -= self._rows(work)
                works.append(work)
                in_step.add(sequence.order)
        if not works:
            return None
        if denoises and self.config.batching == "synchronous":
            self._batch = in_step
        self.step += 1
        return StepPlan(tuple(works), tuple(admitted), tuple(preempted), self.config.max_num_batched_tokens - budget)

    def were_done(self, denoising: Items[Sequence]) -> Bools:
        return np.array([each.order in self._left for each in denoising], dtype=bool)

    def settled(self, denoising: Items[Sequence], take: Bools, is_done: Bools) -> tuple[Bools, Bools]:
        was_done = self.were_done(denoising)
        take = take & ~was_done[:, None]
        changed = anywhere(take)
        for sequence, was, done, changes in zip(denoising, was_done, is_done, changed, strict=True):
            if was:
                self._left[sequence.order] = max(0, self._left[sequence.order] - 1)
            elif done:
                # Edits that their limit ended are found to be over by a forward of its own.
                self._left[sequence.order] = 2 if sequence.request.rule.edits and changes else 1
        ends = np.array([self._left.get(each.order) == 0 for each in denoising], dtype=bool)
        if self.config.batching == "synchronous" and not ends.all():
            return take, np.zeros_like(ends)
        for sequence, end in zip(denoising, ends, strict=True):
            if end:
                self._forget(sequence)
        return take, ends

    def leave(self, sequence: Sequence) -> None:
        super().leave(sequence)
        self._forget(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """What its rule has done with stays so: asked once more, it might edit once more."""
        super().preempt(sequence)
        self._batch.discard(sequence.order)
        if not sequence.request.rule.is_exact:  # its block begins anew
            self._left.pop(sequence.order, None)

    def _forget(self, sequence: Sequence) -> None:
        self._left.pop(sequence.order, None)
        self._batch.discard(sequence.order)
