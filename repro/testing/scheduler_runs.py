"""Runs of a scheduler that properties are judged by: the engine with its ledger, on executors without a model, arrivals by steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engines.cost.roofline import L40S, Calibration, Roofline
from engines.data import asked
from engines.dllm.config import EngineConfig, RefreshRule
from engines.dllm.engine import Engine
from engines.dllm.plan import DelegatingExecutor, Executor, ExecutorError, Request, StepOutcome, StepPlan
from engines.dllm.scheduling import KvPool, Scheduler
from engines.dllm.sequence import Sequence as Live
from engines.dllm.simulated import RooflineExecutor, step_work
from engines.errors import RunError, UserError
from engines.models.shape import LLADA_8B
from engines.runtime.step_timer import DeviceTimes

_ROOFLINE = Roofline(LLADA_8B, L40S, Calibration.datasheet(L40S))


@dataclass(frozen=True, kw_only=True)
class Case:
    config: EngineConfig
    kv_rows: int
    rule: RefreshRule
    exact_steps: bool
    arrivals: tuple[tuple[int, Request], ...]
    """(step, request), in order: a request is submitted before that step is planned."""
    cancels: Mapping[int, int] = field(default_factory=dict)
    """Request id -> the step before which it is cancelled, if it is still there."""
    fails: frozenset[int] = frozenset()
    """Steps that cannot be executed."""
    salt: int = 0
    """By which a stand-in of a model commits more than it must, and stops."""

    def work(self, request: Request) -> int:
        """Steps it takes alone."""
        live = Live(request, self.rule, self.config, exact_steps=self.exact_steps)
        return sum(1 for _ in live.trajectory())


@dataclass(kw_only=True)
class Run:
    scheduler: Scheduler
    plans: list[StepPlan | None] = field(default_factory=list)
    """By step; None where nothing ran."""
    came: dict[int, int] = field(default_factory=dict)
    """Request id -> the step before which it was submitted, in that order."""
    ended: dict[int, int] = field(default_factory=dict)
    """Request id -> the step at whose end it was finished."""
    gone: set[int] = field(default_factory=set)
    """Those that were cancelled, or in a step that failed."""
    rows_used: int = 0
    """Rows of the pool that are taken when all is over."""


def run(make: Any, case: Case, executor: Executor) -> Run:
    """Every step until nothing is left. Raises RunError for a plan that is not due (``engines.dllm.engine.Ledger``)."""
    pool = KvPool(case.kv_rows)
    scheduler: Scheduler = asked(make, case.config, pool, case.rule, exact_steps=case.exact_steps)
    done = Run(scheduler=scheduler)
    watched = _Watched(executor, case.fails)
    engine = Engine(scheduler, watched)
    pending = [*case.arrivals]
    while pending or engine.has_work:
        index = len(done.plans)
        while pending and pending[0][0] <= index:
            request = _submitted(engine, pending.pop(0)[1])
            done.came[request.request_id] = index
        for request_id, step in case.cancels.items():
            if step == index and request_id in done.came.keys() - done.ended.keys() - done.gone:
                _cancel(engine, request_id, done)
        watched.plan, watched.index = None, index
        try:
            record = engine.step() if engine.has_work else None
        except RunError as error:
            raise RunError(f"step {index}: {error}") from error
        done.plans.append(watched.plan)
        if record is None:
            if engine.has_work and not pending:
                left = ", ".join(str(each) for each in done.came if each not in done.ended.keys() | done.gone)
                raise AssertionError(f"step {index} plans nothing, where requests {left} are not finished")
            continue
        done.ended.update(dict.fromkeys(record.done.finished, index))
        done.gone.update(request_id for request_id, _ in record.done.failed)
    done.rows_used = pool.used_rows
    return done


def _submitted(engine: Engine, request: Request) -> Request:
    """A scheduler may refuse a request of which only a model knows how many steps it takes, and gets one that is known."""
    try:
        engine.submit(request)
    except UserError as error:
        generation = replace(request.generation, threshold=None, stop_at_eos=False)
        if generation == request.generation:
            raise AssertionError(f"request {request.request_id}, which fits, is refused ({error})") from error
        request = replace(request, generation=generation)
        engine.submit(request)
    return request


def _cancel(engine: Engine, request_id: int, done: Run) -> None:
    try:
        asked(engine.cancel, request_id)
    except UserError:
        return  # of a static batch that runs
    done.gone.add(request_id)


def charged(case: Case) -> Executor:
    """A step takes what it does on a card, by its datasheet; there are no ids."""
    return RooflineExecutor(_ROOFLINE, case.config)


class _Watched(DelegatingExecutor):
    def __init__(self, executor: Executor, fails: frozenset[int]) -> None:
        super().__init__(executor)
        self.plan: StepPlan | None = None
        self.index = 0
        self._fails = fails

    def execute(self, plan: StepPlan) -> StepOutcome:
        self.plan = plan
        if self.index in self._fails:
            raise ExecutorError("out of memory")
        return self.executor.execute(plan)


class Late:
    """Stands in for a device: it has ids, is behind the host, tells times afterwards, and a model in it commits by confidence and
    stops where it likes."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._requests: dict[int, Request] = {}
        self._num_executed = 0
        self._times: dict[int, DeviceTimes] = {}

    def validate(self, request: Request) -> None:
        return

    def execute(self, plan: StepPlan) -> StepOutcome:
        self._requests.update((request.request_id, request) for request in plan.admitted)
        committed, stops = [], {}
        for item in plan.items:
            generation = self._requests[item.request_id].generation
            chance = hash((self._case.salt, item.request_id, item.block_start, item.step_in_block))
            count = max(item.commit, min(item.masks_left, 1 + chance % 4)) if generation.is_parallel else item.commit
            if generation.stop_at_eos and count >= item.masks_left and (item.block_start + item.request_id) % 3 == 0:
                stops[item.request_id] = item.block_start
            committed.append(count)
        work = step_work(plan, self._case.config)
        self._times[self._num_executed] = DeviceTimes(forward_s=1e-3 * (1 + self._num_executed % 7))
        self._num_executed += 1
        return StepOutcome(tuple(committed), work.query_rows, work.logit_rows, None, None, stops=stops)

    def wait(self) -> None:
        return

    def times(self) -> Mapping[int, DeviceTimes]:
        told, self._times = self._times, {}
        return told

    def release(self, request_id: int) -> tuple[int, ...] | None:
        request = self._requests.pop(request_id, None)
        return None if request is None else tuple(range(request.generation.gen_length))

    def close(self) -> None:
        return


def named_otherwise(case: Case, ids: Mapping[int, int]) -> Case:
    arrivals = [(step, replace(request, request_id=ids[request.request_id])) for step, request in case.arrivals]
    return replace(case, arrivals=tuple(arrivals))


def with_ids(case: Case) -> Case:
    """Its prompts are there, and not only their lengths."""
    arrivals = []
    for step, request in case.arrivals:
        prompt = tuple((31 * request.request_id + 7 * place) % 997 for place in range(request.prompt_len))
        arrivals.append((step, replace(request, prompt_ids=prompt)))
    return replace(case, arrivals=tuple(arrivals))


def renamed(plans: Sequence[StepPlan | None], ids: Mapping[int, int]) -> list[StepPlan | None]:
    """The same plans with other ids, and without what is admitted, whose requests differ in more."""
    return [
        None
        if plan is None
        else plan._replace(
            items=tuple(item._replace(request_id=ids[item.request_id]) for item in plan.items), admitted=()
        )
        for plan in plans
    ]
