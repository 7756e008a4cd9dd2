"""One torch worker: sequences, their K/V, and the steps that a batching policy asks for.

Its driver says what arrives and when, and what becomes of a sequence that is done. ``engines.server.ar`` is the driver of a
server. Between two steps nothing is under way:

    plan = worker.next_plan(now)
    if worker.can_run(plan):
        step = worker.compute(plan, now)
        worker.settle(step, end)

The K/V of a session is on block tables: held while its sequence runs, idle between its rounds.

The rules are those of the simulated pool (``engines.cluster.worker``), counted in blocks. If we need room, we evict idle K/V, the
least recently used session first, and from its tail, so that a prefix is left. With blocks of one token the two agree to the token.

We also keep the K/V of sequences that are over, for prompts that repeat them: a conversation's next turn begins with its last. One
follower takes over the blocks of a kept sequence; they are never shared. Kept K/V is idle, like that of a session between rounds.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from engines.ar.sampling import GREEDY, SamplingParams
from engines.ar.torch.executor import PagedExecutor, Ran
from engines.ar.torch.rows import DecodeColumns, PackedWork, SessionState
from engines.cluster.sessions import Session
from engines.data import ask
from engines.errors import require
from engines.policies.batching import Owed
from engines.policies.views import (
    IDLE,
    Batching,
    Chunk,
    NextStep,
    PrefillQueue,
    PrefillTask,
    Share,
    Situation,
    TaskKind,
)
from engines.runtime.rows import NOBODY, BlockTables, Ints, OutOfBlocksError


@dataclass(slots=True)
class _Idle:
    slot: int
    tokens: int


class SessionMemory:
    """The K/V of sessions, which are known by ``order``, their rank by arrival. A session keeps its slot while it has any K/V."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._idle: OrderedDict[int, _Idle] = OrderedDict()
        self.evicted = 0
        """Blocks evicted so far."""

    @property
    def idle_blocks(self) -> int:
        return int(self._tables.block_counts[[entry.slot for entry in self._idle.values()]].sum()) if self._idle else 0

    @property
    def room(self) -> int:
        """Tokens that may be admitted: those of free blocks and of idle ones."""
        return (self._tables.num_free + self.idle_blocks) * self._tables.block_size

    def need(self, tokens: int) -> int:
        """Return the room in tokens that a sequence of so many tokens takes, in whole blocks."""
        return self._tables.blocks_for(tokens) * self._tables.block_size

    def cached(self, order: int) -> int:
        entry = self._idle.get(order)
        return entry.tokens if entry is not None else 0

    def park(self, order: int, slot: int, tokens: int) -> None:
        """Make a sequence idle between its rounds, and keep its first ``tokens`` tokens."""
        self._tables.trim(slot, tokens)
        self._idle[order] = _Idle(slot, tokens)

    def resume(self, order: int) -> int:
        """Hold a session's idle prefix again, and return how many tokens of it are left."""
        entry = self._idle.pop(order, None)
        return 0 if entry is None else entry.tokens

    def drop(self, order: int) -> None:
        self._idle.pop(order, None)

    def oldest_idle(self) -> int | None:
        return next(iter(self._idle), None)

    def grow(self, slots: Ints, lengths: Ints) -> bool:
        """Make room for ``lengths`` tokens in ``slots``, and evict idle K/V for it. Returns False if that is not enough; then
        nothing but the eviction has happened."""
        self._make_room(self._tables.missing(slots, lengths))
        if self._tables.missing(slots, lengths) > self._tables.num_free:
            return False
        self._tables.grow(slots, lengths)
        return True

    def admit(self, slot: int, tokens: int) -> None:
        """``grow`` for a sequence that a policy has admitted. Raises OutOfBlocksError if it does not fit: a policy must keep to
        the room that its ``Situation`` tells."""
        if not self.grow(np.array([slot]), np.array([tokens])):
            tables = self._tables
            raise OutOfBlocksError(
                f"the policy admitted a sequence of {tokens} tokens where {tables.num_free} of {tables.num_blocks} blocks of "
                f"{tables.block_size} are free: it must keep to Situation.room"
            )

    def _make_room(self, blocks: int) -> None:
        for order in list(self._idle):
            num_missing = blocks - self._tables.num_free
            if num_missing <= 0:
                return
            entry = self._idle[order]
            num_held = int(self._tables.block_counts[entry.slot])
            entry.tokens = min(entry.tokens, max(num_held - num_missing, 0) * self._tables.block_size)
            self.evicted += self._tables.trim(entry.slot, entry.tokens)
            if entry.tokens == 0:
                del self._idle[order]


