"""The step loop: schedule, execute, have each request's rule decide. It is the same for every executor and clock."""

from collections.abc import Sequence as Items

import numpy as np

from engines.blockdiffusion.rules import Blocks, Bools, DecodeRule, anywhere
from engines.blockdiffusion.scheduler import BlockEngineConfig, BlockScheduler, SeparateScheduler
from engines.blockdiffusion.sequence import (
    NO_BLOCKS,
    BlockAnswer,
    BlockExecutor,
    BlockRequest,
    BlockSequence,
    BlockStepPlan,
    BlockStepRecord,
    CanvasSequence,
    Denoised,
    Outcome,
)
from engines.data import ask
from engines.errors import require
from engines.runtime.rows import Ints


class BlockEngine:
    def __init__(self, executor: BlockExecutor, config: BlockEngineConfig | None = None) -> None:
        self.executor = executor
        config = config or BlockEngineConfig()
        self.scheduler = (BlockScheduler if config.batching == "mixed" else SeparateScheduler)(executor, config)
        self.sequences: dict[int, BlockSequence] = {}
        """Request id -> sequence, for requests that are not over."""
        self.answers: dict[int, BlockAnswer] = {}
        """Request id -> answer, until it is taken."""
        self._num_arrived = self._num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    def submit(self, request: BlockRequest) -> None:
        """Queue a request. Raises UserError if the engine has no room for it, or its rule has no meaning for its blocks."""
        block = self.executor.block
        request.rule.check_block(block)
        canvases = self.executor.makes_canvases
        require(
            request.rule.of_canvases == canvases,
            f"rule={type(request.rule).__name__} decides {'blocks' if canvases else 'canvases'}, and the model makes "
            f"{'canvases' if canvases else 'blocks'}: give another rule",
        )
        require(
            request.request_id not in self.sequences and request.request_id not in self.answers,
            f"request_id={request.request_id} is taken: give another",
        )
        kind = CanvasSequence if canvases else BlockSequence
        sequence = kind(request, self._num_arrived, block, self.executor.shifts)
        self.scheduler.add(sequence)
        self._num_arrived += 1
        self.sequences[request.request_id] = sequence

    def abort(self, request_id: int) -> None:
        """Forget a request that is not over, in whatever state, and its K/V."""
        self.scheduler.leave(self.sequences.pop(request_id))

    def take(self, request_id: int) -> BlockAnswer:
        return self.answers.pop(request_id)

    def step(self, now_s: float = 0.0) -> BlockStepRecord | None:
        """Run one step; return None if nothing can run."""
        plan = self.scheduler.plan()
        if plan is None:
            return None
        sequences = [self.sequences[work.request_id] for work in plan.works]
        denoising = [sequence for sequence, work in zip(sequences, plan.works, strict=True) if work.rows is not None]
        blocks = _stack_blocks(denoising)
        groups: dict[DecodeRule, list[int]] = {}  # equal rules decide together
        for i, sequence in enumerate(denoising):
            groups.setdefault(sequence.request.rule, []).append(i)
        wanted = np.zeros(blocks.holes.shape, dtype=bool)
        for rule, indices in groups.items():
            wanted[indices] = ask(rule.wanted, blocks.of(indices))
        outcome = self.executor.run(plan, _denoised(denoising, blocks, wanted))
        was_done = self.scheduler.were_done(denoising)
        if outcome.likeliest is not None:
            blocks = blocks._replace(full=_count_repeats(denoising, outcome, was_done))
        take, is_done = np.zeros_like(wanted), np.zeros(len(denoising), dtype=bool)
        for rule, indices in groups.items():
            predicted = outcome.tokens[indices], outcome.confidence[indices]
            take[indices], is_done[indices] = ask(rule.decide, blocks.of(indices), *predicted)
        take, is_done = self.scheduler.written_verdicts(denoising, take, is_done)
        committed, prefilled = self._book_final(plan, sequences, outcome)
        finished = self._book_verdicts(denoising, outcome, take, is_done, was_done)
        finished += [
            each for each, work in zip(sequences, plan.works, strict=True) if work.wants_first and each.is_over
        ]
        begun = [each for each in sequences if not each.has_begun and (each in finished or each.has_output)]
        for sequence in begun:
            sequence.has_begun = True
        for sequence in finished:
            self.scheduler.leave(sequence)
            del self.sequences[sequence.request.request_id]
            self.answers[sequence.request.request_id] = sequence.answer
        self._num_steps += 1
        return BlockStepRecord(
            self._num_steps - 1,
            outcome.duration_s,
            plan.num_rows,
            len(denoising),
            committed,
            prefilled,
            int(take.sum()),
            plan.admitted,
            tuple(sequence.request.request_id for sequence in begun),
            tuple(sequence.request.request_id for sequence in finished),
            plan.preempted,
            self.num_running,
            self.num_waiting,
        )

    def run(self, requests: Items[BlockRequest]) -> dict[int, BlockAnswer]:
        """Serve all these requests together, to their end."""
        for request in requests:
            self.submit(request)
        while self.has_work:
            assert self.step() is not None, "requests wait and none can run"
        return {request.request_id: self.take(request.request_id) for request in requests}

    # ---- in between ------------------------------------------------------------------------------------------------------

    def _book_final(self, plan: BlockStepPlan, sequences: Items[BlockSequence], outcome: Outcome) -> tuple[int, int]:
        """Book the final blocks whose K/V was made; return how many are generated, and how many are of prompts."""
        firsts = iter(outcome.first.tolist())
        num_committed = num_prefilled = 0
        for sequence, work in zip(sequences, plan.works, strict=True):
            sequence.rows += work.num_rows
            if work.tokens:
                computed = sequence.computed
                committed, prefilled = sequence.book_final(work.tokens)
                num_committed, num_prefilled = num_committed + committed, num_prefilled + prefilled
                self.scheduler.publish(sequence, computed)
            if work.wants_first:
                sequence.take_first(next(firsts))
                if sequence.block == 1:  # an autoregressive model has nothing to denoise
                    sequence.finish_block(has_kv=False)
                    self._extend(sequence)
        return num_committed, num_prefilled

    def _book_verdicts(
        self, denoising: Items[BlockSequence], outcome: Outcome, take: Bools, is_done: Bools, was_done: Bools
    ) -> list[BlockSequence]:
        """Book what the rules decided; return the requests that are over."""
        finished = []
        changed = anywhere(take)
        for i, sequence in enumerate(denoising):
            sequence.book_forward(outcome.tokens[i], take[i], was_done=bool(was_done[i]))
            if not is_done[i]:
                if sequence.ends_within:
                    finished.append(sequence)
                continue
            computed = sequence.computed
            # If a forward changed nothing, its input was the final block. If a block's last row must still give a token, the block is
            # computed for that.
            sequence.finish_block(has_kv=not changed[i] and not sequence.shifts)
            if sequence.computed > computed:
                self.scheduler.publish(sequence, computed)
            if sequence.is_over:
                finished.append(sequence)
            else:
                self._extend(sequence)
        return finished

    def _extend(self, sequence: BlockSequence) -> None:
        """Give the executor the ids of the block that became final."""
        start = len(sequence.final) - sequence.block
        self.executor.extend(sequence.slot, start, sequence.final[start:])


