"""The answers to a question, of all sites and sizes.

Those of a site come one after the other, small sizes first, as each search begins where the answer before says. Sites are searched side
by side, by processes that share nothing, so that no answer hangs on how many there are.
"""

from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from engines.errors import RunError
from engines.machine import held
from repro.capacity.objectives import LOAD, Sample, Verdict, is_lost, judged
from repro.capacity.question import Question, Sizes
from repro.capacity.search import Lattice, fewest, largest
from repro.capacity.sites import Plan, Site
from repro.cores import usable_cores
from repro.runs.code import held_here
from repro.runs.workers import LOST, worker_processes

FEW_SESSIONS = 1000
"""Sessions of all seeds and sizes together, below which another process costs more than it saves."""


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
    """The objective, or the load, that is beyond its limit a step above, or at the lowest rate where none is served; for a rate that
    was asked for, the one nearest to its limit."""
    is_monotone: bool = True
    num_plans: int
    num_simulated: int
    num_runs: int


@dataclass(frozen=True, kw_only=True)
class Trials:
    site: Site
    _made: dict[tuple[Plan, float, int], Sample] = field(default_factory=dict)

    def sample(self, plan: Plan, rate: float, seed: int) -> Sample:
        key = plan, rate, seed
        if key not in self._made:
            self._made[key] = self.site.run(plan, rate, seed)
        return self._made[key]

    def seen(self, plan: Plan, rate: float, is_whole: bool) -> Verdict:
        """Ask all seeds or the first alone; no more of them are run than it takes to know that the rate is not served."""
        num = self.site.num_seeds if is_whole else 1
        samples: list[Sample] = []
        for seed in range(num):
            samples.append(self.sample(plan, rate, seed))
            if is_lost(samples, self.site.objectives, num):
                break
        return judged(samples, self.site.objectives)

    def verdict(self, plan: Plan, rate: float) -> Verdict:
        """Judged by the seeds that were run, at least the first."""
        self.sample(plan, rate, 0)
        keys = [(plan, rate, seed) for seed in range(self.site.num_seeds)]
        return judged([self._made[key] for key in keys if key in self._made], self.site.objectives)

    def answer(self, gpus: int, num_plans: int, plan: Plan | None, **found: Any) -> Answer:
        num_simulated, num_runs = len({plan for plan, _, _ in self._made}), len(self._made)
        return Answer(
            site=self.site,
            gpus=gpus,
            plan=plan,
            num_plans=num_plans,
            num_simulated=num_simulated,
            num_runs=num_runs,
            **found,
        )


def largest_rate(site: Site, gpus: int, lattice: Lattice, start: float | None = None) -> Answer:
    """``start`` is about the rate, where another answer tells."""
    trials, ranked = Trials(site=site), site.ranked(gpus, None)
    begin = start or ranked.start
    lowest, highest = lattice.ends(begin)
    found = largest(
        ranked.plans,
        lambda plan: plan.most,
        lambda plan, step, is_whole: -lattice.steps(trials.seen(plan, lattice.rate(step), is_whole).worst),
        lattice,
        begin,
    )
    if found is None:
        at = trials.verdict(ranked.plans[0], lattice.rate(lowest))
        return trials.answer(gpus, ranked.num, None, rate=None, at=None, binds=at.binds)
    rate, above = lattice.rate(found.step), lattice.rate(found.step + 1)
    binds = None
    if found.step < highest:
        binds = LOAD if above > found.plan.most else trials.verdict(found.plan, above).binds
    at = trials.verdict(found.plan, rate)
    return trials.answer(gpus, ranked.num, found.plan, rate=rate, at=at, binds=binds, is_monotone=found.is_monotone)


def fewest_gpus(site: Site, sizes: Sequence[int], rate: float) -> Answer:
    trials = Trials(site=site)
    seen: dict[int, int] = {}

    def serving(gpus: int) -> Plan | None:
        ranked = site.ranked(gpus, rate)
        seen[gpus] = ranked.num
        return next((plan for plan in ranked.plans if trials.seen(plan, rate, True).serves), None)

    gpus, plan = fewest(sizes, serving) or (sizes[-1], None)
    at = None if plan is None else trials.verdict(plan, rate)
    return trials.answer(gpus, sum(seen.values()), plan, rate=rate, at=at, binds=None if at is None else at.binds)


@dataclass(frozen=True, kw_only=True)
class Search:
    question: Question
    sizes: Sizes
    rate: float | None
    """Asked for with the fewest GPUs; None asks for the largest of each size."""
    resolution: float

    def answers(
        self, sites: Sequence[Site], advance: Callable[[], object], num_processes: int | None = None
    ) -> list[Answer]:
        """Best first. ``advance`` is called for each, ``num_processes`` None leaves to the machine and the work. Raises the error of
        the first site that has one."""
        sizes = [self._sizes(site) for site in sites]
        num = num_processes or min(usable_cores(), len(sites))
        num_prompts, num_seeds = self.question.num_prompts, self.question.num_seeds
        is_little = num_prompts is not None and num_prompts * num_seeds * sum(map(len, sizes)) < FEW_SESSIONS
        is_here = any(held_here(site.cell, elsewhere=False) is not None for site in sites)
        if num_processes is None and (is_little or is_here):
            num = 1
        found: list[Answer] = []
        if num == 1:
            for site, own in zip(sites, sizes, strict=True):
                found += self._answers_of(site, own, advance)
        else:
            try:
                with worker_processes(num) as pool:
                    with held():  # the first ones start the processes
                        futures = [pool.submit(self._answers_of, *each) for each in zip(sites, sizes, strict=True)]
                    for future in futures:
                        own_answers = future.result()
                        found += own_answers
                        for _ in own_answers:
                            advance()
            except BrokenProcessPool as error:
                raise RunError(LOST) from error
        if self.rate is None:
            return sorted(found, key=lambda each: (-(each.rate or 0.0), each.gpus))
        return sorted(found, key=lambda each: (each.plan is None, each.gpus, -each.at.attainment if each.at else 0.0))

    def _answers_of(
        self, site: Site, sizes: Sequence[tuple[int, ...]], advance: Callable[[], object] = lambda: None
    ) -> list[Answer]:
        found: list[Answer] = []
        for gpus in sizes:
            last = found[-1] if found else None
            start = last.rate * gpus[-1] / last.gpus if last is not None and last.rate else None
            found.append(self._answer(site, gpus, start))
            advance()
        return found

    def _sizes(self, site: Site) -> list[tuple[int, ...]]:
        """Numbers of GPUs by the answers that are of them."""
        return [self.sizes.fitting(site)] if self.rate is not None else [(gpus,) for gpus in self.sizes.halved(site)]

    def _answer(self, site: Site, gpus: Sequence[int], start: float | None) -> Answer:
        """The answer of one size, or of the fewest of several; ``start`` is about the rate, where another answer tells."""
        sized = site.of_size(gpus[-1], start if self.rate is None else self.rate, self.question.num_prompts)
        if self.rate is not None:
            return fewest_gpus(sized, gpus, self.rate)
        return largest_rate(sized, gpus[-1], Lattice(resolution=self.resolution), start)
