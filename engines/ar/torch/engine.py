"""Serves sessions on one torch worker: the policies of the simulated cluster, on real steps.

Between two steps it takes in what arrived, asks its batching policy for the next step and runs that, as
``engines.ar.cluster.instance`` does on a virtual clock; given the same policy and a ``CostClock`` both make the same
steps at the same times (tests/engines/ar/torch/test_same_schedule.py). Where no prefill is named, the decode batch
advances by one token.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from engines.ar.cluster.batching import IDLE, Batching, Share, Situation, StepPlan
from engines.ar.cluster.queue import PrefillQueue
from engines.ar.cluster.record import table
from engines.ar.cost import Chunk
from engines.ar.session import Arrivals, ClosedLoop, Session
from engines.ar.task import PrefillTask, TaskKind
from engines.ar.torch.batch import DecodeColumns, Sequence
from engines.ar.torch.blocks import Ints
from engines.ar.torch.clock import Clock, WallClock
from engines.ar.torch.executor import TorchExecutor
from engines.ar.torch.memory import SessionMemory
from engines.ar.torch.rows import StepWork
from engines.ar.torch.run import ROUND_COLUMNS, STEP_COLUMNS, EngineRun, Prompts, random_prompts
from engines.ar.torch.sampling import GREEDY, SamplingParams
from engines.errors import require

_STARTED, _FIRST_TOKEN, _FINISHED = (ROUND_COLUMNS.index(name) for name in ("started_s", "first_token_s", "finished_s"))


@dataclass(kw_only=True)
class Engine:
    """One run; ``executor`` goes on to the next one, its slots and blocks are free again afterwards."""

    executor: TorchExecutor
    batching: Batching
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    clock: Clock = field(default_factory=WallClock)
    prompts: Prompts | None = None
    """By default random ones."""
    sampling: SamplingParams = GREEDY
    estimate_s: Callable[[int, int], float] | None = None
    """(history, tokens) -> seconds, for policies that read ``PrefillTask.estimate_s``."""

    def run(self, arrivals: Arrivals, *, until_s: float = float("inf")) -> EngineRun:
        """Until every session has ended, or the clock says ``until_s``."""
        return _Run(self, until_s).run(arrivals)


class _Run:
    def __init__(self, engine: Engine, until_s: float) -> None:
        self.executor, self.batching, self.queue = engine.executor, engine.batching, engine.queue
        self.clock, self.sampling, self.estimate_s = engine.clock, engine.sampling, engine.estimate_s
        self.prompts = engine.prompts or random_prompts(self.executor.model.config.vocab_size, 0)
        self.memory = SessionMemory(self.executor.tables)
        self.decode = DecodeColumns()
        self.begun: list[PrefillTask] = []
        self.sequences: dict[int, Sequence] = {}
        self.until_s = until_s
        self.rounds: list[list[Any]] = []
        self.steps: list[tuple[Any, ...]] = []
        self.answers: dict[int, list[list[int]]] = {}
        self.num_preemptions = 0
        self._num_arrived = self._num_tasks = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self._event_s = 0.0
        self._must_ask = False
        self._version = 0
        self._open: Iterator[Session] = iter(())
        self._closed: deque[Session] = deque()
        self._think_s = 0.0

    def run(self, arrivals: Arrivals) -> EngineRun:
        if isinstance(arrivals, ClosedLoop):
            self._closed.extend(arrivals.sessions)
            self._think_s = arrivals.think_s
            for _ in range(min(arrivals.num_clients, len(self._closed))):
                self._at(0.0, self._arrive, self._closed.popleft())
        else:
            self._open = iter(arrivals)
            self._schedule_open()
        reason = None
        try:
            while self._turn():
                if self.clock.now() >= self.until_s:
                    reason = f"stopped at {self.until_s:g} s"
                    break
            if reason is None and self.sequences:
                reason = "the policy leaves waiting prefills where they are: give it more room or more places"
        finally:
            for sequence in self.sequences.values():
                if sequence.slot >= 0:
                    self.executor.close_slot(sequence.slot)
        return EngineRun(
            rounds=table(ROUND_COLUMNS, self.rounds),
            steps=table(STEP_COLUMNS, self.steps),
            answers=self.answers,
            facts={
                "num_preemptions": self.num_preemptions,
                "evicted_blocks": self.memory.evicted,
                "end_s": self.clock.now(),
                "stop_reason": reason,
            },
        )

    # ---- events: arrivals, the environment, a policy's wake-up ------------------------------------------

    def _at(self, time_s: float, handler: Callable[..., None], *args: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, handler, args))

    def _handle_next(self) -> None:
        self._event_s, _, handler, args = heapq.heappop(self._events)
        handler(*args)

    def _schedule_open(self) -> None:
        session = next(self._open, None)
        if session is not None:
            self._at(session.arrival_s, self._arrive_open, session)

    def _arrive_open(self, session: Session) -> None:
        self._schedule_open()
        self._arrive(session)

    def _arrive(self, session: Session) -> None:
        most, max_len = self.executor.tables.num_blocks * self.executor.tables.block_size, self.executor.tables.max_len
        require(
            session.context_tokens <= min(most, max_len),
            f"session {session.session_id} grows to {session.context_tokens} tokens; the pool holds {most} and a sequence "
            f"{max_len}: shorten it, or raise num_tokens and max_len",
        )
        sequence = Sequence(session, self._num_arrived)
        self._num_arrived += 1
        self.sequences[sequence.order] = sequence
        self._ready(sequence)

    def _ready(self, sequence: Sequence) -> None:
        prefill, decode, _ = sequence.session.rounds[sequence.round_index]
        sequence.left, sequence.row = decode, len(self.rounds)
        self.rounds.append(
            [
                sequence.session.session_id,
                sequence.round_index,
                self._event_s,
                sequence.context,
                prefill,
                decode,
                None,
                None,
                None,
            ]
        )
        self._enqueue(sequence, "incremental" if sequence.round_index else "initial", sequence.context, prefill)

    def _enqueue(self, sequence: Sequence, kind: TaskKind, history: int, tokens: int) -> None:
        task = PrefillTask(
            self._num_tasks,
            sequence.session.session_id,
            sequence.order,
            sequence.round_index,
            kind,
            history,
            tokens,
            self._event_s,
            self._event_s,
        )
        self._num_tasks += 1
        if self.estimate_s is not None:
            task.estimate_s = self.estimate_s(history, tokens)
        self.queue.push(task)
        self._must_ask = True

    def _wake(self, version: int) -> None:
        self._must_ask |= version == self._version

    # ---- between two steps --------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """The next step; without one, the next event. False where there is neither."""
        began = perf_counter()
        now = self.clock.now()
        self._version += 1
        self._must_ask = False
        plan = self.batching.next_step(self._situation(), now) if self.queue or self.begun else IDLE
        decided = perf_counter() - began
        if plan.shares:
            self._step(plan, now, decided)
            return True
        while self.decode.size:
            if self._reserve():
                self._step(plan, now, decided)
                return True
            if self.queue:
                return True  # a preempted sequence waits for a prefill: ask again
        if plan.wake_s is not None:
            self._at(max(plan.wake_s, now), self._wake, self._version)
        while self._events and not self._must_ask:
            self.clock.wait_until(self._events[0][0])
            self._handle_next()
        return self._must_ask

    def _situation(self) -> Situation:
        return Situation(self.queue, self.begun, self.decode.size, self.memory.room, self._need)

    def _need(self, task: PrefillTask) -> int:
        return self.memory.need(task.history + task.tokens + 1)

    # ---- a step -------------------------------------------------------------------------------------------

    def _step(self, plan: StepPlan, now: float, decided_s: float) -> None:
        began = perf_counter()
        # What began earlier goes on; the K/V of what begins is taken here.
        shares = [self._admitted(share, now) for share in plan.shares]
        decodes = self.decode.size > 0 and (not shares or (plan.decodes and self._reserve()))
        decoding, context = (self.decode.size, self.decode.total_context) if decodes else (0, 0)
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
        self.executor.wait()
        self.clock.charge(chunks, decoding, context, plan.mode)
        end_s = self.clock.now()
        self.steps.append(
            (
                now,
                end_s,
                decided_s,
                perf_counter() - began,
                len(shares),
                sum(share.tokens for share in shares),
                decoding,
                ran.num_rows,
                None if ran.size is None else "x".join(str(number) for number in ran.size),
            )
        )
        while self._events and self._events[0][0] <= end_s:
            self._handle_next()
        self._event_s = end_s
        if decodes:
            for sequence in self.decode.advance():
                self._round_done(sequence, end_s)
        for task, _ in shares:
            if task.left == 0:
                self._prefilled(task, end_s)

    def _admitted(self, share: Share, now: float) -> Share:
        """Take the K/V of a task that begins; what was evicted of its history is prefilled again."""
        task, tokens = share
        if task.computed:
            return share
        sequence = self.sequences[task.order]
        if self.rounds[sequence.row][_STARTED] is None:
            self.rounds[sequence.row][_STARTED] = now
        is_whole = tokens == task.tokens
        cached = self.memory.resume(task.order)
        missing = task.history - cached
        task.history -= missing
        task.tokens += missing
        sequence.computed = min(sequence.computed, cached)
        self._place(sequence)
        self.memory.admit(sequence.slot, task.history + task.tokens + 1)
        return Share(task, task.tokens if is_whole else tokens)

    def _place(self, sequence: Sequence) -> None:
        """Give the sequence a slot, and write the ids that are not in it."""
        if sequence.slot < 0:
            if not self.executor.tables.num_free_slots:
                self._free_slot()
            sequence.slot = self.executor.open(self.sampling)
        if sequence.num_written == sequence.context > 0:
            ids = self.prompts(sequence.session, sequence.round_index)
            self.executor.write(sequence.slot, sequence.context, ids)
            sequence.num_written += len(ids)
        elif sequence.num_written == 0:
            ids = np.concatenate(list(self._ids(sequence)))
            self.executor.write(sequence.slot, 0, ids)
            sequence.num_written = len(ids)

    def _ids(self, sequence: Sequence) -> Iterator[Ints]:
        """All prompts up to the current round's, and the answers between them."""
        for index, answer in enumerate(sequence.answers):
            yield self.prompts(sequence.session, index)
            yield np.array(answer, dtype=np.int64)
        yield self.prompts(sequence.session, sequence.round_index)

    def _free_slot(self) -> None:
        """Take the slot of the session that has been idle longest."""
        order = self.memory.oldest_idle()
        require(
            order is not None, f"all {self.executor.tables.num_slots} slots run: raise num_slots, or lower max_num_seqs"
        )
        assert order is not None
        self.memory.drop(order)
        sequence = self.sequences[order]
        self.executor.close_slot(sequence.slot)
        sequence.slot, sequence.computed, sequence.num_written = -1, 0, 0

    def _prefilled(self, task: PrefillTask, now: float) -> None:
        """The prefill's own token is out, the first of its round but after a preemption."""
        sequence = self.sequences[task.order]
        sequence.context = task.history + task.tokens + 1
        sequence.left -= 1
        if task.kind != "recompute":
            self.rounds[sequence.row][_FIRST_TOKEN] = now
        if sequence.left:
            self.decode.join(sequence)
        else:
            self._round_done(sequence, now)

    def _round_done(self, sequence: Sequence, now: float) -> None:
        session = sequence.session
        self.rounds[sequence.row][_FINISHED] = now
        _, decode, delay_s = session.rounds[sequence.round_index]
        context = sequence.context
        sequence.answers.append(self.executor.read(sequence.slot, context - decode, context))
        sequence.num_written = context
        sequence.round_index += 1
        if sequence.round_index < len(session.rounds):
            self.memory.park(sequence.order, sequence.slot, context)
            self._at(now + delay_s, self._ready, sequence)
        else:
            self.executor.close_slot(sequence.slot)
            self._at(now, self._end, sequence)

    def _end(self, sequence: Sequence) -> None:
        self.answers[sequence.session.session_id] = sequence.answers
        del self.sequences[sequence.order]
        if self._closed:
            self._at(self._event_s + self._think_s, self._arrive, self._closed.popleft())

    # ---- memory ----------------------------------------------------------------------------------------------

    def _reserve(self) -> bool:
        """Take K/V for a token more of every decoding sequence, preempting the youngest where it must; False where that
        left none."""
        while self.decode.size:
            if self.memory.grow(self.decode.slots, self.decode.contexts + 1):
                return True
            self._preempt(self.decode.youngest())
        return False

    def _preempt(self, sequence: Sequence) -> None:
        """Recompute later (vLLM's preemption): its K/V is dropped, its tokens stay."""
        self.num_preemptions += 1
        self.decode.leave(sequence)
        self.executor.tables.trim(sequence.slot, 0)
        sequence.computed = 0
        self._event_s = self.clock.now()
        self._enqueue(sequence, "recompute", 0, sequence.context)
