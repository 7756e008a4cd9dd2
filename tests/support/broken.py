"""Plug-ins that break one property each, named as a user names his own."""

import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Any, ClassVar

from engines.dllm.config import EngineConfig, Phase
from engines.dllm.plan import Request, StepChanges, StepPlan
from engines.dllm.scheduling import PhaseScheduler
from engines.dllm.sequence import Sequence as Live
from engines.policies.batching import Chunked, OneByOne
from engines.policies.routing import Decision
from engines.policies.views import IDLE, NextStep, OpenQueue, PrefillTask, Share, Situation
from repro.testing.properties import Ahead, in_order


def _next_s(worker: Any) -> float:
    """When the next event of its run is due; never without any."""
    heap = worker._loop._heap
    return heap[0][0] if heap else math.inf


class Forgets(PhaseScheduler):
    """Every third request."""

    def submit(self, request: Request) -> None:
        super().submit(request)
        if len(self._by_id) == 3:
            self._drop(self.waiting.pop())


class Overdraws(PhaseScheduler):
    def charge(self, sequence: Live) -> int:
        return super().charge(sequence) // 2


class Leaks(PhaseScheduler):
    """The rows of what is cancelled while it runs."""

    def cancel(self, request_id: int) -> bool:
        found = self.find(request_id)
        if found not in self.running:
            return super().cancel(request_id)
        self.running.remove(found)
        del self._by_id[request_id]
        return True


class GoesOn(PhaseScheduler):
    """With what was in a step that failed."""

    def fail(self, plan: StepPlan) -> tuple[int, ...]:
        return tuple(item.request_id for item in plan.items)


class _Turns(PhaseScheduler):
    """The newest first where ``turned`` says so."""

    def schedule(self) -> StepPlan | None:
        if self.waiting and self.turned():
            self.waiting = deque(reversed(self.waiting))
        return super().schedule()

    def turned(self) -> bool:
        return True


class NewestFirst(_Turns):
    def schedule(self) -> StepPlan | None:
        self.waiting = deque(sorted(self.waiting, key=lambda live: -self.order[live.request.request_id]))
        return super(_Turns, self).schedule()

    def __init__(self, *given, **named) -> None:
        super().__init__(*given, **named)
        self.order: dict[int, int] = {}

    def submit(self, request: Request) -> None:
        super().submit(request)
        self.order[request.request_id] = len(self.order)


class Remembers(_Turns):
    """How many of its kind there have been."""

    made: ClassVar[list[int]] = []

    def __init__(self, *given, **named) -> None:
        super().__init__(*given, **named)
        self.made.append(1)

    def turned(self) -> bool:
        return len(self.made) % 2 == 0


class Looks(_Turns):
    """At what whoever calls it still holds back."""

    def turned(self) -> bool:
        frame: FrameType | None = sys._getframe()
        while frame is not None and "pending" not in frame.f_locals:
            frame = frame.f_back
        return frame is not None and bool(frame.f_locals["pending"])


class Reads(_Turns):
    """Prompts, where there are some."""

    def turned(self) -> bool:
        return self.waiting[0].request.prompt_ids is not None


class ByNumber(PhaseScheduler):
    def schedule(self) -> StepPlan | None:
        self.waiting = deque(sorted(self.waiting, key=lambda live: live.request.request_id))
        return super().schedule()


class Reports(PhaseScheduler):
    """Nothing of what ended."""

    def complete(
        self, plan: StepPlan, committed: tuple[int, ...], stops: Mapping[int, int] = MappingProxyType({})
    ) -> StepChanges:
        super().complete(plan, committed, stops)
        return StepChanges()


class Patience(NewestFirst):
    def longest_wait(self, ahead: object) -> float:
        return float("inf")


class Places(PhaseScheduler):
    """Its price depends on its slots."""

    sizes: ClassVar[set[int]] = set()
    first = EngineConfig().max_num_seqs

    def longest_wait(self, ahead: Ahead) -> float:
        self.sizes.add(self.config.max_num_seqs)
        return in_order(ahead)


# ---- refresh rules -----------------------------------------------------------------------------------------


class OfTheBatch:
    """Builds anew at every seventh question, whoever asks."""

    caches, window = True, "block"

    def __init__(self) -> None:
        self.num = 0

    def phase(self, step_in_block: int) -> Phase:
        self.num += 1
        return Phase.BUILD if step_in_block == 0 or self.num % 7 == 0 else Phase.REUSE


