"""Properties of a scheduler of diffusion LLMs, in runs of the engine with its ledger. Executors have no model, and arrivals come by steps.
Also those of a refresh rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from engines.cost.roofline import L40S, Calibration, Roofline
from engines.data import ask
from engines.dllm.config import (
    DelayedCache,
    EngineConfig,
    GenerationConfig,
    NoCache,
    Phase,
    RefreshRule,
    SparsityConfig,
    check_rule,
)
from engines.dllm.engine import Engine
from engines.dllm.plan import DelegatingExecutor, Executor, ExecutorError, Request, StepOutcome, StepPlan
from engines.dllm.scheduling import KvPool, PhaseScheduler, Scheduler
from engines.dllm.sequence import Sequence as Live
from engines.dllm.sequence import cache_rows
from engines.dllm.simulated import RooflineExecutor, check_simulated, step_work
from engines.errors import RunError, UserError
from engines.models.shape import LLADA_8B
from engines.runtime.step_timer import DeviceTimes
from repro.testing.properties import (
    Bound,
    Kind,
    PlugIn,
    Property,
    Source,
    Stay,
    bound_of,
    check_alike,
    check_waits,
    made,
    no_starvation,
)

_ROOFLINE = Roofline(LLADA_8B, L40S, Calibration.datasheet(L40S))


@dataclass(frozen=True, kw_only=True)
class Case:
    config: EngineConfig
    kv_rows: int
    rule: RefreshRule
    exact_steps: bool
    arrivals: tuple[tuple[int, Request], ...]
    """(step, request), in order. A request is submitted before that step is planned."""
    cancels: Mapping[int, int] = field(default_factory=dict)
    """Request id -> the step before which it is cancelled, if it has not ended."""
    fails: frozenset[int] = frozenset()
    """Steps whose execution fails."""
    salt: int = 0
    """Varies how a stand-in for a model commits more than it must, and stops."""

    def work(self, request: Request) -> int:
        """Steps that the request takes alone."""
        live = Live(request, self.rule, self.config, exact_steps=self.exact_steps)
        return sum(1 for _ in live.trajectory())


@dataclass(kw_only=True)
class Run:
    scheduler: Scheduler
    plans: list[StepPlan | None] = field(default_factory=list)
    """Plans by step; None if nothing ran."""
    came: dict[int, int] = field(default_factory=dict)
    """Request id -> the step before which it was submitted, in that order."""
    ended: dict[int, int] = field(default_factory=dict)
    """Request id -> the step at whose end it was finished."""
    gone: set[int] = field(default_factory=set)
    """Requests that were cancelled, or were in a step that failed."""
    rows_used: int = 0
    """Pool rows that are still taken at the end."""


def run(make: Any, case: Case, executor: Executor) -> Run:
    """Run steps until nothing is left. Raises RunError for a plan that breaks the rules (``engines.dllm.engine.Ledger``)."""
    pool = KvPool(case.kv_rows)
    scheduler: Scheduler = ask(make, case.config, pool, case.rule, exact_steps=case.exact_steps)
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
                unfinished = ", ".join(str(each) for each in done.came if each not in done.ended.keys() | done.gone)
                raise AssertionError(f"step {index} plans nothing, where requests {unfinished} are not finished")
            continue
        done.ended.update(dict.fromkeys(record.done.finished, index))
        done.gone.update(request_id for request_id, _ in record.done.failed)
    done.rows_used = pool.used_rows
    return done


def _submitted(engine: Engine, request: Request) -> Request:
    """Submit a request. If a scheduler refuses one whose number of steps only a model knows, submit it with a known number."""
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
        ask(engine.cancel, request_id)
    except UserError:
        return  # of a static batch that runs
    done.gone.add(request_id)


def charged(case: Case) -> Executor:
    """An executor whose steps take the time on a card by its datasheet. It has no token ids."""
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
    """Stands in for a device. It has token ids, lags behind the host and reports times later. Its model commits by confidence and stops
    where it likes."""

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
        times, self._times = self._times, {}
        return times

    def release(self, request_id: int) -> tuple[int, ...] | None:
        request = self._requests.pop(request_id, None)
        return None if request is None else tuple(range(request.generation.gen_length))

    def close(self) -> None:
        return


def named_otherwise(case: Case, ids: Mapping[int, int]) -> Case:
    arrivals = [(step, replace(request, request_id=ids[request.request_id])) for step, request in case.arrivals]
    return replace(case, arrivals=tuple(arrivals))


def with_ids(case: Case) -> Case:
    """The case with the token ids of its prompts, and not only their lengths."""
    arrivals = []
    for step, request in case.arrivals:
        prompt = tuple((31 * request.request_id + 7 * index) % 997 for index in range(request.prompt_len))
        arrivals.append((step, replace(request, prompt_ids=prompt)))
    return replace(case, arrivals=tuple(arrivals))


def renamed(plans: Sequence[StepPlan | None], ids: Mapping[int, int]) -> list[StepPlan | None]:
    """The same plans with other ids, and without admitted requests, which differ in more than ids."""
    return [
        None
        if plan is None
        else plan._replace(
            items=tuple(item._replace(request_id=ids[item.request_id]) for item in plan.items), admitted=()
        )
        for plan in plans
    ]


MOST_TOKENS = 60
"""Most tokens of a prompt with its answer."""


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """The scheduler that ``make(config, pool, rule, exact_steps=...)`` returns."""

    make: Any
    longest_wait: Bound | None = None

    def __post_init__(self) -> None:
        check_simulated("scheduler", type(self._one), keeps_state=True)

    @cached_property
    def _one(self) -> Scheduler:
        try:
            scheduler = ask(self.make, EngineConfig(), KvPool(1), DelayedCache(), exact_steps=False)
        except RunError as error:
            raise UserError(f"no scheduler is made of config, pool, rule and exact_steps: {error}") from error
        if not isinstance(scheduler, Scheduler):
            raise UserError(f"{scheduler!r:.80} is no Scheduler: name a subclass, or what makes one")
        return scheduler

    @cached_property
    def bound(self) -> Bound:
        return bound_of(self._one, self.longest_wait)


# ---- examples ------------------------------------------------------------------------------------------------


def _cases(source: Source, subject: Scheduling) -> Case:
    """A few requests of all kinds. Half of the cases have many small blocks and slots for all requests, so that refreshes coincide."""
    is_crowded = source.one_of((False, True))
    arrivals = [
        (source.whole(0, 20), _request(source, index, is_crowded=is_crowded)) for index in range(source.whole(1, 8))
    ]
    slots = 9 if is_crowded else source.whole(1, 3)
    return _case(source, arrivals, slots=slots, spare=source.whole(0, MOST_TOKENS * (1 if is_crowded else 3)))


def _request(source: Source, request_id: int, *, is_crowded: bool) -> Request:
    length = source.whole(12, 24) if is_crowded else source.whole(1, 24)
    block = source.whole(2, 5) if is_crowded else source.whole(1, 10)
    steps = source.whole(-(-length // block), length + 4)
    generation = GenerationConfig(gen_length=length, block_length=block, steps=steps)
    return Request(request_id=request_id, prompt_len=source.whole(1, MOST_TOKENS - length), generation=generation)


def _case(source: Source, arrivals: list[tuple[int, Request]], *, slots: int, spare: int) -> Case:
    sparsity = SparsityConfig(
        selection=source.one_of(("head", "dense")),
        retention_ratio=source.one_of((0.1, 0.5, 1.0)),
        refresh_delay=source.one_of((0, 1)),
    )
    rules: tuple[RefreshRule, ...] = (DelayedCache(delay=sparsity.refresh_delay), NoCache())
    rule = source.one_of(rules)
    requests = [request for _, request in arrivals]
    rows = max(cache_rows(each.total_len, each.generation, sparsity) for each in requests) if rule.caches else 0
    config = EngineConfig(
        max_num_batched_tokens=max(each.total_len for each in requests) + spare,
        max_num_seqs=slots,
        max_model_len=MOST_TOKENS,
        sparsity=sparsity,
    )
    return Case(
        config=config,
        kv_rows=rows + source.whole(0, 4 * MOST_TOKENS) if rule.caches else 0,
        rule=rule,
        exact_steps=source.one_of((False, True)),
        arrivals=tuple(sorted(arrivals, key=lambda arrival: arrival[0])),
    )


def _open_ended(source: Source, subject: Scheduling) -> Case:
    """Like ``_cases``, but some requests commit as many tokens as a model is sure of, or end early."""
    case = _cases(source, subject)
    threshold, stops = source.one_of((None, 0.5)), source.one_of((False, True))
    arrivals = []
    for step, request in case.arrivals:
        changes = source.one_of((False, True))
        stop = stops and request.generation.num_blocks > 1
        generation = replace(request.generation, threshold=threshold, stop_at_eos=stop)
        arrivals.append((step, replace(request, generation=generation) if changes else request))
    return replace(case, arrivals=tuple(arrivals), salt=source.whole(0, 99))


def _interrupted(source: Source, subject: Scheduling) -> Case:
    case = _open_ended(source, subject)
    chosen = [source.one_of(case.arrivals) for _ in range(source.whole(0, 4))]
    cancels = {request.request_id: step + source.whole(0, 8) for step, request in chosen}
    return replace(case, cancels=cancels, fails=frozenset(source.whole(0, 30) for _ in range(source.whole(0, 2))))


def _besieged(source: Source, subject: Scheduling) -> Case:
    """One request after a few others, and then a stream of equal requests that keep every slot taken."""
    slots = source.whole(1, 3)
    residents = [(0, _request(source, index, is_crowded=False)) for index in range(source.whole(1, slots + 1))]
    victim, template = (_request(source, 0, is_crowded=source.one_of((False, True))) for _ in range(2))
    arrivals = [*residents, (source.whole(0, 3), replace(victim, request_id=len(residents)))]
    gap = source.whole(1, 3)
    for index in range(60):
        arrivals.append((4 + gap * index, replace(template, request_id=len(arrivals))))
    return _case(source, arrivals, slots=slots, spare=source.whole(0, MOST_TOKENS))


def _cut(source: Source, subject: Scheduling) -> tuple[Case, int]:
    return _cases(source, subject), source.whole(1, 20)


def _otherwise(source: Source, subject: Scheduling) -> tuple[Case, dict[int, int]]:
    case = _cases(source, subject)
    num, factor = len(case.arrivals), source.one_of((1, 37, 1008))
    # Ids are taken modulo a prime: a factor of 1,008 reverses the order.
    return case, {index: (factor * (index + 1)) % 1009 for index in range(num)}


# ---- properties ----------------------------------------------------------------------------------------------


def _conservation(subject: Scheduling, case: Case) -> None:
    """Check that every request ends and all K/V rows are free. The ledger checks what an end requires."""
    done = run(subject.make, case, Late(case))
    _check_ended(done)
    if done.rows_used:
        raise AssertionError(f"{done.rows_used} K/V rows are taken when all requests have gone")


def _check_ended(done: Run) -> None:
    for request_id, step in done.came.items():
        if request_id not in done.ended and request_id not in done.gone:
            raise AssertionError(
                f"request {request_id}, which came in step {step}, is not finished when all is over after {len(done.plans)} steps"
            )


def _cap(subject: Scheduling, case: Case) -> None:
    limit = case.config.max_num_batched_tokens
    for index, plan in enumerate(run(subject.make, case, Late(case)).plans):
        if plan is None:
            continue
        computed = sum(item.query_tokens for item in plan.items)
        if computed > limit or plan.scheduled_tokens > limit:
            verb = "computes" if computed > limit else "is charged"
            num = max(computed, plan.scheduled_tokens)
            raise AssertionError(f"step {index} {verb} {num} query tokens, max_num_batched_tokens={limit}")


def _causality(subject: Scheduling, case_and_step: tuple[Case, int]) -> None:
    """Runs the whole case first. If the scheduler kept state elsewhere, the second run would then know its future."""
    case, step = case_and_step
    prefix = replace(case, arrivals=tuple(arrival for arrival in case.arrivals if arrival[0] < step))
    if not prefix.arrivals:
        return
    whole = run(subject.make, case, charged(case)).plans[:step]
    cut = run(subject.make, prefix, charged(prefix)).plans[:step]
    # A run that has ended runs nothing.
    cut += [None] * (len(whole) - len(cut))
    _check_alike(whole, cut, f"nothing comes from step {step} on")


def _same_everywhere(subject: Scheduling, case: Case) -> None:
    ids = {request.request_id: request.request_id for _, request in case.arrivals}
    simulated = run(subject.make, case, charged(case)).plans
    executed = run(subject.make, with_ids(case), Late(case)).plans
    _check_alike(renamed(simulated, ids), renamed(executed, ids), "prompts have ids and a device runs the steps")


def _same_names(subject: Scheduling, case_and_ids: tuple[Case, dict[int, int]]) -> None:
    case, ids = case_and_ids
    old_plans = run(subject.make, case, charged(case)).plans
    other_case = named_otherwise(case, ids)
    new_plans = run(subject.make, other_case, charged(other_case)).plans
    text = ", ".join(f"{old} is {new}" for old, new in ids.items())
    old_ids = {new: old for old, new in ids.items()}
    _check_alike(renamed(old_plans, {old: old for old in ids}), renamed(new_plans, old_ids), f"ids are others ({text})")


def _check_alike(plans: Sequence[StepPlan | None], others: Sequence[StepPlan | None], where: str) -> None:
    def said(index: int, plan: StepPlan | None, other: StepPlan | None) -> str | None:
        return None if plan == other else f"step {index} runs {_said(plan)}, and {_said(other)}"

    check_alike(plans, others, where, said=said, count="steps are planned")


def _said(plan: StepPlan | None) -> str:
    if plan is None:
        return "nothing"
    items = ", ".join(f"{item.request_id} ({item.phase.value}, {item.query_tokens} tokens)" for item in plan.items)
    return f"requests {items}"


def _no_starvation(subject: Scheduling, case: Case) -> None:
    done = run(subject.make, case, charged(case))
    requests = {request.request_id: request for _, request in case.arrivals}
    _check_ended(done)
    works: dict[Request, int] = {}
    stays = []
    for request_id, came in done.came.items():
        key = replace(requests[request_id], request_id=0)
        if key not in works:
            works[key] = case.work(key)
        stays.append(Stay(request_id, came, done.ended[request_id] + 1, works[key]))
    check_waits(stays, step=1, bound=bound_of(done.scheduler, subject.longest_wait), unit="steps")


SCHEDULER: Kind[Scheduling] = Kind(
    name="scheduler",
    properties=(
        Property(name="conservation", draw=_open_ended, check=_conservation),
        Property(name="cap", draw=_open_ended, check=_cap),
        Property(name="cancellation", draw=_interrupted, check=_conservation),
        Property(name="causality", draw=_cut, check=_causality),
        no_starvation(_besieged, _no_starvation),
        Property(name="independence of executors", draw=_cases, check=_same_everywhere),
        Property(name="independence of ids", draw=_otherwise, check=_same_names),
    ),
)


# -- refresh rules ----------------------------------------------------------------------------------------

_SPARSITY = SparsityConfig()


class Refreshing(PlugIn):
    """The rule that ``make`` is, or returns. All requests of a run share it."""

    title = "refresh rule"
    methods = ("phase",)
    told = "without arguments"

    def first(self) -> RefreshRule:
        return self.rule()

    def rule(self) -> RefreshRule:
        rule: RefreshRule = made(self.make)
        return rule

    @property
    def lacks_data(self) -> str | None:
        needs = getattr(self.one, "needs", None)
        return f"it needs {', '.join(sorted(needs))}, which a model gives" if needs else None


def _requests(source: Source, subject: Refreshing) -> tuple[tuple[int, Request], ...]:
    """A few requests that begin at different steps, some perhaps of equal length."""
    arrivals = []
    for index in range(source.whole(2, 6)):
        length = source.whole(1, 24)
        block = source.whole(1, length)
        steps = source.whole(-(-length // block), length + 4)
        generation = GenerationConfig(gen_length=length, block_length=block, steps=steps)
        request = Request(request_id=index, prompt_len=source.whole(1, 40), generation=generation)
        arrivals.append((source.whole(0, 10), request))
    return tuple(sorted(arrivals, key=lambda arrival: arrival[0]))


def _phases(rule: RefreshRule, arrivals: Sequence[tuple[int, Request]]) -> dict[int, list[Phase]]:
    """The phases of each request's steps, if all requests that have begun run in every step and share the rule."""
    phases: dict[int, list[Phase]] = {request.request_id: [] for _, request in arrivals}
    pending, live, step = [*arrivals], list[Live](), 0
    while pending or live:
        while pending and pending[0][0] <= step:
            live.append(Live(pending.pop(0)[1], rule, EngineConfig()))
        for sequence in live:
            phases[sequence.request.request_id].append(sequence.phase)
            sequence.advance(sequence.quota)
        live = [sequence for sequence in live if not sequence.is_finished]
        step += 1
    return phases


