"""Answers to a capacity question, for all sites and sizes.

We find a site's answers one after the other, small sizes first, because each search begins where the last answer suggests. Sites are
searched in parallel, by processes that share nothing, so no answer depends on how many processes there are.

The search (``repro.runs.tuning.best_choices``) races the plans that bounds leave, at rates of a lattice, (1 + resolution) to whole powers.
Then it races plans that differ from the best in one choice. A choice that cost a plan ``GAP``, or changed nothing, is not tried again
with plans that are alike (``Plan.has_share_of``).

Simulations tell whether a plan serves a rate. They use the same sessions, in the same pattern of arrivals, at every rate and for every
plan. We assume that serving is monotone in the rate: a plan that fails one step above the best so far cannot be better. To see that takes
one simulation of one seed in most cases, and we search only plans that pass. How far a run is from its limits tells where to look next.
That is exact for the load, and the answer does not depend on it. We simulate the end of each bracket with all seeds.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from engines.errors import RunError
from engines.machine import delay_signals, usable_cores
from repro.capacity.objectives import LOAD, Sample, Verdict, is_lost, verdict_of
from repro.capacity.question import Question, Sizes
from repro.capacity.sites import LASTING, Plan, Site
from repro.runs.pool import LOST, worker_processes
from repro.runs.provenance import why_unshareable
from repro.runs.tuning import BEAM, Choices, best_choices

P = TypeVar("P")
LEAST_RATE, MOST_RATE = 1e-4, 1e6
"""The lowest and the highest rate that we look at, in requests/s."""
HOPELESS = 0.01
"""Share of a search's first rate at which it ends: hardly anything waits there, so a plan that does not serve it serves nothing."""
NEAR = 4
"""When the stride of a search downwards reaches this many steps, it asks first whether the lowest rate is served at all."""
FEW_GPUS = 16
"""With more GPUs than this we search only around the best plan, because simulations of many GPUs are slow."""
ALONE = 2
"""How many axes without a default we search jointly, before the others: deployments and their steps."""
GAP = 1.2
"""If a choice makes plans serve this many times less, we do not try it with other choices again. We tell the rate of the next best plan
only down to this factor below the best."""
LATENCY = 6
"""Beyond its limit, a latency rises about this many times as fast as the rate."""
GUARD = 0.8
"""Share of the rate found that a plan must serve too; if it does not, we report it as not monotone."""


@dataclass(frozen=True, kw_only=True)
class Lattice:
    """A lattice of rates: with ``resolution`` 0.05, each rate is 1.05 times the one before."""

    resolution: float

    def rate(self, step: int) -> float:
        """Return the rate of a step, rounded to four digits so that what we print is what was simulated."""
        return float(f"{(1 + self.resolution) ** step:.4g}")

    def step(self, rate: float) -> int:
        return round(math.log(min(max(rate, LEAST_RATE), MOST_RATE)) / math.log1p(self.resolution))

    def last(self, most: float) -> int:
        step = self.step(most)
        while self.rate(step) > most:
            step -= 1
        return step

    def steps(self, ratio: float) -> float:
        """About how many steps lie between two rates whose ratio is ``ratio``."""
        if ratio == 0:
            return -math.inf
        return math.log(ratio) / math.log1p(self.resolution)

    def ends(self, start: float) -> tuple[int, int]:
        """The first and last step of a search that begins near this rate."""
        return self.step(max(HOPELESS * start, LEAST_RATE)), self.step(MOST_RATE)


Margin = Callable[[P, int, bool], float]
"""About how many steps higher a plan still serves; negative if it does not serve this step. True asks all seeds, False the first."""


class LeastPlan(NamedTuple, Generic[P]):
    plan: P
    step: int
    """The plan serves the rate of this step, and not that of the next."""
    is_monotone: bool


