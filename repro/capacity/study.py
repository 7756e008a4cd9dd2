"""A capacity: what the search finds at a site, for a number of GPUs or for a rate, and how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from repro.capacity.objectives import LOAD, Objective, Sample, Verdict, is_lost, judged
from repro.capacity.search import Lattice, fewest, largest
from repro.capacity.site import Plan, Site

FEWEST_ROUNDS, MOST_ROUNDS = 1000, 3072
"""Rounds of a run, where no number of requests is asked for."""
BEYOND = 5
"""Samples beyond the highest percentile, of all seeds together, that a run has at least."""
LASTING = 2
"""Times that arrivals last as long as a session, below which a rate is one of a burst."""
_SLOWER = 1.5
"""About how much longer a session takes under load than alone."""


def num_prompts(site: Site, rate: float, objectives: Sequence[Objective], num_seeds: int) -> int:
    """Sessions, or turns, of a run: so many that arrivals last, as far as the most rounds allow, and that percentiles mean something."""
    per_prompt = site.rounds_per_prompt
    lasting = _SLOWER * LASTING * rate * site.alone_s * per_prompt
    needed = max(BEYOND * each.fewest for each in objectives)
    rounds = max(min(max(lasting, FEWEST_ROUNDS), MOST_ROUNDS), 2 * needed / num_seeds)
    return max(1, math.ceil(rounds / per_prompt))


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Runs of a site's plans, each made once."""

    site: Site
    objectives: tuple[Objective, ...]
    num_seeds: int
    _made: dict[tuple[Plan, float, int], Sample] = field(default_factory=dict)

    @property
    def num_runs(self) -> int:
        return len(self._made)

    @property
    def num_plans(self) -> int:
        """Those that were simulated."""
        return len({plan for plan, _, _ in self._made})

    def sample(self, plan: Plan, rate: float, seed: int) -> Sample:
        key = plan, rate, seed
        if key not in self._made:
            self._made[key] = self.site.run(plan, rate, seed)
        return self._made[key]

    def seen(self, plan: Plan, rate: float, is_whole: bool) -> Verdict:
        """Ask all seeds or the first alone; no more of them are run than it takes to know that the rate is not served."""
        num = self.num_seeds if is_whole else 1
        samples: list[Sample] = []
        for seed in range(num):
            samples.append(self.sample(plan, rate, seed))
            if is_lost(samples, self.objectives, num):
                break
        return judged(samples, self.objectives)

    def verdict(self, plan: Plan, rate: float) -> Verdict:
        """Judged by the seeds that were run, at least the first."""
        samples = [self.sample(plan, rate, 0)]
        samples += [
            self._made[plan, rate, seed] for seed in range(1, self.num_seeds) if (plan, rate, seed) in self._made
        ]
        return judged(samples, self.objectives)


@dataclass(frozen=True, kw_only=True)
class Answer:
    site: Site
    gpus: int
    plan: Plan | None
    """None where no plan serves any rate, or the one that was asked for."""
    rate: float | None
    at: Verdict | None
    """At the rate."""
    binds: str | None
    """What is beyond its limit a step above, or at the lowest rate where none is served; for a rate that was asked for, what is
    nearest to its limit."""
    is_monotone: bool = True
    num_plans: int
    num_simulated: int
    num_runs: int


def largest_rate(
    site: Site,
    gpus: int,
    objectives: tuple[Objective, ...],
    lattice: Lattice,
    num_seeds: int,
    start: float | None = None,
) -> Answer:
    """``start`` is about the rate, where another answer tells."""
    trials = Trials(site=site, objectives=objectives, num_seeds=num_seeds)
    ranked = site.ranked(gpus, None)
    begin = start or ranked.start
    lowest, highest = lattice.ends(begin)
    found = largest(
        ranked.plans,
        lambda plan: plan.most,
        lambda plan, step, is_whole: -lattice.steps(trials.seen(plan, lattice.rate(step), is_whole).worst),
        lattice,
        begin,
    )
    told = partial(Answer, site=site, gpus=gpus, num_plans=ranked.num)
    if found is None:
        at = trials.verdict(ranked.plans[0], lattice.rate(lowest))
        return told(
            plan=None, rate=None, at=None, binds=at.binds, num_simulated=trials.num_plans, num_runs=trials.num_runs
        )
    rate, above = lattice.rate(found.step), lattice.rate(found.step + 1)
    binds = None
    if found.step < highest:
        binds = LOAD if above > found.plan.most else trials.verdict(found.plan, above).binds
    return told(
        plan=found.plan,
        rate=rate,
        at=trials.verdict(found.plan, rate),
        binds=binds,
        is_monotone=found.is_monotone,
        num_simulated=trials.num_plans,
        num_runs=trials.num_runs,
    )


def fewest_gpus(
    site: Site, sizes: Sequence[int], objectives: tuple[Objective, ...], rate: float, num_seeds: int
) -> Answer:
    trials = Trials(site=site, objectives=objectives, num_seeds=num_seeds)
    seen: dict[int, int] = {}

    def serving(gpus: int) -> Plan | None:
        ranked = site.ranked(gpus, rate)
        seen[gpus] = ranked.num
        return next((plan for plan in ranked.plans if trials.seen(plan, rate, True).serves), None)

    found = fewest(sizes, serving)
    told = partial(
        Answer,
        site=site,
        rate=rate,
        num_plans=sum(seen.values()),
        num_simulated=trials.num_plans,
        num_runs=trials.num_runs,
    )
    if found is None:
        return told(gpus=sizes[-1], plan=None, at=None, binds=None)
    gpus, plan = found
    at = trials.verdict(plan, rate)
    return told(gpus=gpus, plan=plan, at=at, binds=at.binds)
