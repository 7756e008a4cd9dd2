"""Serves sessions on one torch worker: the policies of the simulated cluster, on real steps.

Between two steps it takes in what arrived, asks its batching policy for the next step and runs that, as
``engines.cluster.decode`` does on a virtual clock; given the same policy and a ``CostClock`` both make the same
steps at the same times (tests/engines/ar/torch/test_same_schedule.py). Where no prefill is named, the decode batch
advances by one token.

What a run of the engine takes in and leaves behind: prompts, and plain tables.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ClassVar, Protocol

import numpy as np

from engines.ar.sampling import GREEDY, SamplingParams
from engines.ar.torch.executor import TorchExecutor
from engines.ar.torch.rows import Sequence
from engines.ar.torch.worker import Worker
from engines.cluster.hardware import StepCost
from engines.cluster.record import RoundRow, Table, table_of
from engines.cluster.sessions import Arrivals, Clients, ClosedLoop, EventLoop, OpenArrivals, Session
from engines.policies.views import Batching, Chunk, PrefillQueue, PrefillTask, StepPlan, TaskKind
from engines.runtime.rows import Ints

Prompts = Callable[[Session, int], Ints]
"""The ids that round i of a session adds."""


def random_prompts(vocab_size: int, seed: int) -> Prompts:
    """Ids that depend on (seed, session, round) alone."""

    def prompt(session: Session, round_index: int) -> Ints:
        random = np.random.default_rng((seed, session.session_id, round_index))
        return random.integers(vocab_size, size=session.rounds[round_index].prefill_tokens, dtype=np.int64)

    return prompt


@dataclass(slots=True)
class EngineRound(RoundRow):
    started_s: float | None = None
    """When its prefill was admitted."""


@dataclass(slots=True)
class StepRow:
    start_s: float
    end_s: float
    decide_s: float
    """The policy's time, of the wall."""
    run_s: float
    """The step's, of the wall."""
    prefills: int
    tokens: int
    decoding: int
    rows: int
    """Padding included."""
    mode: str | None
    """What the step ran in: null, a bucket "64x8" or a rung "512"."""


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    rounds: Table
    steps: Table
    answers: Mapping[int, list[list[int]]]
    """Session -> generated ids of its finished rounds."""
    facts: Mapping[str, Any]
    """num_preemptions, evicted_blocks, end_s; ``stop_reason`` where sessions are unfinished."""


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the run began."""
        ...

    def wait_until(self, time_s: float) -> None: ...

    def charge(self, chunks: list[Chunk], decoding: int, context: int, mode: object) -> None:
        """The step has been run: a clock that does not go by itself is put forward by what it costs."""
        ...


class WallClock:
    def __init__(self) -> None:
        self._began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._began

    def wait_until(self, time_s: float) -> None:
        left = time_s - self.now()
        if left > 0:
            time.sleep(left)

    def charge(self, chunks: list[Chunk], decoding: int, context: int, mode: object) -> None:
        return


class CostClock:
    """A step takes what ``cost`` says, everything else no time."""

    def __init__(self, cost: StepCost) -> None:
        self._cost, self._now = cost, 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, time_s: float) -> None:
        self._now = max(self._now, time_s)

    def charge(self, chunks: list[Chunk], decoding: int, context: int, mode: object) -> None:
        if chunks:
            self._now += self._cost.step_s(chunks, decoding, context, mode)
        else:
            base, slope, floor = self._cost.decode_line(decoding)
            self._now += max(base + slope * context, floor)


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
    """Drives a worker."""

    def __init__(self, engine: Engine, until_s: float) -> None:
        self.worker = Worker(engine.executor, engine.batching, engine.queue, self, engine.estimate_s)
        self.clock, self.sampling = engine.clock, engine.sampling
        self.prompts = engine.prompts or random_prompts(engine.executor.model.config.vocab_size, 0)
        self.until_s = until_s
        self.rounds: list[EngineRound] = []
        self.steps: list[StepRow] = []
        self.answers: dict[int, list[list[int]]] = {}
        self.loop = EventLoop()
        """Arrivals, the environment, a policy's wake-up."""
        self._must_ask = False
        self._version = 0
        self._clients: Clients | None = None

    def run(self, arrivals: Arrivals) -> EngineRun:
        if isinstance(arrivals, ClosedLoop):
            self._clients = Clients(self.loop, arrivals, self._arrive)
        else:
            OpenArrivals(self.loop, arrivals.sessions, self._arrive)
        worker, reason = self.worker, None
        try:
            while self._turn():
                if self.clock.now() >= self.until_s:
                    reason = f"stopped at {self.until_s:g} s"
                    break
            if reason is None and worker.sequences:
                reason = "the policy leaves waiting prefills where they are: give it more room or more places"
        finally:
            worker.close()
        return EngineRun(
            rounds=table_of(EngineRound, self.rounds),
            steps=table_of(StepRow, self.steps),
            answers=self.answers,
            facts={
                "num_preemptions": worker.num_preemptions,
                "evicted_blocks": worker.memory.evicted,
                "end_s": self.clock.now(),
                "stop_reason": reason,
            },
        )

    # ---- events ---------------------------------------------------------------------------------------------

    def _arrive(self, session: Session) -> None:
        self._ready(self.worker.add(session, self.sampling))

    def _ready(self, sequence: Sequence) -> None:
        prefill, decode, _ = sequence.session.rounds[sequence.round_index]
        sequence.left, sequence.row = decode, len(self.rounds)
        self.rounds.append(
            EngineRound(
                sequence.session.session_id,
                sequence.round_index,
                self.loop.now,
                sequence.context,
                prefill,
                decode,
                is_local=True,
            )
        )
        kind: TaskKind = "incremental" if sequence.round_index else "initial"
        self.worker.enqueue(sequence, kind, sequence.context, prefill, self.loop.now)
        self._must_ask = True

    def _wake(self, version: int) -> None:
        self._must_ask |= version == self._version

    def _end(self, sequence: Sequence) -> None:
        self.answers[sequence.session.session_id] = sequence.answers
        del self.worker.sequences[sequence.order]
        if self._clients is not None:
            self._clients.go_on(self.loop.now)

    # ---- steps --------------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """The next step; without one, the next event. False where there is neither."""
        began = perf_counter()
        now = self.clock.now()
        self._version += 1
        self._must_ask = False
        plan = self.worker.next_plan(now)
        decided = perf_counter() - began
        decodes = self.worker.decode.size > 0
        if self.worker.can_run(plan, now):
            self._step(plan, now, decided)
            return True
        if decodes:
            return True  # all that decoded was preempted and waits for a prefill: ask again
        if plan.wake_s is not None:
            self.loop.at(max(plan.wake_s, now), self._wake, self._version)
        while self.loop.next_s < math.inf and not self._must_ask:
            self.clock.wait_until(self.loop.next_s)
            self.loop.handle_next()
        return self._must_ask

    def _step(self, plan: StepPlan, now: float, decided_s: float) -> None:
        began = perf_counter()
        step = self.worker.compute(plan, now)
        self.clock.charge(step.chunks, step.decoding, step.context, plan.mode)
        end_s = self.clock.now()
        size = step.ran.size
        self.steps.append(
            StepRow(
                now,
                end_s,
                decided_s,
                perf_counter() - began,
                len(step.shares),
                sum(share.tokens for share in step.shares),
                step.decoding,
                step.ran.num_rows,
                None if size is None else "x".join(str(number) for number in size),
            )
        )
        while self.loop.next_s <= end_s:
            self.loop.handle_next()
        self.loop.now = end_s
        self.worker.settle(step, end_s)

    # ---- what the worker asks and tells ----------------------------------------------------------------------

    hears_tokens: ClassVar[bool] = False

    def hear(self, sequence: Sequence, token: int) -> bool:
        raise NotImplementedError("answers are read when they are whole")

    def ids(self, sequence: Sequence, start: int) -> Ints:
        """The current prompt where ``start`` is its first token; else all prompts so far, and the answers between them."""
        prompt = self.prompts(sequence.session, sequence.round_index)
        if start == sequence.context:
            return prompt
        parts = [prompt]
        for index in reversed(range(sequence.round_index)):
            answer = np.array(sequence.answers[index], dtype=np.int64)
            parts += [answer, self.prompts(sequence.session, index)]
        return np.concatenate(parts[::-1])

    def began(self, sequence: Sequence, now: float) -> None:
        row = self.rounds[sequence.row]
        if row.started_s is None:
            row.started_s = now

    def prefilled(self, sequence: Sequence, task: PrefillTask, now: float) -> None:
        if task.kind != "recompute":
            self.rounds[sequence.row].first_token_s = now

    def done(self, sequence: Sequence, now: float) -> None:
        worker, session, context = self.worker, sequence.session, sequence.context
        self.rounds[sequence.row].finished_s = now
        _, decode, delay_s = session.rounds[sequence.round_index]
        sequence.answers.append(worker.executor.read(sequence.slot, context - decode, context))
        sequence.num_written = context
        sequence.round_index += 1
        if sequence.round_index < len(session.rounds):
            worker.memory.park(sequence.order, sequence.slot, context)
            self.loop.at(now + delay_s, self._ready, sequence)
        else:
            worker.executor.close_slot(sequence.slot)
            sequence.slot = -1
            self.loop.at(now, self._end, sequence)
