"""Policies and workloads as a user writes them, of every kind that a knob names."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from engines.knobs import Checked, Count, Range, Tokens
from engines.policies.routing import Decision
from engines.policies.views import NextStep, OpenQueue, PrefillQueue, PrefillTask, Share, Situation, Slo
from repro.workloads.rounds import RecordedRound, TracedSession


@dataclass
class Gather:
    """A batcher: prompts gather for a moment."""

    max_num_batched_tokens: Tokens
    max_num_seqs: Count
    window_s: Annotated[float, Range(0, 10)] = 0.005
    """Seconds that the oldest prompt waits for company."""

    def next_step(self, at: Situation, now: float) -> NextStep:
        waiting = list(at.queue)
        due_s = waiting[0].ready_s + self.window_s if waiting else now
        if now < due_s and sum(task.tokens for task in waiting) < self.max_num_batched_tokens:
            return NextStep(wake_s=due_s)
        shares: list[Share] = []
        tokens, room = 0, at.room
        for task in waiting[: self.max_num_seqs - at.decoding]:
            tokens, room = tokens + task.tokens, room - at.need_of(task)
            if room < 0 or (shares and tokens > self.max_num_batched_tokens):
                break
            assert isinstance(at.queue, OpenQueue)
            shares.append(Share(at.queue.pull(task), task.tokens))
        return NextStep(shares)


@dataclass(frozen=True, kw_only=True)
class StayKnobs(Checked):
    longest: Tokens = 256
    """Tokens of a prefill that stays."""


class Stay:
    """A router with settings."""

    knobs = StayKnobs

    def __init__(self, *, own: StayKnobs, seed: int) -> None:
        self.own, self.seed = own, seed

    def route(self, task: PrefillTask, home: Any, prefills: Sequence[Any], now: float) -> Decision:
        if task.tokens <= self.own.longest:
            return Decision(home.worker_id, True, "short")
        return Decision(prefills[0].worker_id, False, "long")


@dataclass
class Only:
    """A binder of all sessions to one worker."""

    worker: Annotated[int, Range(0, 100)] = 0
    """Place of the decode worker."""

    def bind(self, decodes: Sequence[Any], now: float) -> int:
        return int(decodes[self.worker].worker_id)


@dataclass
class Turns:
    """A binder that keeps count: every so many sessions one lives on the second worker."""

    every: Annotated[int, Range(1, 100)] = 2
    """Sessions."""
    num_bound: int = field(default=0, init=False)

    def bind(self, decodes: Sequence[Any], now: float) -> int:
        self.num_bound += 1
        return int(decodes[self.num_bound % self.every == 0].worker_id)


class Newest(OpenQueue):
    """Last come, first served."""

    def __init__(self, *, slo: Slo) -> None:
        super().__init__()
        self.slo = slo

    def peek(self, now: float) -> PrefillTask:
        return list(self)[-1]


class Second:
    """An instance router."""

    def pick(self, task: PrefillTask, instances: Sequence[Any], now: float) -> int:
        return 1


def plain() -> PrefillQueue:
    return PrefillQueue()


@dataclass(frozen=True, kw_only=True)
class Dialogues:
    """A workload: sessions of one to ``most`` rounds, one every ``every_s``."""

    num_prompts: Count = 24
    """Sessions."""
    most: Annotated[int, Range(1, 9)] = 1
    """Rounds of the longest."""
    every_s: Annotated[float, Range(0, 60)] = 0.4
    """Seconds from one session to the next."""

    def sessions(self, seed: int) -> Iterator[TracedSession]:
        draw = random.Random(seed)
        for index in range(self.num_prompts):
            rounds = [
                RecordedRound(draw.randint(40, 900), 16 * draw.randint(1, 4), draw.randint(0, 8) / 4)
                for _ in range(draw.randint(1, self.most))
            ]
            yield TracedSession(tuple(rounds), index * self.every_s)
