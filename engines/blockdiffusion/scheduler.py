"""Decides which requests take part in a step: denoising ones first, then prefills with the remaining rows, oldest first.

A mixed step runs everything that is due: the due part of a request is a run of whole blocks, so only lengths differ. SGLang's steps either
make K/V of prompts or denoise, prompts first. A block ends with one more forward, whose input is the final block: its own commit, with as
many rows as a denoise. With first-done, each request then goes on with its next block. With synchronous, all that denoise together wait
until the last of their blocks has ended; each forward computes the waiting blocks again.
"""

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from engines.blockdiffusion.rules import Bools, anywhere
from engines.blockdiffusion.sequence import BlockExecutor, BlockSequence, BlockStepPlan, Work
from engines.errors import require
from engines.knobs import Checked, Tokens

Batching = Literal["mixed", "first-done", "synchronous"]


@dataclass(frozen=True, kw_only=True)
class BlockEngineConfig(Checked):
    max_num_batched_tokens: Tokens = 4096
    """Most rows of a step. A block is denoised whole, and so is a block that is committed with it."""
    batching: Batching = "mixed"
    """mixed packs everything that is due; first-done and synchronous are SGLang's (engines.blockdiffusion.scheduler)."""


@dataclass(slots=True)
class _Step:
    budget: int
    """Rows that the step still has room for."""
    works: list[Work] = field(default_factory=list)
    orders: set[int] = field(default_factory=set)
    """Orders of the requests that take part."""
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)


