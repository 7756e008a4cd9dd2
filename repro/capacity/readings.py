"""Readings of a capacity: the choice that decides it, the GPUs for each hour of a file, the effect of one knob, and the differences
between seeds. Also an estimate of how long a search takes."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from engines.machine import usable_cores
from repro.capacity.answers import ALONE, FEW_GPUS, Answer, Lattice, Search, Trials, climb, fewest
from repro.capacity.objectives import verdict_of
from repro.capacity.question import Question, parse_sizes
from repro.capacity.sites import SET_HERE, ClusterSite, Plan, Site
from repro.runs.cell import Scalar
from repro.runs.system import Setting
from repro.runs.tuning import BEAM, JOINT, Space

AS_ASKED = "as asked"


@dataclass(frozen=True, kw_only=True)
class Change:
    """Another value of a knob, or another platform; None leaves the knob out."""

    name: str
    value: Scalar | None

    def __str__(self) -> str:
        return f"without {self.name}" if self.value is None else f"{self.name}={self.value}"

    def applied_to(self, question: Question) -> Question:
        if self.name == "platform":
            return replace(question, platforms=[str(self.value)])
        knobs = {name: value for name, value in question.knobs.items() if name != self.name}
        return replace(question, knobs=knobs if self.value is None else knobs | {self.name: self.value})


def answers_with_changes(
    question: Question, answer: Answer, changes: Sequence[Change], resolution: float, advance: Callable[[], object]
) -> list[Answer]:
    """Return the largest rates of an answer's plan, as it is and with each change. All else stays equal, including the requests. If the
    plan does not fit with a change, we search for a new one."""
    site, plan = answer.site, answer.plan
    assert plan is not None
    sizes = parse_sizes(str(answer.gpus))
    base = replace(
        question,
        systems=[site.cell.system],
        platforms=[site.cell.platform],
        knobs={**searched_knobs(plan), **question.knobs},
        num_prompts=int(str(site.cell.knob_values["num_prompts"])),
    )
    sites = []
    for label, variant in ((AS_ASKED, base), *((str(change), change.applied_to(base)) for change in changes)):
        (changed,) = variant.sites(sizes)
        if isinstance(changed, ClusterSite) and replace(changed, held=plan.name).fits(answer.gpus):
            changed = replace(changed, held=plan.name)
        sites.append(replace(changed, label=label))
    answers = Search(question=base, sizes=sizes, rate=None, resolution=resolution).answers(sites, advance)
    return sorted(answers, key=lambda each: [site.label for site in sites].index(each.site.label))


class Choice(NamedTuple):
    chosen: Setting
    instead: Setting
    """() is the default."""
    rate: float
    """The rate that the plan serves with ``instead``, at most that with ``chosen``; 0 if it serves no rate."""


def choices_of(answer: Answer, other: Plan | None, resolution: float) -> tuple[list[Choice], int]:
    """Return what an answer's choices are worth, the costliest first, and how many runs this took. We replace each choice by its default
    (a deployment by the likeliest other one), and by ``other``'s. The first result is of all seeds, the others of one."""
    site, plan, best_rate = answer.site, answer.plan, answer.rate
    assert plan is not None
    assert best_rate is not None
    lattice, trials = Lattice(resolution=resolution), Trials(site=site)
    (lowest, _), last = lattice.ends(best_rate), lattice.last(best_rate)

    def rate_of(changed: Plan, start: int, is_whole: bool) -> float:
        step = climb(partial(trials.margin, changed, is_whole=is_whole, lattice=lattice), start, (lowest, last))
        return 0.0 if step is None else best_rate if step == last else lattice.rate(step)

    worth: dict[Plan, Choice] = {}
    for index, instead in _other_choices(site.ranked(answer.gpus, None).space, plan, other):
        choices = (*plan.choices[:index], instead, *plan.choices[index + 1 :])
        if site.is_possible(choices):
            changed = site.plan_of(choices)
            worth[changed] = Choice(plan.choices[index], instead, rate_of(changed, last, False))
    for changed in sorted(worth, key=lambda each: worth[each].rate)[:1]:
        near_step = lattice.step(max(worth[changed].rate, lattice.rate(lowest)))
        worth[changed] = worth[changed]._replace(rate=rate_of(changed, near_step, True))
    return sorted(worth.values(), key=lambda each: each.rate), trials.num_runs


def _other_choices(space: Space, plan: Plan, other: Plan | None) -> Iterator[tuple[int, Setting]]:
    """Yield other choices, each with its place among the plan's."""
    other_knobs = set(() if other is None else other.knobs)
    for index, (axis, chosen) in enumerate(zip(space.axes, plan.choices, strict=True)):
        options = [setting for setting in axis if setting != chosen]
        # The first other choice is the default; for deployments, it is the likeliest.
        if index == 0 or axis[0] != chosen:
            yield from ((index, setting) for setting in options[:1])
        yield from ((index, setting) for setting in options[1:] if setting and other_knobs.issuperset(setting))


ROUNDS, CLIMB, HOPELESS = 3, 12, 6
"""Races around the best, runs of one seed or of all to find a plan's rate, and runs of a plan that serves none. A search hardly exceeds
these."""
SHORT = 100
"""Requests of a run that tells how long runs take; or a tenth of a run's, if that is more."""


class Outlook(NamedTuple):
    likely: int
    most: int
    """Both numbers count runs."""
    num_prompts: tuple[int, int]
    """The fewest and the most requests of a run."""
    seconds: float
    """About how long the likely number of runs takes."""


