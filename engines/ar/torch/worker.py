"""One torch worker: sequences, their K/V, and the steps that a batching policy asks for.

Who drives it says what arrives and when, and what becomes of a sequence that is done: ``engines.ar.torch.engine`` runs
sessions to their end, ``engines.server.ar`` takes requests for good. Between two steps nothing is under way:

    plan = worker.next_plan(now)
    if worker.can_run(plan):
        step = worker.compute(plan, now)
        worker.settle(step, end)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from engines.ar.sampling import GREEDY, SamplingParams
from engines.ar.torch.batch import DecodeColumns, Sequence
from engines.ar.torch.executor import Ran, TorchExecutor
from engines.ar.torch.memory import KeptSequences, SessionMemory
from engines.ar.torch.rows import StepWork
from engines.cluster.sessions import Session
from engines.errors import require
from engines.named import asked
from engines.policies.batching import Owed
from engines.policies.views import (
    IDLE,
    Batching,
    Chunk,
    PrefillQueue,
    PrefillTask,
    Share,
    Situation,
    StepPlan,
    TaskKind,
)
from engines.runtime.rows import Ints


class Driver(Protocol):
    """What the worker asks and tells."""

    @property
    def hears_tokens(self) -> bool:
        """Whether ``hear`` is told; else the ids stay on the device until they are read."""
        ...

    def hear(self, sequence: Sequence, token: int) -> bool:
        """The sequence's next token; True ends its round there."""
        ...

    def ids(self, sequence: Sequence, start: int) -> Ints:
        """The ids of the sequence from ``start`` up to the end of its round's prompt."""
        ...

    def began(self, sequence: Sequence, now: float) -> None:
        """Its prefill has been admitted: that of its round, or one that a preemption made necessary."""
        ...

    def prefilled(self, sequence: Sequence, task: PrefillTask, now: float) -> None:
        """The prefill's own token is out."""
        ...

    def done(self, sequence: Sequence, now: float) -> None:
        """The sequence has the tokens of its round and is in no batch; its slot is the driver's to keep or close."""
        ...


class Step(NamedTuple):
    """A step that the executor has run."""

    shares: list[Share]
    chunks: list[Chunk]
    decoding: int
    """Sequences that decoded."""
    context: int
    """Tokens of these."""
    ran: Ran
    tokens: list[int]
    """Ids of the sequences that finished their prefill, then of those that decoded; empty where nobody hears them."""