class BlockScheduler:
    def __init__(self, executor: BlockExecutor, config: BlockEngineConfig) -> None:
        self.config, self.executor, self.tables = config, executor, executor.tables
        self.block = executor.block
        require(
            config.max_num_batched_tokens >= 2 * self.block,
            f"max_num_batched_tokens={config.max_num_batched_tokens} holds less than a block of {self.block} tokens and the "
            f"one before it: raise it to {2 * self.block} at least",
        )
        self.waiting: deque[BlockSequence] = deque()
        self.running: list[BlockSequence] = []
        self.step = 0

    @property
    def most_tokens(self) -> int:
        """Most tokens that a request may have, with its last block whole."""
        return min(self.tables.num_blocks * self.tables.block_size, self.tables.max_len)

    def add(self, sequence: BlockSequence) -> None:
        total = sequence.longest
        require(
            total <= self.most_tokens,
            f"request {sequence.request.request_id} grows to {total} tokens in whole blocks of {self.block}; a sequence may "
            f"have {self.most_tokens}: shorten it, or raise num_tokens and max_model_len",
        )
        self.waiting.append(sequence)

    def plan(self) -> BlockStepPlan | None:
        """Plan a step; return None if there is nothing to run."""
        step = _Step(self.config.max_num_batched_tokens)
        # A request left out of a step goes first in the next; prefills wait for requests that denoise.
        for sequence in sorted(self.running, key=lambda each: (each.missing > self.block, each.served, each.order)):
            self._run(sequence, step)
        while not step.preempted and (admitted := self._admit(step)) is not None:
            self._run(admitted, step)
        return self._make_plan(step)

    def were_done(self, denoising: Items[BlockSequence]) -> Bools:
        """[n] whether the rule was done with the block before this step."""
        return np.zeros(len(denoising), dtype=bool)

    def written_verdicts(self, denoising: Items[BlockSequence], take: Bools, is_done: Bools) -> tuple[Bools, Bools]:
        """Return which verdicts of a step are written, and which blocks are then final."""
        return take, is_done

    def leave(self, sequence: BlockSequence) -> None:
        """Remove a request that is over or no longer wanted."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.executor.close_slot(sequence.slot)
        sequence.slot = -1

    def preempt(self, sequence: BlockSequence) -> None:
        """Have a running request wait, between two steps or before it is in one. Its K/V is dropped and its tokens stay: to go on, it
        computes its final blocks again."""
        self.running.remove(sequence)
        self.executor.close_slot(sequence.slot)
        sequence.evict()
        # It waits in order of arrival.
        index = next((i for i, other in enumerate(self.waiting) if other.order > sequence.order), len(self.waiting))
        self.waiting.insert(index, sequence)

    def publish(self, sequence: BlockSequence, num_before: int) -> None:
        """Publish the K/V of its final blocks behind the first ``num_before`` tokens, which was just made."""
        unit = self.tables.unit
        first, end = num_before // unit, sequence.computed // unit
        if self.tables.caches and end > first:
            self.tables.publish(sequence.slot, first, sequence.unit_keys(unit)[first:end])

    # ---- in between ------------------------------------------------------------------------------------------------------

    def _run(self, sequence: BlockSequence, step: _Step, *, denoises: bool = True) -> None:
        """Run as much of the request's due part as fits the budget and the available K/V. If ``denoises`` is false, run only final
        blocks."""
        if sequence.slot < 0:  # preempted for a request before it
            return
        tokens = min(sequence.missing, step.budget // sequence.grain * sequence.grain)
        is_caught_up = tokens == sequence.missing
        rows = None
        if denoises and is_caught_up and not sequence.awaits_first:
            rows = sequence.request.rule.span(sequence.holes, sequence.step)
            if rows[1] - rows[0] > step.budget - tokens:
                rows = None
        if not tokens and rows is None:
            return
        end = sequence.computed + tokens + (self.block if rows is not None else 0)
        if not self._grow(sequence, end, step):
            return
        sequence.served = self.step
        wants_first = is_caught_up and sequence.awaits_first and tokens > 0
        work = Work(sequence.request.request_id, sequence.slot, sequence.computed, tokens, rows, wants_first)
        step.works.append(work)
        step.orders.add(sequence.order)
        step.budget -= work.num_rows

    def _make_plan(self, step: _Step) -> BlockStepPlan | None:
        if not step.works:
            return None
        self.step += 1
        num_rows = self.config.max_num_batched_tokens - step.budget
        return BlockStepPlan(tuple(step.works), tuple(step.admitted), tuple(step.preempted), num_rows)

    def _grow(self, sequence: BlockSequence, tokens: int, step: _Step) -> bool:
        """Reserve K/V for ``tokens`` tokens; if there is too little, preempt the youngest requests outside the step. False if the request
        itself was preempted."""
        slots, lengths = np.array([sequence.slot]), np.array([tokens])
        while self.tables.missing(slots, lengths) > self.tables.room:
            candidates = [other for other in self.running if other.order not in step.orders]
            youngest = max(candidates, key=lambda each: each.order)
            self.preempt(youngest)
            step.preempted.append(youngest.request.request_id)
            if youngest is sequence:
                return False
        self.tables.grow(slots, lengths)
        return True

    def _admit(self, step: _Step) -> BlockSequence | None:
        """Admit the next waiting request if there is room for all it needs up to its next block's end. It gets a slot and the cached part
        of its beginning."""
        tables, block = self.tables, self.block
        if not self.waiting or not tables.num_free_slots or step.budget < 2 * block:
            return None
        sequence = self.waiting[0]
        keys = self._reusable_keys(sequence)
        cached, idle = tables.cached(keys)
        needed = tables.blocks_for(len(sequence.final) + block) - tables.blocks_for(cached)
        if needed > tables.room - idle:
            return None
        sequence.slot = self.executor.open(sequence.final)
        sequence.computed = tables.adopt(sequence.slot, keys)
        self.running.append(self.waiting.popleft())
        step.admitted.append(sequence.request.request_id)
        return sequence

    def _reusable_keys(self, sequence: BlockSequence) -> list[bytes]:
        """Keys of the units that it may reuse. The block whose last row gives the next block's first token is always computed."""
        if not self.tables.caches:
            return []
        unit = self.tables.unit
        usable = len(sequence.final) - (self.block if sequence.awaits_first else 0)
        return sequence.unit_keys(unit)[: usable // unit]


def check_batching(batching: Batching, shifts: bool) -> None:
    require(
        batching == "mixed" or not shifts,
        f"batching={batching!r} of a model whose blocks begin with a token of the one before: SGLang serves none, use mixed",
    )


class SeparateScheduler(BlockScheduler):
    def __init__(self, executor: BlockExecutor, config: BlockEngineConfig) -> None:
        check_batching(config.batching, executor.shifts)
        super().__init__(executor, config)
        self._left: dict[int, int] = {}
        """By order of request: forwards still to come on a block that its rule is done with."""
        self._batch: set[int] = set()
        """Orders of the requests that are held together."""

    def plan(self) -> BlockStepPlan | None:
        step = _Step(self.config.max_num_batched_tokens)
        denoising = [sequence for sequence in self.running if sequence.order in self._batch and not sequence.missing]
        while not denoising and (admitted := self._admit(step)) is not None:
            self._grow(admitted, len(admitted.final) + self.block, step)
        prefilling = [sequence for sequence in self.running if sequence.missing]
        denoises = bool(denoising) or not prefilling
        for sequence in sorted(denoising or prefilling or self.running, key=lambda each: (each.served, each.order)):
            self._run(sequence, step, denoises=denoises)
        if step.works and denoises and self.config.batching == "synchronous":
            self._batch = step.orders
        return self._make_plan(step)

    def were_done(self, denoising: Items[BlockSequence]) -> Bools:
        return np.array([sequence.order in self._left for sequence in denoising], dtype=bool)

    def written_verdicts(self, denoising: Items[BlockSequence], take: Bools, is_done: Bools) -> tuple[Bools, Bools]:
        was_done = self.were_done(denoising)
        take = take & ~was_done[:, None]
        changed = anywhere(take)
        for sequence, was, done, changes in zip(denoising, was_done, is_done, changed, strict=True):
            if was:
                self._left[sequence.order] = max(0, self._left[sequence.order] - 1)
            elif done:
                # If edits end by their limit, one more forward finds that they are over.
                self._left[sequence.order] = sequence.request.rule.closing_forwards(changes=bool(changes))
        ends = np.array([self._left.get(sequence.order) == 0 for sequence in denoising], dtype=bool)
        if self.config.batching == "synchronous" and not ends.all():
            return take, np.zeros_like(ends)
        for sequence, end in zip(denoising, ends, strict=True):
            if end:
                self._forget(sequence)
        return take, ends

    def leave(self, sequence: BlockSequence) -> None:
        super().leave(sequence)
        self._forget(sequence)

    def preempt(self, sequence: BlockSequence) -> None:
        """Preempt a request. A block that its rule is done with stays so: asked once more, the rule might edit once more."""
        super().preempt(sequence)
        self._batch.discard(sequence.order)
        if not sequence.request.rule.is_exact:  # the block begins anew
            self._left.pop(sequence.order, None)

    def _forget(self, sequence: BlockSequence) -> None:
        self._left.pop(sequence.order, None)
        self._batch.discard(sequence.order)