@dataclass(frozen=True)
class NeverBuilds:
    caches: bool = True
    window: str = "block"

    def phase(self, step_in_block: int) -> Phase:
        return Phase.REUSE if step_in_block > 2 else Phase.FULL


@dataclass(frozen=True)
class Confident(NeverBuilds):
    needs: ClassVar = frozenset({"confidences"})


# ---- routers -----------------------------------------------------------------------------------------------


class Nowhere:
    def pick(self, task: PrefillTask, instances: Sequence, now: float) -> int:
        return len(instances) if task.tokens % 2 else 0


class NowhereRemote:
    def route(self, task: PrefillTask, home: object, prefills: Sequence, now: float) -> Decision:
        return Decision(100 + len(prefills) if task.tokens % 2 else 100, False, "there")


class Peeks:
    """At the simulator's clock: whether anything comes within 20 ms."""

    def pick(self, task: PrefillTask, instances: Sequence, now: float) -> int:
        return 0 if _next_s(instances[0]) < now + 0.02 else 1


class PeeksRemote:
    def route(self, task: PrefillTask, home: object, prefills: Sequence, now: float) -> Decision:
        is_near = _next_s(prefills[0]) < now + 0.02
        return Decision(home.worker_id if is_near else prefills[0].worker_id, is_near, "seen")


class Rotates:
    """What came last to the front of the first worker's queue."""

    def pick(self, task: PrefillTask, instances: Sequence, now: float) -> int:
        instances[0].queue._tasks.rotate(1)
        return 0


class RotatesRemote:
    def route(self, task: PrefillTask, home: object, prefills: Sequence, now: float) -> Decision:
        prefills[0].queue._tasks.rotate(1)
        return Decision(prefills[0].worker_id, False, "there")


class ByName:
    def pick(self, task: PrefillTask, instances: Sequence, now: float) -> int:
        return task.session_id % len(instances)


class ByNameRemote:
    def route(self, task: PrefillTask, home: object, prefills: Sequence, now: float) -> Decision:
        return Decision(100 + task.session_id % len(prefills), False, "by name")


# ---- batching policies -------------------------------------------------------------------------------------


class Loses:
    def next_step(self, at: Situation, now: float) -> NextStep:
        if len(at.queue) > 1:
            at.queue.take(now)
        return OneByOne().next_step(at, now)


class Overfills:
    def __init__(self, max_num_batched_tokens: int) -> None:
        self.inner = Chunked(max_num_batched_tokens=2 * max_num_batched_tokens)

    def next_step(self, at: Situation, now: float) -> NextStep:
        return self.inner.next_step(at, now)


class Overcrowds:
    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.inner = Chunked(max_num_batched_tokens=max_num_batched_tokens)

    def next_step(self, at: Situation, now: float) -> NextStep:
        return self.inner.next_step(at, now)


class Overadmits:
    def next_step(self, at: Situation, now: float) -> NextStep:
        return Chunked().next_step(at._replace(room=10**9), now)


class Lifo:
    def next_step(self, at: Situation, now: float) -> NextStep:
        assert isinstance(at.queue, OpenQueue)
        last = self.last(at)
        if last is None or at.need_of(last) > at.room:
            return IDLE
        at.queue.pull(last)
        return NextStep([Share(last, last.tokens)])

    def last(self, at: Situation) -> PrefillTask | None:
        return max(at.queue, key=lambda task: task.order, default=None)


class Alternates(Lifo):
    """From run to run between the newest and the oldest."""

    runs: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.runs.append(1)

    def last(self, at: Situation) -> PrefillTask | None:
        sign = 1 if len(self.runs) % 2 else -1
        return max(at.queue, key=lambda task: sign * task.order, default=None)


class Budgeted:
    """Its price depends on its budget."""

    sizes: ClassVar[set[int]] = set()
    first = 2048

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.inner = Chunked(max_num_batched_tokens=max_num_batched_tokens)

    def next_step(self, at: Situation, now: float) -> NextStep:
        return self.inner.next_step(at, now)

    def longest_wait(self, ahead: Ahead) -> float:
        self.sizes.add(self.inner.max_num_batched_tokens)
        return in_order(ahead)


class BySession(Lifo):
    def last(self, at: Situation) -> PrefillTask | None:
        return max(at.queue, key=lambda task: task.session_id, default=None)