class _Kept(NamedTuple):
    slot: int
    ids: Ints
    """Tokens whose K/V was kept."""


class KeptSequences:
    """Sequences that are over, by their ``order``, as in ``SessionMemory``, which holds their blocks."""

    def __init__(self, executor: PagedExecutor, memory: SessionMemory) -> None:
        self._executor, self._memory = executor, memory
        self._kept: dict[int, _Kept] = {}

    def __contains__(self, order: int) -> bool:
        return order in self._kept

    def keep(self, order: int, slot: int, ids: Ints) -> None:
        """Keep the K/V of a slot's first tokens, whose ids are ``ids``. Less than a block is not kept."""
        if len(ids) < self._block_size:
            self._executor.close_slot(slot)
            return
        self._memory.park(order, slot, len(ids))
        self._kept[order] = _Kept(slot, ids)

    def adopt(self, order: int, prompt: Ints, sampling: SamplingParams) -> tuple[int, int] | None:
        """Hand the kept sequence of which ``prompt`` repeats most to ``order``, still idle. Returns its slot, and how many tokens of
        the prompt have K/V.

        The prompt must repeat at least a block and at least half of it. Less does not continue this conversation, but is an
        opening that many share, and this conversation's own next turn may still come. The prompt's last token is computed
        anew, for its logits.
        """
        best_order, best_length = None, 0
        for other, kept in self._kept.items():
            num_cached = min(self._memory.cached(other), len(kept.ids))
            common = _common_prefix_len(kept.ids[:num_cached], prompt[:-1])
            if common >= max(self._block_size, (num_cached + 1) // 2, best_length + 1):
                best_order, best_length = other, common
        if best_order is None:
            return None
        slot = self._reopen(self._take(best_order).slot, sampling)
        self._memory.park(order, slot, best_length)
        return slot, best_length

    def drop(self, order: int) -> None:
        self._executor.close_slot(self._take(order).slot)

    def sweep(self) -> None:
        """Give back the slots of kept sequences that were evicted altogether."""
        for order in [order for order in self._kept if not self._memory.cached(order)]:
            self.drop(order)

    def close(self) -> None:
        for order in list(self._kept):
            self.drop(order)

    def _take(self, order: int) -> _Kept:
        kept = self._kept.pop(order)
        self._memory.drop(order)
        return kept

    def _reopen(self, slot: int, sampling: SamplingParams) -> int:
        """Return a slot for another sequence, with the blocks of this one but without its ids."""
        tables = self._executor.tables
        blocks, num_held = tables.table[slot].copy(), int(tables.block_counts[slot])
        tables.table[slot], tables.block_counts[slot] = NOBODY, 0
        self._executor.close_slot(slot)
        slot = self._executor.open(sampling)
        tables.table[slot], tables.block_counts[slot] = blocks, num_held
        return slot

    @property
    def _block_size(self) -> int:
        return self._executor.tables.block_size


def _common_prefix_len(a: Ints, b: Ints) -> int:
    """Return the length of the longest common beginning."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(np.argmax(differs)) if differs.any() else size


class Driver(Protocol):
    """The calls by which a worker asks and tells its driver."""

    def hear(self, sequence: SessionState, token: int) -> bool:
        """Take the sequence's next token; True ends its round there."""

    def ids(self, sequence: SessionState, start: int) -> Ints:
        """Return the sequence's ids from ``start`` up to the end of its round's prompt."""

    def began(self, sequence: SessionState, now: float) -> None:
        """The sequence's prefill has been admitted: that of its round, or one that a preemption made necessary."""

    def prefilled(self, sequence: SessionState, task: PrefillTask, now: float) -> None:
        """The prefill has ended, and its own token was heard."""

    def done(self, sequence: SessionState, now: float) -> None:
        """The sequence has the tokens of its round and is in no batch; its slot is the driver's to keep or close."""


class Step(NamedTuple):
    """A step that the executor has run."""

    shares: list[Share]
    chunks: list[Chunk]
    decoding: int
    """Sequences that decoded."""
    context: int
    """Tokens of these sequences."""
    ran: Ran
    tokens: list[int]
    """Ids of the sequences that finished their prefill, then of those that decoded."""


class TorchWorker:
    def __init__(
        self,
        executor: PagedExecutor,
        batching: Batching,
        queue: PrefillQueue,
        driver: Driver,
        estimate_s: Callable[[int, int], float] | None = None,
    ) -> None:
        """``estimate_s`` returns the seconds that (history, tokens) take, for policies that read ``PrefillTask.estimate_s``."""
        self.executor, self.queue = executor, queue
        self.memory = SessionMemory(executor.tables)
        self.kept = KeptSequences(executor, self.memory)
        self.decode = DecodeColumns()
        self.begun: list[PrefillTask] = []
        self.sequences: dict[int, SessionState] = {}
        """``order`` -> each sequence that waits, runs, or is between rounds."""
        self.num_preemptions = 0
        self._owed = Owed()
        self._batching, self._driver, self._estimate_s = batching, driver, estimate_s
        self._num_arrived = self._num_tasks = 0

    def add(self, session: Session, sampling: SamplingParams = GREEDY) -> SessionState:
        """Add a session's sequence. The pool must have room for all of the session."""
        sequence = SessionState(session, self._num_arrived, sampling)
        self._num_arrived += 1
        self.sequences[sequence.order] = sequence
        return sequence

    def enqueue(self, sequence: SessionState, kind: TaskKind, history: int, tokens: int, at_s: float) -> None:
        identity = self._num_tasks, sequence.session.session_id, sequence.order, sequence.round_index
        task = sequence.task = PrefillTask(*identity, kind, history, tokens, at_s, at_s)
        self._num_tasks += 1
        if self._estimate_s is not None:
            task.estimate_s = self._estimate_s(history, tokens)
        self._owed.add(task)
        ask(self.queue.push, task)

    def adopt(self, sequence: SessionState, prompt: Ints) -> None:
        """Make a sequence with this prompt, which is not enqueued yet, continue from kept K/V if there is some."""
        adopted = self.kept.adopt(sequence.order, prompt, sequence.sampling)
        if adopted is not None:
            sequence.slot, sequence.computed = adopted
            sequence.context = sequence.computed

    def keep(self, sequence: SessionState, ids: Ints) -> None:
        """Let go of a sequence that is done, but keep its K/V; ``ids`` are all of its tokens."""
        del self.sequences[sequence.order]
        self.kept.keep(sequence.order, sequence.slot, ids[: sequence.computed])

    def drop(self, sequence: SessionState) -> None:
        """Let go of a sequence and its K/V between two steps, whether it waits, is prefilled or decodes."""
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

    def abandon(self) -> list[SessionState]:
        """Let go of all sequences that do not wait, after a step that raised: we know nothing about their K/V."""
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

    def _forget(self, sequence: SessionState) -> None:
        del self.sequences[sequence.order]
        if sequence.task is not None:
            self._owed.drop(sequence.task)
        self.memory.drop(sequence.order)
        if sequence.slot >= 0:
            self.executor.close_slot(sequence.slot)

    # ---- between two steps --------------------------------------------------------------------------------

    def next_plan(self, now: float) -> NextStep:
        """Return the policy's plan; idle if nothing waits for a prefill."""
        if not (self.queue or self.begun):
            return IDLE
        situation = Situation(self.queue, self.begun, self.decode.size, self.memory.room, self._need)
        plan = ask(self._batching.next_step, situation, now)
        self._owed.check(plan, self._batching)
        return plan

    def can_run(self, plan: NextStep, now: float) -> bool:
        """Whether the plan has a step: prefills, or sequences to decode. Sequences to decode get K/V for one more token. If
        there is none, the youngest are preempted. At worst that is all of them: then ask the policy again."""
        return bool(plan.shares) or self._reserve(now)

    def _need(self, task: PrefillTask) -> int:
        return self.memory.need(task.history + task.tokens + 1)

    # ---- a step -------------------------------------------------------------------------------------------

    def compute(self, plan: NextStep, now: float) -> Step:
        """Run the step of a plan for which ``can_run`` is true."""
        # Tasks that began earlier go on; tasks that begin take their K/V here.
        shares = [self._admit(share, now) for share in plan.shares]
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
        work = PackedWork.of(entries)
        if decodes:
            decode_work = self.decode.work()
            work = PackedWork(*(np.concatenate(columns) for columns in zip(work, decode_work, strict=True)))
        self.begun = [task for task in self.begun if task.left]
        ran = self.executor.run(work, plan.mode)
        token_ids: list[int] = ran.tokens.tolist()
        self.executor.wait()
        return Step(shares, chunks, decoding, context, ran, token_ids)

    def settle(self, step: Step, now: float) -> None:
        """Give the sequences their tokens; the driver hears which rounds are done."""
        self._note_logprobs(step)
        if step.decoding:
            first = len(step.tokens) - step.decoding
            pairs = zip(self.decode.members, step.tokens[first:], strict=True)
            self.decode.end(np.array([self._driver.hear(sequence, token) for sequence, token in pairs]))
            for sequence in self.decode.advance():
                self._driver.done(sequence, now)
        finished = [task for task, _ in step.shares if task.left == 0]
        for index, task in enumerate(finished):
            sequence = self.sequences[task.order]
            self._finish_prefill(sequence, task, now, is_over=self._driver.hear(sequence, step.tokens[index]))

    def _note_logprobs(self, step: Step) -> None:
        ran = step.ran
        if not (ran.logprobs or ran.prompt_logprobs):
            return
        members = self.decode.members if step.decoding else []
        for sequence in (*members, *(self.sequences[task.order] for task, _ in step.shares)):
            sequence.logprobs = ran.logprobs.get(sequence.slot)
            if sequence.slot in ran.prompt_logprobs:
                sequence.prompt_logprobs.append(ran.prompt_logprobs[sequence.slot])

    def _admit(self, share: Share, now: float) -> Share:
        """Take the K/V for a task that begins. The evicted part of its history is prefilled again."""
        task, tokens = share
        if task.computed:
            return share
        sequence = self.sequences[task.order]
        self._driver.began(sequence, now)
        is_whole = tokens == task.tokens
        cached = self.memory.resume(task.order)
        missing = task.history - cached
        self._owed.recompute(task, missing)
        sequence.computed = min(sequence.computed, cached)
        self._place(sequence)
        self.memory.admit(sequence.slot, task.history + task.tokens + 1)
        return Share(task, task.tokens if is_whole else tokens)

    def _place(self, sequence: SessionState) -> None:
        """Give the sequence a slot, and write the ids that the slot lacks."""
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
        """Take the slot of a sequence without K/V, or else of the one that has been idle longest."""
        counts = self.executor.tables.block_counts
        order = next((i for i, each in self.sequences.items() if each.slot >= 0 and not counts[each.slot]), None)
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

    def _finish_prefill(self, sequence: SessionState, task: PrefillTask, now: float, *, is_over: bool) -> None:
        self._owed.end(task)
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
        """Take K/V for one more token of every decoding sequence, and preempt the youngest as long as there is too little.
        Returns False if that leaves none."""
        while self.decode.size:
            if self.memory.grow(self.decode.slots, self.decode.contexts + 1):
                return True
            self._preempt(self.decode.youngest(), now)
        return False

    def _preempt(self, sequence: SessionState, now: float) -> None:
        """Drop a sequence's K/V, keep its tokens, and recompute it later (vLLM's preemption)."""
        self.num_preemptions += 1
        self.decode.leave(sequence)
        sequence.saved = self.executor.read(sequence.slot, 0, sequence.context)
        self.executor.close_slot(sequence.slot)
        sequence.slot, sequence.computed = -1, 0
        self.enqueue(sequence, "recompute", 0, sequence.context, now)
