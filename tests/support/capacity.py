"""Random questions about a capacity whose best answer is known, as every plan is searched: ``python tests/support/capacity.py 0 100``
asks 100 from seed 0 on, and says how near the search's rates are, with which share of the runs."""

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from engines.errors import UserError
from repro.capacity.answers import Answer, Lattice, Trials, climb, largest_rate
from repro.capacity.question import Question, parse_sizes
from repro.capacity.sites import Plan, Site
from repro.runs.cell import Scalar
from repro.runs.tuning import axes_of

LATTICE = Lattice(resolution=0.03)
ROUNDS = 960
"""Rounds that a run has, about the fewest of a question: of a quarter, a plan's verdicts are not monotone in the rate in a case of ten."""
SYSTEMS = (*["vllm-sim"] * 6, *["continuum-sim"] * 3, "dynamo-sim")
SECOND = {"": (0,), "itl-gap": (20, 30, 50, 80), "itl-request": (20, 30, 50, 80), "e2el": (4000, 8000, 16000)}


@dataclass(frozen=True)
class Case:
    question: Question
    gpus: int

    @cached_property
    def site(self) -> Site:
        (site,) = self.question.sites(parse_sizes(str(self.gpus)))
        return site.sized_for(self.gpus, None, self.question.num_prompts)

    @cached_property
    def plans(self) -> list[Plan]:
        """Those that are possible."""
        return [plan for plan in self.site.plans(self.gpus) if self.site.is_possible(plan.choices)]

    @cached_property
    def answer(self) -> Answer:
        return largest_rate(self.site, self.gpus, LATTICE)

    @cached_property
    def every(self) -> tuple[float, int]:
        """The best rate of any plan, each searched alone, and the runs that this takes; 0 where no plan serves any. Verdicts of so short
        runs are not monotone: a rate above one that fails counts too."""
        start = self.site.ranked(self.gpus, None).start
        rates, num_runs = [0.0], 0
        for plan in self.plans:
            trials = Trials(site=self.site)
            margin = partial(trials.margin, plan, is_whole=True, lattice=LATTICE)
            step = climb(margin, LATTICE.step(start), LATTICE.ends(start))
            rates.append(0.0 if step is None else LATTICE.rate(step))
            num_runs += trials.num_runs
        return max(rates), num_runs


def cases(seed: int, folder: Path, least: int = 32, most: int = 64) -> Iterator[Case]:
    """Cards, models, lengths, objectives and GPUs as a seed draws them; knobs are held until few plans are left."""
    draw = random.Random(seed)
    for number in range(1000):
        rounds = draw.choice((1, 1, 2, 3))
        means = draw.choice((200, 600, 1500, 3000)), draw.choice((30, 100, 250))
        path = folder / f"{seed}-{number}.jsonl"
        path.write_text("".join(json.dumps({"rounds": _session(draw, rounds, *means)}) + "\n" for _ in range(40)))
        slo = f"ttft:p{draw.choice((90, 95))}:{draw.choice((300, 600, 1000, 2000, 4000))}"
        second = draw.choice([*SECOND])
        if second:
            slo += f" {second}:p{draw.choice((90, 95))}:{draw.choice(SECOND[second])}"
        question = Question(
            systems=[draw.choice(SYSTEMS)],
            platforms=[draw.choice(("a100", "h100", "h200", "b200", "h20"))],
            workload=str(path),
            dataset=None,
            slo=slo,
            knobs={"model": draw.choice(("Llama-3.1-8B", "Qwen3-32B", "Llama-3.1-70B"))},
            num_prompts=ROUNDS // rounds,
            num_seeds=1,
        )
        case = Case(question, draw.choice((2, 4, 8)))
        try:
            while len(case.site.plans(case.gpus)) > most:
                axes = axes_of(case.site.cell, "deployment")
                axis = draw.choice([each for each in axes if len(each) > 1])
                knobs: dict[str, Scalar] = {**case.question.knobs, **dict(draw.choice([each for each in axis if each]))}
                case = Case(replace(case.question, knobs=knobs), case.gpus)
            if len(case.plans) >= least:
                yield case
        except UserError:
            continue  # such as a model that no worker of so many GPUs holds


def _session(draw: random.Random, rounds: int, prompt: float, answer: float) -> list[list[float]]:
    """Tokens of the prompt and answer of each round, and seconds until the next."""
    return [
        [
            *(max(4, round(mean * draw.lognormvariate(-0.1, 0.5))) for mean in (prompt / (4 if index else 1), answer)),
            round(draw.expovariate(0.5), 3),
        ]
        for index in range(rounds)
    ]


def main(first: int, count: int) -> None:
    near = runs = all_runs = 0
    for seed in range(first, first + count):
        with TemporaryDirectory() as folder:
            case = next(each for each in cases(seed, Path(folder)) if each.every[0])
        (best, num), answer = case.every, case.answer
        share = (answer.rate or 0.0) / best
        asked = f"{case.question.systems[0]} on {case.gpus} x {case.question.platforms[0]}, {case.question.slo}"
        print(f"{seed}: {asked}: {share:.3f} of the best, {answer.num_runs} of {num} runs", flush=True)
        near, runs, all_runs = near + (share >= 0.97), runs + answer.num_runs, all_runs + num
    print(f"within 3 %: {near} of {count}, with {100 * runs / all_runs:.1f} % of the runs")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
