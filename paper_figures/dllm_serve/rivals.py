"""dLLM-Serve rivals: published rules that leave rows out, by what they solve and how fast a card composes them."""

import csv
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from engines.errors import UserError
from paper_figures.common.caption import basis_of, obtained_text, validity_text
from paper_figures.common.contender import Contender, contenders_beside
from paper_figures.common.figure import Page, Picture, Table, cell_by_cell, table
from paper_figures.common.panel import ANYWHERE, Axis, Guide, Layer, Line, Panel, Text
from paper_figures.common.runs import Measure, Runs
from paper_figures.common.words import shown
from paper_figures.dllm_serve.answers import share, verdicts
from paper_figures.dllm_serve.frontier import CARD_REQUESTS, rows_per_request
from paper_figures.dllm_serve.layout import all_valid, dllm_figure
from repro import paths
from repro.families.dllm.record import STEPS
from repro.families.platforms import Platform
from repro.reports.figures import Solved, View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Discordance, Interval, discordance, paired_ratio, points_apart
from repro.runs.store import StoredRun, by_seed

NUM_SEEDS, NUM_PROBLEMS = 4, 125
"""Together 500 problems of each task."""
THROUGHPUT = Measure(path="throughput_tok_s")
THRESHOLD = "threshold 0.9"
COMMITS: Mapping[str, Mapping[str, Scalar]] = {
    THRESHOLD: {"threshold": 0.9},
    "LocalLeap 0.9": {"anchor_threshold": 0.9},
    "factor 1": {"factor": 1.0},
}
"""Rules of commits by name: Fast-dLLM's two, and LocalLeap's (arXiv:2510.07081)."""


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    platform: str
    """The platform on which the embedded model answers it."""
    answer: Mapping[str, Scalar]
    at_once: Mapping[str, Scalar]
    """Knobs of Burst's requests on a card, with the same blocks."""
    steps: tuple[int, int]
    """Steps of an answer, and of a card's request, at a fixed pace: about as many as with a threshold."""
    commits: Sequence[str] = (THRESHOLD,)
    """Rules of commits to try on this task: keys of ``COMMITS``."""


