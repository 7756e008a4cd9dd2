"""Schedulers and batching policies that say one thing and do another, named as a user names his own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from engines.dllm import plan
from engines.dllm.config import Phase
from engines.dllm.plan import PlanItem, Request, StepChanges
from engines.dllm.scheduling import KvPool, PhaseScheduler
from engines.dllm.sequence import Sequence as Live
from engines.policies.batching import ONE_BY_ONE
from engines.policies.routing import Decision
from engines.policies.views import IDLE, DecodeView, NextStep, PrefillTask, PrefillView, Share, Situation


class Cheap(PhaseScheduler):
    def charge(self, sequence: Live) -> int:
        return 1


class Drops(PhaseScheduler):
    def submit(self, request: Request) -> None:
        if request.request_id != 3:
            super().submit(request)


class Starves(PhaseScheduler):
    """Request 1 last of all, and no word of it."""

    def schedule(self) -> plan.StepPlan | None:
        last = [each for each in self.waiting if each.request.request_id == 1]
        if last and len(self.waiting) + len(self.running) > 1:
            self.waiting.remove(last[0])
            made = super().schedule()
            self.waiting.append(last[0])
            return made
        return super().schedule()


def _changing(name: str, change: Callable[[plan.StepPlan], plan.StepPlan]) -> type[PhaseScheduler]:
    """A scheduler whose plans are changed."""

    def schedule(self: PhaseScheduler) -> plan.StepPlan | None:
        made = PhaseScheduler.schedule(self)
        return None if made is None else change(made)

    return type(name, (PhaseScheduler,), {"schedule": schedule})


def _changing_items(name: str, change: Callable[[PlanItem], PlanItem]) -> type[PhaseScheduler]:
    return _changing(name, lambda made: made._replace(items=tuple(map(change, made.items))))


class _Plan(plan.StepPlan):
    """Could say something else at a second look."""


Twice = _changing("Twice", lambda made: made._replace(items=made.items + made.items[:1]))
Empty = _changing("Empty", lambda made: made._replace(items=(), admitted=()))
Pads = _changing("Pads", lambda made: made._replace(pad_to=1))
Subclassed = _changing("Subclassed", lambda made: _Plan(*made))
Listed = _changing("Listed", lambda made: made._replace(items=list(made.items)))
Shortens = _changing_items("Shortens", lambda item: item._replace(total_len=item.block_end))
Hurries = _changing_items("Hurries", lambda item: item._replace(commit=item.masks_left))
NeverRefreshes = _changing_items("NeverRefreshes", lambda item: item._replace(phase=Phase.REUSE))
Stranger = _changing_items("Stranger", lambda item: item._replace(request_id=item.request_id + 1000))
Floats = _changing_items("Floats", lambda item: item._replace(commit=float(item.commit)))


class AdmitsAll(PhaseScheduler):
    def schedule(self) -> plan.StepPlan | None:
        made = super().schedule()
        assert made is not None
        return made._replace(admitted=(*made.admitted, *(each.request for each in self.waiting)))


class Crowds(PhaseScheduler):
    def schedule(self) -> plan.StepPlan | None:
        if self.config.max_num_seqs < 1000:
            self.config, self.pool = replace(self.config, max_num_seqs=1000), KvPool(10**9)
        return super().schedule()


class Overlaps(PhaseScheduler):
    def _reserve(self, sequence: Live) -> bool:
        sequence.kv_start = 0
        return True


class OtherPool(PhaseScheduler):
    def schedule(self) -> plan.StepPlan | None:
        if self.pool.num_rows < 10**9:
            self.pool = KvPool(10**9)
            self.pool.allocate(10**8)
        return super().schedule()


class OwnPool(PhaseScheduler):
    def __init__(self, config, pool, rule, *, exact_steps=False) -> None:
        super().__init__(config, KvPool(10**9), rule, exact_steps=exact_steps)


class Early(PhaseScheduler):
    def complete(
        self, done: plan.StepPlan, committed: Sequence[int], stops: Mapping[int, int] = MappingProxyType({})
    ) -> StepChanges:
        found = super().complete(done, committed, stops)
        return found._replace(first_block=tuple(item.request_id for item in done.items if item.step_in_block == 0))


class Crashes(PhaseScheduler):
    def schedule(self) -> plan.StepPlan | None:
        raise KeyError("nothing")


class Leaves(PhaseScheduler):
    def schedule(self) -> plan.StepPlan | None:
        raise GeneratorExit


class Unmade(PhaseScheduler):
    def __init__(self, *given: object, **named: object) -> None:
        pass


class Wanders(PhaseScheduler):
    def schedule(self):
        return [1, 2]


class Routes:
    """``how`` makes the decision, and may do something else besides."""

    def __init__(self, how) -> None:
        self.how = how

    def route(self, task: PrefillTask, home: DecodeView, prefills: Sequence[PrefillView], now: float) -> Decision:
        made: Decision = self.how(task, home, prefills)
        return made

    def pick(self, task: PrefillTask, instances: Sequence[PrefillView], now: float) -> int:
        made: int = self.how(task, instances[0], instances)
        return made


class Batches:
    """One by one, with the shares changed by ``how``."""

    def __init__(self, how) -> None:
        self.how = how

    def next_step(self, at: Situation, now: float) -> NextStep:
        made = ONE_BY_ONE.next_step(at, now)
        changed: NextStep = self.how(made, now) if made.shares else IDLE
        return changed


def shares(made: NextStep, factor: float) -> NextStep:
    return NextStep([Share(task, round(tokens * factor)) for task, tokens in made.shares])


def pretends(made: NextStep) -> NextStep:
    """All but the last token is said to be computed."""
    for task, _ in made.shares:
        task.computed = task.tokens - 1
    return NextStep([Share(task, 1) for task, _ in made.shares])


def forgets_history(task: PrefillTask) -> None:
    task.history, task.tokens = task.history + task.tokens - 1, 1