def climb(margin: Callable[[int], float], start: int, ends: tuple[int, int]) -> int | None:
    """Return the step near ``start`` that is served while the next is not. First we step as far as margins tell, at strides that double.
    Once a served and an unserved step are known, we search between them. Returns the last of ``ends`` if it is served, and None if the
    first is not, which we ask once strides down reach ``NEAR``."""
    lowest, highest = ends
    low, high = lowest - 1, highest + 1
    margins: dict[int, float] = {}
    step, num_moves = min(max(start, lowest), highest), 0
    while high - low > 1:
        width = high - low if low in margins and high in margins else math.inf
        margins[step] = value = margin(step)
        low, high = (step, high) if value >= 0 else (low, step)
        if low in margins and high in margins:
            step = (low + high) // 2 if 2 * (high - low) > width else _crossing(low, high, margins)
        else:
            stride = 2 ** max(0, num_moves - 1)
            num_moves += 1
            # Stay within the ends: margins may be infinite.
            jump = math.floor(min(max(value, lowest - highest), highest - lowest))
            if value >= 0:
                step += max(stride, jump)
            else:
                step = lowest if stride >= NEAR else step + min(-stride, jump)
        step = min(max(step, low + 1), high - 1)
    return None if low < lowest else low


def _crossing(low: int, high: int, margins: Mapping[int, float]) -> int:
    """Estimate the last step that is served, with margins on a line between the two steps."""
    low_margin, high_margin = margins[low], margins[high]
    if not math.isfinite(low_margin - high_margin):
        return (low + high) // 2
    return low + math.floor((high - low) * low_margin / (low_margin - high_margin))


Race = Callable[[Sequence[P], tuple[P, int] | None], tuple[P, int] | None]
"""Returns which of some plans, or the best so far, serves most, with the step that it serves."""


def largest(
    search: Callable[[Race[P]], tuple[P, int] | None],
    max_rate: Callable[[P], float],
    margin: Margin[P],
    lattice: Lattice,
    start: float,
    is_behind: Callable[[P, P], bool] = lambda plan, best: False,
) -> LeastPlan[P] | None:
    """Return the plan that serves the largest rate, of those that ``search`` asks a race of; the first one wins ties. ``max_rate`` bounds
    the rate of any run of a plan, and ``start`` is the first rate tried. A plan that ``is_behind`` the best so far is not simulated. None
    if no plan serves any rate."""
    (lowest, highest), first_step = lattice.ends(start), lattice.step(start)
    lasts: dict[P, int] = {}

    def first_seed_margin(plan: P, step: int) -> float:
        return margin(plan, step, False)

    def all_seeds_margin(plan: P, step: int) -> float:
        return margin(plan, step, True)

    def race(candidates: Sequence[P], best: tuple[P, int] | None) -> tuple[P, int] | None:
        # Rates above a plan's own bound need no simulation.
        bounds = {plan: min(highest, lattice.last(max_rate(plan))) for plan in candidates}
        bounds = {plan: last for plan, last in bounds.items() if last >= lowest}
        lasts.update(bounds)
        return _race_plans(bounds, first_step, lowest, best, first_seed_margin, is_behind)

    best = search(race)
    if best is not None:
        # With all seeds the step may be lower or higher, whatever margins say, and a plan that lost with one seed may win.
        plan, near_step = best
        step = climb(lambda at: min(max(all_seeds_margin(plan, at), -1.0), 1.0), near_step, (lowest, lasts[plan]))
        best = None if step is None else (plan, step)
    best = _race_plans(lasts, first_step, lowest, best, all_seeds_margin, is_behind)
    if best is None:
        return None
    plan, step = best
    lower_step = lattice.step(GUARD * lattice.rate(step))
    return LeastPlan(plan, step, lower_step < lowest or first_seed_margin(plan, lower_step) >= 0)


def _race_plans(
    lasts: Mapping[P, int],
    start: int,
    lowest: int,
    best: tuple[P, int] | None,
    margin: Callable[[P, int], float],
    is_behind: Callable[[P, P], bool],
) -> tuple[P, int] | None:
    """Return the best so far, or a plan that serves a step more, or one that comes earlier and serves as much. ``lasts`` holds the last
    step that each plan may serve."""
    leader = None if best is None else best[0]
    is_before, is_hopeless = leader in lasts, False
    for plan, last in lasts.items():
        if plan is leader:
            is_before = False
            continue
        target = start if best is None else best[1] + (0 if is_before else 1)
        if best is not None and (target > last or is_behind(plan, best[0]) or margin(plan, target) < 0):
            continue
        if is_hopeless and best is None and margin(plan, lowest) < 0:
            continue
        step = climb(partial(margin, plan), target, (lowest, last))
        is_hopeless = step is None
        if step is not None:
            best, is_before = (plan, step), False
    return best


