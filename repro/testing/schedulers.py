"""What a scheduler of diffusion LLMs is held to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from engines.data import asked
from engines.dllm.config import DelayedCache, EngineConfig, GenerationConfig, NoCache, RefreshRule, SparsityConfig
from engines.dllm.plan import Request, StepPlan
from engines.dllm.scheduling import KvPool, Scheduler
from engines.dllm.sequence import cache_rows
from engines.dllm.simulated import check_simulated
from engines.errors import RunError, UserError
from repro.testing.examples import Source
from repro.testing.properties import Bound, Kind, Property, Stay, bound_of, check_alike, check_waits, no_starvation
from repro.testing.scheduler_runs import Case, Late, Run, charged, named_otherwise, renamed, run, with_ids

MOST_TOKENS = 60
"""The most that a prompt has with its answer."""


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """The scheduler that ``make(config, pool, rule, exact_steps=...)`` gives."""

    make: Any
    longest_wait: Bound | None = None

    def __post_init__(self) -> None:
        check_simulated("scheduler", type(self._one), keeps_state=True)

    @cached_property
    def _one(self) -> Scheduler:
        try:
            found = asked(self.make, EngineConfig(), KvPool(1), DelayedCache(), exact_steps=False)
        except RunError as error:
            raise UserError(f"no scheduler is made of config, pool, rule and exact_steps: {error}") from error
        if not isinstance(found, Scheduler):
            raise UserError(f"{found!r:.80} is no Scheduler: name a subclass, or what makes one")
        return found

    @cached_property
    def bound(self) -> Bound:
        return bound_of(self._one, self.longest_wait)


# ---- examples ------------------------------------------------------------------------------------------------


def _cases(source: Source, subject: Scheduling) -> Case:
    """A few requests of all kinds; half of them many small blocks, with slots for all, so that refreshes meet."""
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
    """Requests of which some commit as many tokens as a model is sure of, or end early."""
    case = _cases(source, subject)
    threshold, stops = source.one_of((None, 0.5)), source.one_of((False, True))
    arrivals = []
    for step, request in case.arrivals:
        is_some = source.one_of((False, True))
        stop = stops and request.generation.num_blocks > 1
        generation = replace(request.generation, threshold=threshold, stop_at_eos=stop)
        arrivals.append((step, replace(request, generation=generation) if is_some else request))
    return replace(case, arrivals=tuple(arrivals), salt=source.whole(0, 99))


def _interrupted(source: Source, subject: Scheduling) -> Case:
    case = _open_ended(source, subject)
    chosen = [source.one_of(case.arrivals) for _ in range(source.whole(0, 4))]
    cancels = {request.request_id: step + source.whole(0, 8) for step, request in chosen}
    return replace(case, cancels=cancels, fails=frozenset(source.whole(0, 30) for _ in range(source.whole(0, 2))))


def _besieged(source: Source, subject: Scheduling) -> Case:
    """One request behind a few, and a stream of others, all alike, that come later and keep every place taken."""
    slots = source.whole(1, 3)
    residents = [(0, _request(source, index, is_crowded=False)) for index in range(source.whole(1, slots + 1))]
    victim, like = (_request(source, 0, is_crowded=source.one_of((False, True))) for _ in range(2))
    arrivals = [*residents, (source.whole(0, 3), replace(victim, request_id=len(residents)))]
    gap = source.whole(1, 3)
    for index in range(60):
        arrivals.append((4 + gap * index, replace(like, request_id=len(arrivals))))
    return _case(source, arrivals, slots=slots, spare=source.whole(0, MOST_TOKENS))


def _cut(source: Source, subject: Scheduling) -> tuple[Case, int]:
    return _cases(source, subject), source.whole(1, 20)


def _otherwise(source: Source, subject: Scheduling) -> tuple[Case, dict[int, int]]:
    case = _cases(source, subject)
    num, factor = len(case.arrivals), source.one_of((1, 37, 1008))
    # Modulo a prime: 1,008 turns the order round.
    return case, {index: (factor * (index + 1)) % 1009 for index in range(num)}


# ---- properties ----------------------------------------------------------------------------------------------


def _conservation(subject: Scheduling, case: Case) -> None:
    """What an end takes is the ledger's to say."""
    done = run(subject.make, case, Late(case))
    _check_ended(done)
    if done.rows_used:
        raise AssertionError(f"{done.rows_used} K/V rows are taken when all requests have gone")


def _check_ended(done: Run) -> None:
    for which, step in done.came.items():
        if which not in done.ended and which not in done.gone:
            raise AssertionError(
                f"request {which}, which came in step {step}, is not finished when all is over after {len(done.plans)} steps"
            )


def _cap(subject: Scheduling, case: Case) -> None:
    most = case.config.max_num_batched_tokens
    for index, plan in enumerate(run(subject.make, case, Late(case)).plans):
        if plan is None:
            continue
        computed = sum(item.query_tokens for item in plan.items)
        if computed > most or plan.scheduled_tokens > most:
            what = "computes" if computed > most else "is charged"
            num = max(computed, plan.scheduled_tokens)
            raise AssertionError(f"step {index} {what} {num} query tokens, max_num_batched_tokens={most}")


def _causality(subject: Scheduling, case_and_step: tuple[Case, int]) -> None:
    """All of it runs first: what the scheduler keeps of it elsewhere would be the future of the second run."""
    case, step = case_and_step
    known = replace(case, arrivals=tuple(arrival for arrival in case.arrivals if arrival[0] < step))
    if not known.arrivals:
        return
    whole = run(subject.make, case, charged(case)).plans[:step]
    cut = run(subject.make, known, charged(known)).plans[:step]
    # Where all is over nothing runs.
    cut += [None] * (len(whole) - len(cut))
    _check_alike(whole, cut, f"nothing comes from step {step} on")


def _same_everywhere(subject: Scheduling, case: Case) -> None:
    ids = {request.request_id: request.request_id for _, request in case.arrivals}
    simulated = run(subject.make, case, charged(case)).plans
    real = run(subject.make, with_ids(case), Late(case)).plans
    _check_alike(renamed(simulated, ids), renamed(real, ids), "prompts have ids and a device runs the steps")


def _same_names(subject: Scheduling, case_and_ids: tuple[Case, dict[int, int]]) -> None:
    case, ids = case_and_ids
    before = run(subject.make, case, charged(case)).plans
    other = named_otherwise(case, ids)
    after = run(subject.make, other, charged(other)).plans
    said = ", ".join(f"{old} is {new}" for old, new in ids.items())
    back = {new: old for old, new in ids.items()}
    _check_alike(renamed(before, {old: old for old in ids}), renamed(after, back), f"ids are others ({said})")


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
    of = {request.request_id: request for _, request in case.arrivals}
    _check_ended(done)
    works: dict[Request, int] = {}
    stays = []
    for which, came in done.came.items():
        alike = replace(of[which], request_id=0)
        if alike not in works:
            works[alike] = case.work(alike)
        stays.append(Stay(which, came, done.ended[which] + 1, works[alike]))
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