def _independence(subject: Refreshing, arrivals: Sequence[tuple[int, Request]]) -> None:
    together = _phases(subject.rule(), arrivals)
    for _, request in arrivals:
        which = request.request_id
        alone = _phases(subject.rule(), [(0, request)])[which]
        for step, (phase, other) in enumerate(zip(alone, together[which], strict=True)):
            if phase is not other:
                raise AssertionError(
                    f"step {step} of request {which} is {_phase_said(phase)} alone and {_phase_said(other)} beside {len(arrivals) - 1} others"
                )


def _phase_said(phase: Any) -> str:
    return phase.value if isinstance(phase, Phase) else repr(phase)


def _due(subject: Refreshing, arrivals: Sequence[tuple[int, Request]]) -> None:
    """Check that every plan has the phases of the rule, and that a cache is built before it is reused."""
    rule = subject.rule()
    requests = [request for _, request in arrivals]
    check_rule(rule, max(request.generation.steps for request in requests))
    rows = max(cache_rows(request.total_len, request.generation, _SPARSITY, rule.window) for request in requests)
    config = EngineConfig(max_num_batched_tokens=200, max_num_seqs=4, max_model_len=200)
    case = Case(config=config, kv_rows=3 * rows, rule=rule, exact_steps=False, arrivals=tuple(arrivals))
    expected = subject.rule()
    for index, plan in enumerate(run(PhaseScheduler, case, charged(case)).plans):
        for item in plan.items if plan is not None else ():
            due = expected.phase(item.step_in_block)
            if item.phase is not due:
                raise AssertionError(
                    f"step {index} runs step {item.step_in_block} of a block of request {item.request_id} as "
                    f"{_phase_said(item.phase)}, where {_phase_said(due)} is due"
                )


REFRESH_RULE: Kind[Refreshing] = Kind(
    name="refresh-rule",
    properties=(
        Property(
            name="independence of the batch",
            draw=_requests,
            check=_independence,
            without=lambda subject: subject.lacks_data,
        ),
        Property(name="due refreshes", draw=_requests, check=_due, without=lambda subject: subject.lacks_data),
    ),
)