def fewest(sizes: Sequence[int], serving: Callable[[int], P | None]) -> tuple[int, P] | None:
    """Return the smallest of ``sizes`` (rising) that something serves, and what. We bisect first among powers of two, whose workers can
    be largest, then among the sizes below. We assume that sizes below a failing one fail too. None if the largest has nothing."""
    plans: dict[int, P | None] = {}

    def is_served(size: int) -> bool:
        if size not in plans:
            plans[size] = serving(size)
        return plans[size] is not None

    if not sizes or not is_served(sizes[-1]):
        return None
    powers = [size for size in sizes if size & (size - 1) == 0]
    index = bisect_left(powers, True, key=is_served)
    low, high = powers[index - 1] if index else 0, powers[index] if index < len(powers) else sizes[-1]
    between = [size for size in sizes if low < size <= high]
    size = between[bisect_left(between[:-1], True, key=is_served)]
    plan = plans[size]
    assert plan is not None
    return size, plan


FEW_SESSIONS = 1000
"""With fewer sessions than this, over all seeds and sizes, another process costs more than it saves."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    site: Site
    gpus: int
    plan: Plan | None
    """None if no plan serves any rate, or none serves the rate asked for."""
    rate: float | None
    at: Verdict | None
    """The verdict at the rate."""
    binds: str | None
    """The objective, or the load, that is beyond its limit one step above, or at the lowest rate if none is served. For a given rate, it
    is the one nearest to its limit."""
    is_monotone: bool = True
    next_best: tuple[Plan, float] | None = None
    """The likeliest other plan that was simulated, and the rate that it serves. None if a rate was asked for."""
    num_plans: int
    num_simulated: int
    num_runs: int


@dataclass(frozen=True, kw_only=True)
class Trials:
    site: Site
    _made: dict[tuple[Plan, float, int], Sample] = field(default_factory=dict)
    _lost: dict[Plan, float] = field(default_factory=dict)
    """By plan, a rate that the first seed alone shows to be too high."""
    about: dict[Plan, float] = field(default_factory=dict)
    """By plan, about the step that it serves, estimated from its runs."""

    def sample(self, plan: Plan, rate: float, seed: int) -> Sample:
        key = plan, rate, seed
        if key not in self._made:
            self._made[key] = self.site.run(plan, rate, seed)
        return self._made[key]

    def judge(self, plan: Plan, rate: float, is_whole: bool) -> Verdict:
        """Judge a rate by all seeds, or by the first alone. We run no more seeds than needed to see that the rate is not served."""
        num_seeds = self.site.num_seeds if is_whole else 1
        samples: list[Sample] = []
        for seed in range(num_seeds):
            samples.append(self.sample(plan, rate, seed))
            if is_lost(samples, self.site.objectives, num_seeds):
                break
        return verdict_of(samples, self.site.objectives)

    def margin(self, plan: Plan, step: int, is_whole: bool, lattice: Lattice) -> float:
        rate = lattice.rate(step)
        if rate >= self._lost.get(plan, math.inf):
            return -1.0
        verdict = self.judge(plan, rate, is_whole)
        margin = -lattice.steps(verdict.worst)
        if verdict.serves:
            self.about[plan] = max(step, self.about.get(plan, -math.inf))
        else:
            # The load rises in proportion to the rate.
            self.about[plan] = step - max(lattice.steps(verdict.ratios[LOAD]), -margin / LATENCY)
        if not verdict.serves and is_lost([self.sample(plan, rate, 0)], self.site.objectives, 1.5):
            self._lost[plan] = rate
        return margin

    def is_behind(self, plan: Plan, best: Plan, lattice: Lattice) -> bool:
        """Whether a plan differs from the best by a choice that cost others ``GAP`` wherever it was tried, or changed no number. Trials
        on plans that serve much less than the best do not count."""
        steps = {tried.choices: step for tried, step in self.about.items()}
        if plan.choices in steps:
            return False
        gap = lattice.steps(GAP)
        lowest = steps[best.choices] - gap
        for index, (own, usual) in enumerate(zip(plan.choices, best.choices, strict=True)):
            costs = []
            for tried, step in self.about.items():
                instead = steps.get((*tried.choices[:index], usual, *tried.choices[index + 1 :]), -math.inf)
                if own == usual or tried.choices[index] != own or max(step, instead) < lowest or instead == -math.inf:
                    continue
                # No effect on one worker may be a large one on several; the same holds for mostly prefill and mostly decode.
                comparable = tried.choices[0] == plan.choices[0] or (instead != step and tried.has_share_of(plan))
                if comparable if index else tried.is_mixed == plan.is_mixed:
                    costs.append(instead - step)
            if costs and (min(costs) > gap or min(costs) == max(costs) == 0):
                return True
        return False

    def likeliest(self) -> list[Plan]:
        """Simulated plans, the one with the highest estimated step first."""
        return sorted(self.about, key=lambda plan: -self.about[plan])

    def verdict(self, plan: Plan, rate: float) -> Verdict:
        """Judge a rate by the seeds that were run. We run the first seed if none was."""
        self.sample(plan, rate, 0)
        keys = [(plan, rate, seed) for seed in range(self.site.num_seeds)]
        return verdict_of([self._made[key] for key in keys if key in self._made], self.site.objectives)

    @property
    def plans(self) -> list[Plan]:
        """Plans that were simulated."""
        return [*dict.fromkeys(plan for plan, _, _ in self._made)]

    @property
    def num_runs(self) -> int:
        return len(self._made)

    def answer(self, gpus: int, num_plans: int, plan: Plan | None, **fields: Any) -> Answer:
        return Answer(
            site=self.site,
            gpus=gpus,
            plan=plan,
            num_plans=num_plans,
            num_simulated=len(self.plans),
            num_runs=self.num_runs,
            **fields,
        )


def largest_rate(site: Site, gpus: int, lattice: Lattice, start: float | None = None) -> Answer:
    """Find the largest rate; ``start`` is about that rate, if another answer tells."""
    trials, ranked = Trials(site=site), site.ranked(gpus, None)
    first_rate = start or ranked.start
    lowest, highest = lattice.ends(first_rate)

    def search(race: Race[Plan]) -> tuple[Plan, int] | None:
        return best_choices(
            ranked.space,
            site.is_possible,
            lambda some, best: race([*map(site.plan_of, some)], best),
            lambda: [plan.choices for plan in trials.likeliest()],
            BEAM if gpus <= FEW_GPUS else 1,
            ALONE,
        )

    winner = largest(
        search,
        lambda plan: plan.most,
        partial(trials.margin, lattice=lattice),
        lattice,
        first_rate,
        partial(trials.is_behind, lattice=lattice),
    )
    if winner is None:
        verdict = trials.verdict(site.plan_of(ranked.space.first), lattice.rate(lowest))
        return trials.answer(gpus, ranked.num, None, rate=None, at=None, binds=verdict.binds)
    plan, is_monotone = winner.plan, winner.is_monotone
    rate, next_rate = lattice.rate(winner.step), lattice.rate(winner.step + 1)
    runners_up = [each for each in trials.likeliest() if each != plan]
    next_best = None
    if runners_up:
        margin = partial(trials.margin, runners_up[0], is_whole=True, lattice=lattice)
        lowest_step = max(lowest, math.ceil(winner.step - lattice.steps(GAP)))
        step = climb(margin, math.floor(max(trials.about[runners_up[0]], lowest_step)), (lowest_step, winner.step))
        next_best = None if step is None else (runners_up[0], lattice.rate(step))
        pair = plan, runners_up[0]
        shares = [trials.verdict(each, rate).session_attainment for each in pair] if step == winner.step else [0.0, 0.0]
        if shares[1] > shares[0]:
            plan, next_best = runners_up[0], (plan, rate)
            is_monotone = trials.judge(plan, max(GUARD * rate, lattice.rate(lowest)), False).serves
    binds = None
    if winner.step < highest:
        binds = LOAD if next_rate > plan.most else trials.verdict(plan, next_rate).binds
    verdict = trials.verdict(plan, rate)
    return trials.answer(
        gpus, ranked.num, plan, rate=rate, at=verdict, binds=binds, is_monotone=is_monotone, next_best=next_best
    )


def fewest_gpus(site: Site, sizes: Sequence[int], rate: float) -> Answer:
    trials = Trials(site=site)
    num_plans: dict[int, int] = {}

    def worst(plan: Plan) -> float:
        return trials.judge(plan, rate, True).worst

    def race(candidates: Sequence[Choices], best: Plan | None) -> Plan | None:
        for plan in map(site.plan_of, candidates):
            if best is not None and worst(best) <= 1:
                break
            if plan.most >= rate and (best is None or worst(plan) < worst(best)):
                best = plan
        return best

    def likely(gpus: int) -> list[Choices]:
        plans = [plan for plan in trials.plans if plan.gpus == gpus]
        return [plan.choices for plan in sorted(plans, key=worst)]

    def serving(gpus: int) -> Plan | None:
        ranked = site.ranked(gpus, rate)
        num_plans[gpus] = ranked.num
        if not ranked.space.num:
            return None
        best = best_choices(ranked.space, site.is_possible, race, lambda: likely(gpus))
        return best if best is not None and worst(best) <= 1 else None

    gpus, plan = fewest(sizes, serving) or (sizes[-1], None)
    at = None if plan is None else trials.verdict(plan, rate)
    return trials.answer(gpus, sum(num_plans.values()), plan, rate=rate, at=at, binds=None if at is None else at.binds)


@dataclass(frozen=True, kw_only=True)
class Search:
    question: Question
    sizes: Sizes
    rate: float | None
    """The rate for which to find the fewest GPUs; None finds the largest rate of each size."""
    resolution: float

    def answers(
        self, sites: Sequence[Site], advance: Callable[[], object], num_processes: int | None = None
    ) -> list[Answer]:
        """Return the answers, best first. ``advance`` is called for each. With ``num_processes`` None, we choose by the machine and the
        work. Raises the error of the first site that has one."""
        sizes = [self._sizes(site) for site in sites]
        workers = num_processes or min(usable_cores(), len(sites))
        num_prompts, num_seeds = self.question.num_prompts, self.question.num_seeds
        is_little = num_prompts is not None and num_prompts * num_seeds * sum(map(len, sizes)) < FEW_SESSIONS
        is_here = any(why_unshareable(site.cell, is_remote=False) is not None for site in sites)
        if num_processes is None and (is_little or is_here):
            workers = 1
        answers: list[Answer] = []
        if workers == 1:
            for site, site_sizes in zip(sites, sizes, strict=True):
                answers += self._answers_of(site, site_sizes, advance)
        else:
            try:
                with worker_processes(workers) as pool:
                    with delay_signals():  # the first submissions start the processes
                        futures = [pool.submit(self._answers_of, *pair) for pair in zip(sites, sizes, strict=True)]
                    for future in futures:
                        site_answers = future.result()
                        answers += site_answers
                        for _ in site_answers:
                            advance()
            except BrokenProcessPool as error:
                raise RunError(LOST) from error
        if self.rate is None:
            return sorted(answers, key=lambda each: (-(each.rate or 0.0), each.gpus))
        return sorted(answers, key=lambda each: (each.plan is None, each.gpus, -each.at.attainment if each.at else 0.0))

    def _answers_of(
        self, site: Site, sizes: Sequence[tuple[int, ...]], advance: Callable[[], object] = lambda: None
    ) -> list[Answer]:
        answers: list[Answer] = []
        for gpus in sizes:
            last = answers[-1] if answers else None
            start = last.rate * gpus[-1] / last.gpus if last is not None and last.rate else None
            answers.append(self._answer(site, gpus, start))
            advance()
        return answers

    def _sizes(self, site: Site) -> list[tuple[int, ...]]:
        """For each answer, the numbers of GPUs that it may have."""
        return [self.sizes.fitting(site)] if self.rate is not None else [(gpus,) for gpus in self.sizes.halved(site)]

    def _answer(self, site: Site, gpus: Sequence[int], start: float | None) -> Answer:
        """Answer for one size, or find the fewest of several. ``start`` is about the rate, if another answer tells. If arrivals were a
        burst, we search again with the most requests of a run, unless their number was given."""
        num_prompts, rate = self.question.num_prompts, self.rate
        sized_site = site.sized_for(gpus[-1], start if rate is None else rate, num_prompts)
        answer = self._answer_of_sized(sized_site, gpus, start)
        if num_prompts is not None or answer.at is None or answer.at.stays >= LASTING:
            return answer
        largest_run = site.sized_for(gpus[-1], rate, site.most_prompts)
        return answer if largest_run == sized_site else self._answer_of_sized(largest_run, gpus, start)

    def _answer_of_sized(self, site: Site, gpus: Sequence[int], start: float | None) -> Answer:
        if self.rate is not None:
            return fewest_gpus(site, gpus, self.rate)
        return largest_rate(site, gpus[-1], Lattice(resolution=self.resolution), start)