def _stack_blocks(sequences: Items[BlockSequence]) -> Blocks:
    if not sequences:
        empty = np.zeros(0, dtype=np.int64)
        return Blocks(NO_BLOCKS, NO_BLOCKS.astype(bool), NO_BLOCKS.astype(bool), empty, empty)
    return Blocks(
        np.stack([sequence.ids for sequence in sequences]),
        np.stack([sequence.holes for sequence in sequences]),
        np.stack([sequence.given for sequence in sequences]),
        np.array([sequence.step for sequence in sequences], dtype=np.int64),
        np.array([sequence.full for sequence in sequences], dtype=np.int64),
    )


def _count_repeats(denoising: Items[BlockSequence], outcome: Outcome, was_done: Bools) -> Ints:
    """[n] as in ``Blocks.full`` of canvases; a forward that decides nothing changes no canvas."""
    assert outcome.likeliest is not None
    assert outcome.noise is not None
    repeats = np.zeros(len(denoising), dtype=np.int64)
    for i, sequence in enumerate(denoising):
        assert isinstance(sequence, CanvasSequence)
        if not was_done[i]:
            repeats[i] = sequence.count_repeats(outcome.likeliest[i], outcome.noise[i])
    return repeats


def _denoised(denoising: Items[BlockSequence], blocks: Blocks, wanted: Bools) -> Denoised:
    return Denoised(
        blocks.ids,
        blocks.holes,
        wanted,
        tuple(sequence.request.sampling for sequence in denoising),
        np.array([sequence.draw for sequence in denoising], dtype=np.int64),
        np.array([sequence.forwards for sequence in denoising], dtype=np.int64),
        blocks.step,
        tuple(sequence.request.rule for sequence in denoising),
    )
