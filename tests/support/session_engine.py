"""Sessions on one torch worker by a virtual clock: the policies of the simulated cluster, on real steps.

Between two steps it takes in what arrived, asks its batching policy for the next step and runs that, as
``engines.cluster.decode`` does.
"""

import heapq
import math
from typing import Any, NamedTuple

import numpy as np

from engines.ampd.live.coordinator import Prompts, random_prompts
from engines.ar.torch.executor import PagedExecutor
from engines.ar.torch.rows import SessionState
from engines.ar.torch.worker import TorchWorker
from engines.cluster.hardware import StepCost
from engines.cluster.record import RoundRow, Table, table_of
from engines.cluster.sessions import Arrivals, Clients, ClosedLoop, EventLoop, OpenArrivals, Session
from engines.policies.views import Batching, NextStep, PrefillQueue, PrefillTask, TaskKind
from engines.runtime.rows import Ints


def next_s(loop: EventLoop) -> float:
    """When the next event is due; never without any."""
    return loop._heap[0][0] if loop._heap else math.inf


def handle_next(loop: EventLoop) -> None:
    loop.now, _, handler, args = heapq.heappop(loop._heap)
    handler(*args)


class EngineRun(NamedTuple):
    rounds: Table
    answers: dict[int, list[list[int]]]
    """Session -> generated ids of its finished rounds."""
    facts: dict[str, Any]


class SessionEngine:
    """One run. A step takes what ``cost`` says, everything else no time."""

    def __init__(
        self,
        executor: PagedExecutor,
        batching: Batching,
        cost: StepCost,
        *,
        queue: PrefillQueue | None = None,
        prompts: Prompts | None = None,
    ) -> None:
        self.worker = TorchWorker(executor, batching, PrefillQueue() if queue is None else queue, self)
        self.prompts = prompts or random_prompts(executor.model.config.vocab_size, 0)
        self.cost, self.now = cost, 0.0
        self.rounds: list[RoundRow] = []
        self.answers: dict[int, list[list[int]]] = {}
        """By session, as far as it has come."""
        self._row: dict[int, int] = {}
        """Row of the round of each session that is under way."""
        self.loop = EventLoop()
        self._must_ask = False
        self._version = 0
        self._clients: Clients | None = None

    def run(self, arrivals: Arrivals) -> EngineRun:
        """Until every session has ended."""
        if isinstance(arrivals, ClosedLoop):
            self._clients = Clients(self.loop, arrivals, self._arrive)
        else:
            OpenArrivals(self.loop, arrivals.sessions, self._arrive)
        while self._turn():
            pass
        worker = self.worker
        assert not worker.sequences, "the policy leaves waiting prefills where they are"
        worker.close()
        facts = {"num_preemptions": worker.num_preemptions, "evicted_blocks": worker.memory.evicted}
        return EngineRun(table_of(RoundRow, self.rounds), self.answers, facts)

    def _arrive(self, session: Session) -> None:
        self._ready(self.worker.add(session))

    def _ready(self, sequence: SessionState) -> None:
        session, index, now = sequence.session, sequence.round_index, self.loop.now
        prefill, decode, _ = session.rounds[index]
        sequence.left, self._row[sequence.order] = decode, len(self.rounds)
        self.rounds.append(RoundRow(session.session_id, index, now, sequence.context, prefill, decode, is_local=True))
        kind: TaskKind = "incremental" if index else "initial"
        self.worker.enqueue(sequence, kind, sequence.context, prefill, now)
        self._must_ask = True

    def _wake(self, version: int) -> None:
        self._must_ask |= version == self._version

    def _end(self, sequence: SessionState) -> None:
        del self.worker.sequences[sequence.order]
        if self._clients is not None:
            self._clients.go_on(self.loop.now)

    def _turn(self) -> bool:
        """The next step; without one, the next event. False where there is neither."""
        self._version += 1
        self._must_ask = False
        plan = self.worker.next_plan(self.now)
        decodes = self.worker.decode.size > 0
        if self.worker.can_run(plan, self.now):
            self._step(plan)
            return True
        if decodes:
            return True  # all that decoded was preempted and waits for a prefill: ask again
        if plan.wake_s is not None:
            self.loop.at(max(plan.wake_s, self.now), self._wake, self._version)
        while next_s(self.loop) < math.inf and not self._must_ask:
            self.now = max(self.now, next_s(self.loop))
            handle_next(self.loop)
        return self._must_ask

    def _step(self, plan: NextStep) -> None:
        step = self.worker.compute(plan, self.now)
        if step.chunks:
            self.now += self.cost.step_s(step.chunks, step.decoding, step.context, plan.mode)
        else:
            base, slope, floor = self.cost.decode_line(step.decoding)
            self.now += max(base + slope * step.context, floor)
        while next_s(self.loop) <= self.now:
            handle_next(self.loop)
        self.loop.now = self.now
        self.worker.settle(step, self.now)

    # ---- what the worker asks and tells ----------------------------------------------------------------------

    def hear(self, sequence: SessionState, token: int) -> bool:
        return False  # answers are read when they are whole

    def ids(self, sequence: SessionState, start: int) -> Ints:
        """The current prompt where ``start`` is its first token; else all prompts so far, and the answers between them."""
        prompt = self.prompts(sequence.session, sequence.round_index)
        if start == sequence.context:
            return prompt
        parts = [prompt]
        for index in reversed(range(sequence.round_index)):
            answer = np.array(self.answers[sequence.session.session_id][index], dtype=np.int64)
            parts += [answer, self.prompts(sequence.session, index)]
        return np.concatenate(parts[::-1])

    def began(self, sequence: SessionState, now: float) -> None: ...

    def prefilled(self, sequence: SessionState, task: PrefillTask, now: float) -> None:
        if task.kind != "recompute":
            self.rounds[self._row[sequence.order]].first_token_s = now

    def done(self, sequence: SessionState, now: float) -> None:
        worker, session, context = self.worker, sequence.session, sequence.context
        self.rounds[self._row[sequence.order]].finished_s = now
        _, decode, delay_s = session.rounds[sequence.round_index]
        answer = worker.executor.read(sequence.slot, context - decode, context)
        self.answers.setdefault(session.session_id, []).append(answer)
        sequence.num_written = context
        sequence.round_index += 1
        if sequence.round_index < len(session.rounds):
            worker.memory.park(sequence.order, sequence.slot, context)
            self.loop.at(now + delay_s, self._ready, sequence)
        else:
            worker.executor.close_slot(sequence.slot)
            sequence.slot = -1
            self.loop.at(now, self._end, sequence)
