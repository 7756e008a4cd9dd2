"""Readings of a capacity: the GPUs that each hour of a file needs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from repro.capacity.answers import Answer, Trials, fewest
from repro.capacity.sites import ClusterSite, Plan


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """GPUs by the hour, of the fixed answer's workers in other numbers."""

    answer: Answer
    """The fewest GPUs that serve the whole file."""
    steps: Sequence[Mapping[str, Any]]
    """Each with begin_h, hours, sessions, rate, gpus and plan; gpus and plan None where no number of the answer's serves it."""

    @property
    def gpu_hours(self) -> tuple[float, float]:
        """GPU hours of the fixed answer, and in steps."""
        hours = [each["hours"] for each in self.steps]
        return self.answer.gpus * math.fsum(hours), math.fsum(
            (each["gpus"] or self.answer.gpus) * each["hours"] for each in self.steps
        )


def stepped(answer: Answer, sizes: Sequence[int], hours: float) -> Stepped:
    """Each step serves its own arrivals from empty workers, so it begins with no sessions of the step before."""
    site, plan, rate = answer.site, answer.plan, answer.rate
    assert isinstance(site, ClusterSite), "turns are refused"
    assert plan is not None
    assert rate is not None
    arrivals_s = [each.arrival_s for each in site.own_times]
    fewer = [gpus for gpus in sizes if gpus <= answer.gpus]
    steps = []
    for place in range(math.floor(arrivals_s[-1] / 3600 / hours) + 1):
        begin_s, end_s = 3600 * hours * place, 3600 * hours * (place + 1)
        num = sum(begin_s <= each < end_s for each in arrivals_s)
        length_s = min(end_s, arrivals_s[-1]) - begin_s or 1.0
        own = replace(site, window_s=(begin_s, end_s))
        trials = Trials(site=own)

        def serving(gpus: int, trials: Trials = trials, local: float = num / length_s) -> Plan | None:
            alike = [each for each in site.ranked(gpus, local).plans if _kind_of(each) == _kind_of(plan)]
            return next((each for each in alike if trials.seen(each, rate, True).serves), None)

        found = fewest(fewer, serving) if num else (fewer[0], None)
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
    return Stepped(answer=answer, steps=steps)


def _kind_of(plan: Plan) -> tuple[object, ...]:
    """Degrees of its workers, and how they fill their steps."""
    return plan.prefill and plan.prefill[0], plan.decode[0], plan.schedule