def estimate_runs(search: Search, sites: Sequence[Site]) -> Outlook:
    """Estimate what a search takes, by two short runs of each system on the first of its cards."""
    likely, most, seconds, prompts = 0, 0, 0.0, list[int]()
    for site in {site.cell.system: site for site in reversed(sites)}.values():
        fitting = search.sizes.fitting(site)
        num_halved = min(len(fitting), 2 * len(fitting).bit_length())
        num_sizes = len(search.sizes.halved(site)) if search.rate is None else num_halved
        sized = site.sized_for(fitting[-1], search.rate, search.question.num_prompts)
        ranked, num_prompts = sized.ranked(fitting[-1], search.rate), int(str(sized.cell.knob_values["num_prompts"]))
        beam = BEAM if fitting[-1] <= FEW_GPUS else 1
        num_changes = sum(len(axis) - 1 for axis in ranked.space.axes)
        num_joint = sum(1 for _ in ranked.space.joint(ALONE if search.rate is None else JOINT))
        num_near = ROUNDS * beam * num_changes
        num_climbs = CLIMB * (1 + site.num_seeds)
        num_raced = max(HOPELESS * num_joint, site.num_seeds * min(ranked.num, num_joint + num_near))
        num_answers = num_sizes * sum(other.cell.system == site.cell.system for other in sites)
        num_short = min(num_prompts, max(SHORT, num_prompts // 10))
        short_site = sized.sized_for(fitting[-1], search.rate, num_short)
        for _ in range(2):
            start = time.perf_counter()
            short_site.run(short_site.plan_of(ranked.space.first), ranked.start, 0)
            run_s = num_prompts / num_short * (time.perf_counter() - start)
        likely_runs = num_joint + num_climbs + (num_changes if search.rate is None else 0)
        likely, most = likely + num_answers * likely_runs, most + num_answers * (num_raced + num_climbs)
        seconds += num_answers * likely_runs * run_s
        prompts += [num_prompts] if search.question.num_prompts is not None else [num_prompts, site.most_prompts]
    return Outlook(likely, most, (min(prompts), max(prompts)), seconds / min(usable_cores(), len(sites)))


FINER = 5
"""How many steps of a seed's own rates make one step of the question's."""


def rates_by_seed(answer: Answer, resolution: float) -> dict[int, float]:
    """Return the largest rates of the answer's plan by each seed alone. We leave out a seed with which it serves no rate."""
    site, plan, rate = answer.site, answer.plan, answer.rate
    assert plan is not None
    assert rate is not None
    lattice, rates = Lattice(resolution=resolution / FINER), {}
    for seed in range(site.num_seeds):

        def margin(step: int, seed: int = seed) -> float:
            return -lattice.steps(verdict_of([site.run(plan, lattice.rate(step), seed)], site.objectives).worst)

        step = climb(margin, lattice.step(rate), lattice.ends(rate))
        if step is not None:
            rates[seed] = lattice.rate(step)
    return rates


ALIKE = 3
"""How many splits of a number of GPUs a step tries: those whose share of prefill workers is nearest to the answer's."""


def needs_by_step(answer: Answer, sizes: Sequence[int], hours: float) -> list[dict[str, Any]]:
    """Return what each step of an answer's file needs: begin_h, hours, sessions, rate, gpus and plan. The last two are None if no number
    of the answer's workers serves the step. Workers are empty when each step begins."""
    site, plan, rate = answer.site, answer.plan, answer.rate
    assert isinstance(site, ClusterSite), "turns are refused"
    assert plan is not None
    assert rate is not None
    arrivals_s = [session.arrival_s for session in site.sessions_at_file_times]
    steps = []
    for index in range(math.floor(arrivals_s[-1] / 3600 / hours) + 1):
        begin_s, end_s = 3600 * hours * index, 3600 * hours * (index + 1)
        num_sessions = sum(begin_s <= arrival_s < end_s for arrival_s in arrivals_s)
        length_s = min(end_s, arrivals_s[-1]) - begin_s or 1.0
        trials = Trials(site=replace(site, window_s=(begin_s, end_s)))

        def serving(gpus: int, trials: Trials = trials) -> Plan | None:
            plans = _nearest_plans(site.plans_like(gpus, plan), plan)
            return next((candidate for candidate in plans if trials.judge(candidate, rate, True).serves), None)

        smallest = fewest(sizes, serving) if num_sessions else (sizes[0], None)
        steps.append(
            {
                "begin_h": begin_s / 3600,
                "hours": length_s / 3600,
                "sessions": num_sessions,
                "rate": num_sessions / length_s,
                "gpus": smallest and smallest[0],
                "plan": smallest and smallest[1] and smallest[1].name,
            }
        )
    return steps


def searched_knobs(plan: Plan) -> dict[str, Scalar]:
    """Return what the search chose besides the deployment."""
    return {name: value for name, value in plan.knobs if name not in SET_HERE}


def _nearest_plans(plans: Sequence[Plan], plan: Plan) -> list[Plan]:
    """Return up to ``ALIKE`` plans with the plan's degrees, the nearest in their share of prefill workers first."""

    def share(candidate: Plan) -> float:
        return 0.0 if candidate.prefill is None else candidate.prefill[1] / (candidate.prefill[1] + candidate.decode[1])

    def degrees(candidate: Plan) -> tuple[object, int]:
        return candidate.prefill and candidate.prefill[0], candidate.decode[0]

    same_degrees = [candidate for candidate in plans if degrees(candidate) == degrees(plan)]
    return sorted(same_degrees, key=lambda each: abs(share(each) - share(plan)))[:ALIKE]