TASKS = (
    Task(
        name="mini-chain",
        platform="cpu-tiny",
        answer={"model": "tiny-long", "gen_length": 96, "block_length": 16},
        at_once={"gen_length": 256, "block_length": 16},
        steps=(12, 32),
        commits=tuple(COMMITS),
    ),
    Task(
        name="mini-far",
        platform="cpu-long",
        answer={"gen_length": 64, "block_length": 32},
        at_once={"gen_length": 64, "block_length": 32, "input_len": 1280},
        steps=(6, 6),
    ),
    Task(
        name="mini-roll",
        platform="cpu-tiny",
        answer={"model": "tiny-roll", "gen_length": 256, "block_length": 32},
        at_once={"gen_length": 256, "block_length": 32},
        steps=(24, 24),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Policy(Contender):
    """A rule with one value of its main knob, as ``rivals.yaml`` says."""

    rule: str
    is_ours: bool = False
    is_fixed: bool = False
    is_composed: bool = True
    is_drawn: bool = True
    answered: Sequence[str] = tuple(task.name for task in TASKS)


POLICIES = tuple(contenders_beside(__file__, Policy).values())
EVERY_ROW, FAST_DLLM = POLICIES[:2]


def asked(where: Platform) -> list[tuple[Task, Policy, str]]:
    """Return tasks, rules of rows and rules of commits. A card composes a fixed number of tokens a step, so it has one rule."""
    return [
        (task, policy, commit)
        for commit in COMMITS
        for task in TASKS
        if commit in ((THRESHOLD,) if where.gpu else task.commits)
        for policy in POLICIES
        if (policy.is_composed if where.gpu else task.platform == where.name and task.name in policy.answered)
        if commit == THRESHOLD or (policy.is_composed and not policy.is_fixed)
    ]


def cell_of(view: View, task: Task, policy: Policy, commit: str = THRESHOLD) -> Cell:
    is_card = view.platform.gpu is not None
    options = {**(task.at_once if is_card else task.answer), "num_prompts": CARD_REQUESTS if is_card else NUM_PROBLEMS}
    options["steps"] = task.steps[is_card]
    if not is_card and not policy.is_fixed:
        options |= {"steps": task.answer["gen_length"], **COMMITS[commit]}
    options |= dict(policy.knobs)
    knobs = tuple((name, value) for name, value in options.items() if value is not None)
    return view.cell(None, policy.system, "burst" if is_card else task.name, knobs=knobs)


def cells(view: View) -> list[Cell]:
    return cell_by_cell([cell_of(view, *point) for point in asked(view.platform)], view)


# -- what is answered -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers under one policy, over the problems of all seeds. Points compare pairs with every row under the same rule of commits."""

    task: Task
    policy: Policy
    commit: str
    runs: tuple[StoredRun, ...]
    every_row: tuple[StoredRun, ...]

    @cached_property
    def solved(self) -> Solved | None:
        return share(self.runs)

    @cached_property
    def pair(self) -> Discordance | None:
        """Compare with every row, on seeds that both have; None if one of their problems was not graded."""
        seeds = {run.cell.seed for run in self.runs if run.validity.valid}
        seeds &= {run.cell.seed for run in self.every_row if run.validity.valid}
        ours, base = (verdicts([run for run in runs if run.cell.seed in seeds]) for runs in (self.runs, self.every_row))
        return discordance(ours, base) if ours and len(ours) == len(base) else None

    @property
    def tokens_per_step(self) -> float:
        steps = sum(run.total(STEPS, "num_refresh") + run.total(STEPS, "num_reuse") for run in self.runs)
        return sum(run.total(STEPS, "committed_tokens") for run in self.runs) / max(1.0, steps)

    @property
    def rows(self) -> float:
        return sum(map(rows_per_request, self.runs)) / len(self.runs)


ANSWER_COLUMNS = (
    *("task", "commit", "policy", "rule", "is_ours", "n", "solved", "low", "high", "lost", "won", "points"),
    *("points_low", "points_high", "p_value", "tokens_per_step", "rows_per_request", "obtained", "valid", "run_folder"),
)


def answer_row(each: Answers) -> tuple[object, ...]:
    solved = each.solved
    numbers = (None,) * 4 if solved is None else (solved.n, round(solved.share * solved.n), solved.low, solved.high)
    return (
        *(each.task.name, each.commit, each.policy.name, each.policy.rule, each.policy.is_ours, *numbers),
        *(*apart(each.pair), each.tokens_per_step, each.rows, obtained_text(each.runs), all_valid(each.runs)),
        " ".join(run.cell.folder_name for run in each.runs),
    )


def apart(pair: Discordance | None) -> tuple[float | None, ...]:
    """Return problems lost and won, points with their interval, and p."""
    if pair is None:
        return (None,) * 6
    points = points_apart(pair)
    return (pair.only_second, pair.only_first, points.mean, *(points.bounds or ANYWHERE), pair.p_value)


def answered(runs: Runs) -> list[Answers]:
    view = runs.view
    answers = [
        Answers(
            task=task,
            policy=policy,
            commit="fixed" if policy.is_fixed else commit,
            runs=runs.of(cell_of(view, task, policy, commit)),
            every_row=runs.of(cell_of(view, task, EVERY_ROW, commit)),
        )
        for task, policy, commit in asked(view.platform)
    ]
    return [answer for answer in answers if answer.runs]


def answer_page(runs: Runs) -> Page:
    answers = answered(runs)
    rows = []
    for answer in answers:
        lost, won, *points, p_value = apart(answer.pair)
        known = [point for point in points if point is not None]
        interval = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*known) if known else "-"
        numbers = ("-" if answer.solved is None else str(answer.solved), lost, won, interval, shown(p_value, ".2g"))
        counted = (f"{answer.rows:,.0f}", f"{answer.tokens_per_step:.1f}", validity_text(answer.runs))
        rows.append((answer.task.name, answer.commit, answer.policy.name, *numbers, *counted))
    measured = ("solved %", "lost", "won", "points", "p", "rows/request", "tokens/step", "valid")
    columns = ("task", "commit", "policy", *measured)
    return Page(
        table=Table(columns=columns, rows=rows),
        csv=Table(columns=ANSWER_COLUMNS, rows=[answer_row(answer) for answer in answers]),
        notes=ANSWERED,
        after_heading=f" - {runs.view.platform.title}",
    )


ANSWERED = [
    f"{NUM_PROBLEMS} held-out problems of each seed, the same for all. Lost, won and points: against every row by "
    "the same rule of commits, with the 95 % interval of a paired difference; p: McNemar's exact test. A rule that knows no threshold "
    "commits a fixed number of tokens a step, and is paired with every row by threshold 0.9."
]


# -- how fast a card composes it --------------------------------------------------------------------------


@functools.cache
def committed(platform: str) -> Mapping[tuple[str, str], Mapping[str, str]]:
    """Return rows of the committed table by task and policy, for answers with a threshold (or a fixed number of tokens)."""
    path = Path(paths.COMMITTED, platform, f"rivals-{platform}.csv")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            valid = [row for row in csv.DictReader(file) if row["valid"].lower() == "true"]
        return {(row["task"], row["policy"]): row for row in valid if row["commit"] in (THRESHOLD, "fixed")}
    except (OSError, KeyError, ValueError) as error:
        raise UserError(
            f"{path} holds no answers ({type(error).__name__}): make it by 'repro reproduce rivals --platform {platform} "
            f"--out-dir {path.parent}'"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Speed:
    task: Task
    policy: Policy
    runs: tuple[StoredRun, ...]
    faster: Interval
    """Throughput over Fast-dLLM's rule at the same pace, in pairs of equal seed."""

    @property
    def throughput(self) -> dict[int, float]:
        return by_seed(self.runs, THROUGHPUT)

    @property
    def answers(self) -> Mapping[str, str]:
        return committed(self.task.platform).get((self.task.name, self.policy.name), {})

    @property
    def accuracy(self) -> Interval | None:
        if not self.answers.get("solved"):
            return None
        n, low, high = (float(self.answers[name]) for name in ("n", "low", "high"))
        mean = 100 * float(self.answers["solved"]) / n
        return Interval(
            mean=mean, half_width=50 * (high - low), n=int(n), confidence=0.95, bounds=(100 * low, 100 * high)
        )

    @property
    def is_equal(self) -> bool:
        """Whether keeping every row solves no more, outside noise: the interval of points reaches zero or lies above it."""
        return bool(self.answers.get("points_high")) and float(self.answers["points_high"]) >= 0


def speeds(runs: Runs) -> list[Speed]:
    view, results = runs.view, []
    for task, policy, _ in asked(view.platform):
        cell, base_cell = (cell_of(view, task, each) for each in (policy, FAST_DLLM))
        faster = paired_ratio(runs.values(cell, THROUGHPUT), runs.values(base_cell, THROUGHPUT))
        results.append(Speed(task=task, policy=policy, runs=runs.of(cell), faster=faster))
    return [speed for speed in results if speed.runs]


def card_page(runs: Runs) -> Page:
    results = speeds(runs)
    rows = [(speed, run) for speed in results for run in speed.runs]
    columns = {
        "task": lambda row: row[0].task.name,
        "policy": lambda row: row[0].policy.name,
        "rule": lambda row: row[0].policy.rule,
        "is_equal": lambda row: row[0].is_equal,
        "seed": lambda row: row[1].cell.seed,
        "throughput_tok_s": lambda row: THROUGHPUT(row[1]),
        "rows_per_request": lambda row: rows_per_request(row[1]),
        "obtained": lambda row: row[1].obtained,
        "valid": lambda row: row[1].validity.valid,
    }
    said = [*COMPOSED, *best(results)]
    panels = [panel(task, [speed for speed in results if speed.task is task]) for task in TASKS]
    return Page(picture=Picture(panels=panels, caption=said, columns=len(panels)), csv=table(rows, columns), notes=said)


COMPOSED = [
    f"{CARD_REQUESTS} requests of Burst at once, in the task's blocks. Steps are composed and commit a fixed number of tokens, about what a "
    "threshold commits: mini-chain 8 a step, mini-far (prompts of 1,280 tokens) and mini-roll 10.7. Speed-ups are over Fast-dLLM's rule, "
    "paired by seed. Accuracy is the embedded model's on a CPU, of 500 problems by threshold 0.9, with Wilson's 95 % interval. Attention "
    "decides d2Cache's rows, which no composed step knows."
]


def best(found: Sequence[Speed]) -> Iterator[str]:
    """Name the fastest of our rules and of the others, among those as accurate as every row, and how much faster ours is."""
    for task in TASKS:
        equal = [speed for speed in found if speed.task is task and speed.is_equal]
        groups = [[speed for speed in equal if speed.policy.is_ours is is_ours] for is_ours in (True, False)]
        if all(groups):
            ours, theirs = (max(group, key=lambda each: each.faster.mean or 0.0) for group in groups)
            ratio = paired_ratio(ours.throughput, theirs.throughput)
            yield (
                f"{task.name}: of those that lose nothing outside noise {ours.policy.name} is {as_ratio(ratio)} times as fast as "
                f"{theirs.policy.name}, the fastest rival."
            )


def as_ratio(ratio: Interval) -> str:
    bounds = "" if ratio.bounds is None else " [{:.2f}, {:.2f}]".format(*ratio.bounds)
    return f"{shown(ratio.mean, '.2f')}{bounds}"


def panel(task: Task, found: Sequence[Speed]) -> Panel:
    """Draw accuracy with a threshold over the speed-up."""
    layers: list[Layer] = [Guide(value=1.0, is_upright=True)]
    for speed in found:
        if speed.policy.is_drawn and speed.accuracy is not None and speed.faster.mean is not None:
            look = replace(speed.policy.look, linestyle="none")
            layers.append(Line(label=speed.policy.name, places=[speed.faster.mean], at=[speed.accuracy], look=look))
    return Panel(
        title=task.name,
        layers=layers if len(layers) > 1 else [Text(text="no valid runs")],
        x=Axis(label="speed-up", better="higher"),
        y=Axis(label="accuracy of the tiny model (%)", better="higher"),
    )


def page(runs: Runs) -> Page:
    return answer_page(runs) if runs.view.platform.gpu is None else card_page(runs)


FIGURE = dllm_figure(
    "rivals",
    "dKV-Cache (arXiv:2505.15781), Fast-dLLM (2505.22618), d2Cache (2509.23094), DPad (2508.14148), Streaming-dLLM (2601.17917), Window-Diffusion",
    platforms=("cpu-tiny", "cpu-long", "h200"),
    page=page,
    cells=cells,
    num_runs=NUM_SEEDS,
    is_timed=False,
    decides_on=(),
    under_title=basis_of,
)
