"""Readings of a capacity: the GPUs that each hour of a file needs, what changes with a knob, all else held, and by how
much answers differ, seed by seed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from repro.capacity.answers import Answer, Lattice, Search, Trials, climb, fewest
from repro.capacity.objectives import judged
from repro.capacity.question import Question, parse_sizes
from repro.capacity.sites import SET_HERE, ClusterSite, Plan
from repro.runs.cell import Scalar

AS_ASKED = "as asked"


@dataclass(frozen=True, kw_only=True)
class Change:
    """Another value of a knob, or platform; None leaves the knob out."""

    name: str
    value: Scalar | None

    def __str__(self) -> str:
        return f"without {self.name}" if self.value is None else f"{self.name}={self.value}"

    def of(self, question: Question) -> Question:
        if self.name == "platform":
            return replace(question, platforms=[str(self.value)])
        knobs = {name: value for name, value in question.knobs.items() if name != self.name}
        return replace(question, knobs=knobs if self.value is None else knobs | {self.name: self.value})


def varied(
    question: Question, answer: Answer, changes: Sequence[Change], resolution: float, advance: Callable[[], object]
) -> list[Answer]:
    """The largest rates of an answer's plan as it is, then with each change, all else held, the requests too. A plan that does not
    fit with a change is sought anew."""
    site, plan = answer.site, answer.plan
    assert plan is not None
    sizes = parse_sizes(str(answer.gpus))
    own = replace(
        question,
        systems=[site.cell.system],
        platforms=[site.cell.platform],
        knobs={**searched_knobs(plan), **question.knobs},
        num_prompts=int(str(site.cell.knob_values["num_prompts"])),
    )
    sites = []
    for label, asked in ((AS_ASKED, own), *((str(each), each.of(own)) for each in changes)):
        (changed,) = asked.sites(sizes)
        if isinstance(changed, ClusterSite) and replace(changed, held=plan.name).fits(answer.gpus):
            changed = replace(changed, held=plan.name)
        sites.append(replace(changed, label=label))
    found = Search(question=own, sizes=sizes, rate=None, resolution=resolution).answers(sites, advance)
    return sorted(found, key=lambda each: [site.label for site in sites].index(each.site.label))


FINER = 5
"""Steps of a seed's own rates to one of the question's."""


def rates_by_seed(answer: Answer, resolution: float) -> dict[int, float]:
    """The largest rates of the answer's plan by the rounds of each seed alone; a seed by which it serves none is left out."""
    site, plan, rate = answer.site, answer.plan, answer.rate
    assert plan is not None
    assert rate is not None
    lattice, found = Lattice(resolution=resolution / FINER), {}
    for seed in range(site.num_seeds):

        def margin(step: int, seed: int = seed) -> float:
            return -lattice.steps(judged([site.run(plan, lattice.rate(step), seed)], site.objectives).worst)

        step = climb(margin, lattice.step(rate), lattice.ends(rate))
        if step is not None:
            found[seed] = lattice.rate(step)
    return found


ALIKE = 3
"""Splits of a number of GPUs that a step tries: those whose share of prefill workers is nearest to the answer's."""


def stepped(answer: Answer, sizes: Sequence[int], hours: float) -> list[dict[str, Any]]:
    """What each step of an answer's file needs, with begin_h, hours, sessions, rate, gpus and plan; the last two None where no number
    of the answer's workers serves it. Each step serves its own arrivals from empty workers."""
    site, plan, rate = answer.site, answer.plan, answer.rate
    assert isinstance(site, ClusterSite), "turns are refused"
    assert plan is not None
    assert rate is not None
    arrivals_s = [each.arrival_s for each in site.own_times]
    steps = []
    for place in range(math.floor(arrivals_s[-1] / 3600 / hours) + 1):
        begin_s, end_s = 3600 * hours * place, 3600 * hours * (place + 1)
        num = sum(begin_s <= each < end_s for each in arrivals_s)
        length_s = min(end_s, arrivals_s[-1]) - begin_s or 1.0
        trials = Trials(site=replace(site, window_s=(begin_s, end_s)))

        def serving(gpus: int, trials: Trials = trials) -> Plan | None:
            alike = _alike(site.alike(gpus, plan), plan)
            return next((each for each in alike if trials.seen(each, rate, True).serves), None)

        found = fewest(sizes, serving) if num else (sizes[0], None)
        steps.append(
            {
                "begin_h": begin_s / 3600,
                "hours": length_s / 3600,
                "sessions": num,
                "rate": num / length_s,
                "gpus": found and found[0],
                "plan": found and found[1] and found[1].name,
            }
        )
    return steps


def searched_knobs(plan: Plan) -> dict[str, Scalar]:
    """What the search chose besides the deployment."""
    return {name: value for name, value in plan.knobs if name not in SET_HERE}


def _alike(plans: Sequence[Plan], plan: Plan) -> list[Plan]:
    """Those with the plan's degrees, the nearest in their share of prefill workers first."""

    def share(each: Plan) -> float:
        return 0.0 if each.prefill is None else each.prefill[1] / (each.prefill[1] + each.decode[1])

    def degrees(each: Plan) -> tuple[object, int]:
        return each.prefill and each.prefill[0], each.decode[0]

    found = [each for each in plans if degrees(each) == degrees(plan)]
    return sorted(found, key=lambda each: abs(share(each) - share(plan)))[:ALIKE]