class Worker:
    def __init__(
        self,
        executor: TorchExecutor,
        batching: Batching,
        queue: PrefillQueue,
        driver: Driver,
        estimate_s: Callable[[int, int], float] | None = None,
    ) -> None:
        """``estimate_s`` is what (history, tokens) take, for policies that read ``PrefillTask.estimate_s``."""
        self.executor, self.queue = executor, queue
        self.memory = SessionMemory(executor.tables)
        self.kept = KeptSequences(executor, self.memory)
        self.decode = DecodeColumns()
        self.begun: list[PrefillTask] = []
        self.sequences: dict[int, Sequence] = {}
        """By ``order``: all that wait, run, or are between rounds."""
        self.num_preemptions = 0
        self._owed = Owed()
        self._batching, self._driver, self._estimate_s = batching, driver, estimate_s
        self._num_arrived = self._num_tasks = 0

    def add(self, session: Session, sampling: SamplingParams = GREEDY) -> Sequence:
        """Raises UserError for a session that the worker has no room for."""
        tables = self.executor.tables
        most = tables.num_blocks * tables.block_size
        require(
            session.context_tokens <= min(most, tables.max_len),
            f"session {session.session_id} grows to {session.context_tokens} tokens; the pool holds {most} and a sequence "
            f"{tables.max_len}: shorten it, or raise num_tokens and max_len",
        )
        sequence = Sequence(session, self._num_arrived, sampling)
        self._num_arrived += 1
        self.sequences[sequence.order] = sequence
        return sequence

    def enqueue(self, sequence: Sequence, kind: TaskKind, history: int, tokens: int, at_s: float) -> None:
        task = sequence.task = PrefillTask(
            self._num_tasks,
            sequence.session.session_id,
            sequence.order,
            sequence.round_index,
            kind,
            history,
            tokens,
            at_s,
            at_s,
        )
        self._num_tasks += 1
        if self._estimate_s is not None:
            task.estimate_s = self._estimate_s(history, tokens)
        self._owed.add(task)
        asked(self.queue.push, task)

    def adopt(self, sequence: Sequence, prompt: Ints) -> None:
        """Have a sequence of this prompt, which is not enqueued yet, go on from kept K/V where there is some."""
        found = self.kept.adopt(sequence.order, prompt, sequence.sampling)
        if found is not None:
            sequence.slot = found.slot
            sequence.context = sequence.computed = found.tokens

    def keep(self, sequence: Sequence, ids: Ints) -> None:
        """Let go of a sequence that is done; ``ids`` are all of its tokens."""
        del self.sequences[sequence.order]
        self.kept.keep(sequence.order, sequence.slot, ids[: sequence.computed])

    def drop(self, sequence: Sequence) -> None:
        """Let go of a sequence between two steps, whatever it does, and of its K/V."""
        task = sequence.task
        if task is None:
            if any(member is sequence for member in self.decode.members):
                self.decode.leave(sequence)
        elif any(begun is task for begun in self.begun):
            self.begun = [begun for begun in self.begun if begun is not task]
        else:
            pull = getattr(self.queue, "pull", None)
            require(pull is not None, f"queue={type(self.queue).__name__} lets no waiting task go: give an OpenQueue")
            assert pull is not None
            pull(task)
        self._forget(sequence)

    def abandon(self) -> list[Sequence]:
        """Let go of all that do not wait, after a step that raised: nothing is known of their K/V."""
        waiting = {task.order for task in self.queue}
        lost = [sequence for order, sequence in self.sequences.items() if order not in waiting]
        self.decode, self.begun = DecodeColumns(), []
        for sequence in lost:
            self._forget(sequence)
        return lost

    def close(self) -> None:
        """Give back all slots."""
        for sequence in list(self.sequences.values()):
            self._forget(sequence)
        self.kept.close()

    def _forget(self, sequence: Sequence) -> None:
        del self.sequences[sequence.order]
        if sequence.task is not None:
            self._owed.drop(sequence.task)
        self.memory.drop(sequence.order)
        if sequence.slot >= 0:
            self.executor.close_slot(sequence.slot)

    # ---- between two steps --------------------------------------------------------------------------------

    def next_plan(self, now: float) -> StepPlan:
        """What the policy says; idle where nothing waits for a prefill."""
        if not (self.queue or self.begun):
            return IDLE
        situation = Situation(self.queue, self.begun, self.decode.size, self.memory.room, self._need)
        plan = asked(self._batching.next_step, situation, now)
        self._owed.check(plan, self._batching)
        return plan

    def can_run(self, plan: StepPlan, now: float) -> bool:
        """Whether there is a step in the plan: prefills, or sequences to decode. Those get K/V for a token more; where
        there is none the youngest are preempted, all of them at worst: then the policy is to be asked again."""
        return bool(plan.shares) or self._reserve(now)

    def _need(self, task: PrefillTask) -> int:
        return self.memory.need(task.history + task.tokens + 1)

    # ---- a step -------------------------------------------------------------------------------------------

    def compute(self, plan: StepPlan, now: float) -> Step:
        """Run a step that can be run."""
        # What began earlier goes on; the K/V of what begins is taken here.
        shares = [self._admitted(share, now) for share in plan.shares]
        self._owed.run(shares, 0)
        decodes = self.decode.size > 0 and (not shares or (plan.decodes and self._reserve(now)))
        decoding, context = (self.decode.size, int(self.decode.contexts.sum())) if decodes else (0, 0)
        chunks, entries = [], []
        for task, tokens in shares:
            sequence = self.sequences[task.order]
            begin = task.history + task.computed
            chunks.append(Chunk(begin, tokens))
            # The newest token of the round before has no K/V yet: it goes with the first chunk.
            entries.append((sequence.slot, sequence.computed, begin + tokens - sequence.computed, tokens == task.left))
            if task.computed == 0:
                self.begun.append(task)
            task.computed += tokens
            sequence.computed = begin + tokens
        work = StepWork.of(entries)
        if decodes:
            joined = self.decode.work()
            work = StepWork(*(np.concatenate(columns) for columns in zip(work, joined, strict=True)))
        self.begun = [task for task in self.begun if task.left]
        ran = self.executor.run(work, plan.mode)
        heard: list[int] = ran.tokens.tolist() if self._driver.hears_tokens else []
        self.executor.wait()
        return Step(shares, chunks, decoding, context, ran, heard)

    def settle(self, step: Step, now: float) -> None:
        """Give the sequences their tokens; the driver hears which rounds are done."""
        self._note_logprobs(step)
        hears, first = self._driver.hears_tokens, len(step.tokens) - step.decoding
        if step.decoding:
            if hears:
                pairs = zip(self.decode.members, step.tokens[first:], strict=True)
                self.decode.end(np.array([self._driver.hear(sequence, token) for sequence, token in pairs]))
            for sequence in self.decode.advance():
                self._driver.done(sequence, now)
        whole = [task for task, _ in step.shares if task.left == 0]
        for index, task in enumerate(whole):
            sequence = self.sequences[task.order]
            self._prefilled(sequence, task, now, is_over=hears and self._driver.hear(sequence, step.tokens[index]))

    def _note_logprobs(self, step: Step) -> None:
        ran = step.ran
        if not (ran.logprobs or ran.prompt_logprobs):
            return
        members = self.decode.members if step.decoding else []
        for sequence in (*members, *(self.sequences[task.order] for task, _ in step.shares)):
            sequence.logprobs = ran.logprobs.get(sequence.slot)
            if sequence.slot in ran.prompt_logprobs:
                sequence.prompt_logprobs.append(ran.prompt_logprobs[sequence.slot])

    def _admitted(self, share: Share, now: float) -> Share:
        """Take the K/V of a task that begins; what was evicted of its history is prefilled again."""
        task, tokens = share
        if task.computed:
            return share
        sequence = self.sequences[task.order]
        self._driver.began(sequence, now)
        is_whole = tokens == task.tokens
        cached = self.memory.resume(task.order)
        missing = task.history - cached
        self._owed.more(task, missing)
        sequence.computed = min(sequence.computed, cached)
        self._place(sequence)
        self.memory.admit(sequence.slot, task.history + task.tokens + 1)
        return Share(task, task.tokens if is_whole else tokens)

    def _place(self, sequence: Sequence) -> None:
        """Give the sequence a slot, and write the ids that are not in it."""
        if sequence.slot < 0:
            if not self.executor.tables.num_free_slots:
                self.kept.sweep()
            if not self.executor.tables.num_free_slots:
                self._free_slot()
            sequence.slot = self.executor.open(sequence.sampling)
        if sequence.saved is not None:
            self.executor.write(sequence.slot, 0, sequence.saved)
            sequence.saved = None
            return
        ids = self._driver.ids(sequence, sequence.num_written)
        self.executor.write(sequence.slot, sequence.num_written, ids)
        sequence.num_written += len(ids)

    def _free_slot(self) -> None:
        """Take the slot of the sequence that has been idle longest, of one without K/V first."""
        held = self.executor.tables.held
        order = next((i for i, each in self.sequences.items() if each.slot >= 0 and not held[each.slot]), None)
        if order is None:
            order = self.memory.oldest_idle()
        require(
            order is not None, f"all {self.executor.tables.num_slots} slots run: raise num_slots, or lower max_num_seqs"
        )
        assert order is not None
        if order in self.kept:
            self.kept.drop(order)
            return
        self.memory.drop(order)
        sequence = self.sequences[order]
        self.executor.close_slot(sequence.slot)
        sequence.slot, sequence.computed, sequence.num_written = -1, 0, 0

    def _prefilled(self, sequence: Sequence, task: PrefillTask, now: float, *, is_over: bool) -> None:
        self._owed.ended(task)
        sequence.task = None
        if sequence.sampling.prompt_logprobs is not None:  # a prefill that a preemption makes necessary scores nothing
            sequence.sampling = replace(sequence.sampling, prompt_logprobs=None)
        sequence.context = task.history + task.tokens + 1
        sequence.left = 0 if is_over else sequence.left - 1
        self._driver.prefilled(sequence, task, now)
        if sequence.left:
            self.decode.join(sequence)
        else:
            self._driver.done(sequence, now)

    # ---- memory ----------------------------------------------------------------------------------------------

    def _reserve(self, now: float) -> bool:
        """Take K/V for a token more of every decoding sequence, preempting the youngest where it must; False where that
        left none."""
        while self.decode.size:
            if self.memory.grow(self.decode.slots, self.decode.contexts + 1):
                return True
            self._preempt(self.decode.youngest(), now)
        return False

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """Recompute later (vLLM's preemption): its K/V is dropped, its tokens stay."""
        self.num_preemptions += 1
        self.decode.leave(sequence)
        sequence.saved = self.executor.read(sequence.slot, 0, sequence.context)
        self.executor.close_slot(sequence.slot)
        sequence.slot, sequence.computed = -1, 0
        self.enqueue(sequence, "recompute", 0, sequence.context, now)
