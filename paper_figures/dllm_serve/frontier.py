"""dLLM-Serve frontier: what leaving rows out saves."""

import csv
import functools
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from engines.errors import UserError
from paper_figures.common.caption import basis_of, obtained_text, validity_text
from paper_figures.common.contender import Contender, contenders_beside
from paper_figures.common.figure import Page, Picture, Table, cell_by_cell
from paper_figures.common.panel import Axis, Guide, Labels, Layer, Line, Panel, Points, Text
from paper_figures.common.runs import Runs
from paper_figures.common.style import GUIDE_COLOR, Look
from paper_figures.common.words import shown
from paper_figures.dllm_serve.answers import numbers_of, share
from paper_figures.dllm_serve.comparison import OURS
from paper_figures.dllm_serve.layout import dllm_figure
from repro import paths
from repro.families.block.settings import EMBEDDED_TASKS, NAME
from repro.families.dllm.record import STEPS
from repro.families.platforms import DllmPart, Platform
from repro.reports.figures import Solved, View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Interval, mean_interval, wilson_interval
from repro.runs.store import StoredRun

# -- what is compared -------------------------------------------------------------------------------------

NUM_PROBLEMS = 50
"""Problems per seed, of each task."""
CARD_REQUESTS, CARD_TOKENS = 64, 256
ONE, THRESHOLD = "one token a step", "threshold 0.9"
Named = Mapping[str, Mapping[str, Scalar]]
"""Name -> knobs."""
PACES: Named = {ONE: {}, THRESHOLD: {"threshold": 0.9}}
FIXED_PACES: Named = {
    ONE: {"steps": CARD_TOKENS},
    "four tokens a step": {"steps": 64},
    "three steps a block": {"steps": 24},
}
SETTINGS: Named = {
    "mini-gsm in blocks of 32": {"gen_length": 64, "block_length": 32, "steps": 64},
    "mini-gsm in blocks of 8": {"gen_length": 40, "block_length": 8, "steps": 40},
    "mini-code in blocks of 8": {"gen_length": 40, "block_length": 8, "steps": 40},
    "mini-chain in blocks of 16": {"gen_length": 96, "block_length": 16, "steps": 96, "model": "tiny-long"},
}
"""In the first, much of a block can settle. The second and third have several blocks to refresh. In the last, each block needs the result
of the block before. On a card, blocks of these lengths answer Burst's prompts."""
FIXED = "burst, 256 tokens in blocks of 32"
"""A setting for cards, with a fixed number of tokens a step; nothing is answered in it."""


@dataclass(frozen=True, kw_only=True)
class Policy(Contender):
    """A policy: which rows its steps compute and read, as ``frontier.yaml`` says."""

    system: str = OURS
    paces: Named = field(default_factory=lambda: PACES)
    preset: str | None = None
    is_fixed: bool = False


*POLICIES, BLOCK_DIFFUSION = contenders_beside(__file__, Policy).values()
FAST_DLLM = POLICIES[0]


def task_of(setting: str) -> str:
    return setting.partition(" ")[0].rstrip(",")


def paces_of(policy: Policy, setting: str = "") -> Named:
    return FIXED_PACES if setting == FIXED else policy.paces


def settings(where: Platform) -> tuple[str, ...]:
    return tuple(SETTINGS) if where.gpu is None else (*SETTINGS, FIXED)


def asked(where: Platform) -> list[tuple[str, str, Policy]]:
    """Return setting, pace and policy of every point. Block diffusion answers only the tasks that its embedded model was trained on. On a
    card it would be another model, and rows say nothing of what its accuracy costs."""
    grid = []
    for setting in settings(where):
        policies: Sequence[Policy] = [policy for policy in POLICIES if setting != FIXED or policy.is_fixed]
        paces = FIXED_PACES if setting == FIXED else PACES
        grid += [(setting, pace, policy) for pace in paces for policy in policies if pace in paces_of(policy, setting)]
        if where.gpu is None and task_of(setting) in EMBEDDED_TASKS:
            grid += [(setting, pace, BLOCK_DIFFUSION) for pace in paces_of(BLOCK_DIFFUSION)]
    return grid


def cell_of(view: View, setting: str, pace: str, policy: Policy) -> Cell:
    platform, options, dataset = view.platform, dict(SETTINGS.get(setting, {})), task_of(setting)
    if setting == FIXED:
        options = {"num_prompts": CARD_REQUESTS, **FIXED_PACES[pace]}
    elif platform.gpu is not None:
        dataset = "burst"
        options = {"gen_length": CARD_TOKENS, "block_length": options["block_length"], "num_prompts": CARD_REQUESTS}
        options |= FIXED_PACES[ONE]
        if pace != ONE:
            options |= {"replay": followed(setting, pace, policy), "replay_drawn": True}
    elif policy.system == NAME:
        budget = platform.part(DllmPart).max_num_batched_tokens
        options = {"gen_length": options["gen_length"], "num_prompts": NUM_PROBLEMS, "max_num_batched_tokens": budget}
        options |= policy.paces[pace]
    else:
        options |= {"num_prompts": NUM_PROBLEMS, **policy.paces[pace]}
    knobs = {**options, **dict(policy.knobs), **dict(view.together("frontier"))}
    if policy.system == "dllm-cache" and platform.gpu is None:
        knobs["reading"] = "efficient"  # on a device, its rule runs only in padded batches
    return view.cell(None, policy.system, dataset, knobs=tuple(knobs.items()))


# -- what was measured, which cards follow -----------------------------------------------------------


MEASURED = Path("cpu-tiny", "frontier-cpu-tiny.csv")
RUNS = Path("cpu-tiny", "runs")
"""Runs of the first seed with a threshold, which tell how many tokens their steps committed. ``python -m
paper_figures.dllm_serve.frontier RESULT_DIR`` puts them there from where they were measured."""


@functools.cache
def measured() -> Mapping[tuple[str, str, str], tuple[Mapping[str, str], ...]]:
    """Return valid rows of the committed table by setting, pace and policy (``repro reproduce frontier --platform cpu-tiny``)."""
    path = paths.COMMITTED / MEASURED
    rows: dict[tuple[str, str, str], tuple[Mapping[str, str], ...]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                key = row["setting"], row["pace"], row["policy"]
                if row["valid"] == "true":
                    rows[key] = (*rows.get(key, ()), row)
    except (OSError, KeyError, ValueError) as error:
        raise UserError(
            f"{path} holds no measured points ({type(error).__name__}): make it by 'repro reproduce frontier --platform cpu-tiny "
            f"--out-dir {path.parent}'"
        ) from error
    return rows


def followed(setting: str, pace: str, policy: Policy) -> str:
    """Return the committed run whose blocks a card's requests follow."""
    rows = measured().get((setting, pace, policy.name))
    if not rows:
        raise UserError(f"{MEASURED} has no {policy.name!r} of {setting} at {pace}: measure it again")
    return str(RUNS / f"{rows[0]['run_folder']}.jsonl.gz")


def followed_points() -> list[tuple[str, str, Policy]]:
    """Return setting, pace and policy of every measured point with a run that cards follow."""
    return [
        (setting, THRESHOLD, policy) for setting in SETTINGS for policy in POLICIES if THRESHOLD in paces_of(policy)
    ]


def solved_on_cpu(setting: str, pace: str, policy: Policy) -> Solved | None:
    """Return what the embedded model solves over all measured seeds."""
    rows = measured().get((setting, pace, policy.name), ())
    n = sum(int(row["n"]) for row in rows)
    if not n:
        return None
    solved = sum(round(float(row["accuracy"]) * int(row["n"])) for row in rows)
    low, high = wilson_interval(solved, n)
    return Solved(share=solved / n, low=low, high=high, n=n)


def keep_followed(stored: Path, kept: Path) -> list[Path]:
    return keep_runs({Path(followed(*point)).name for point in followed_points()}, stored, kept)


def keep_runs(names: set[str], stored: Path, kept: Path) -> list[Path]:
    """Replace the kept runs, which cards follow, by copies from where they are stored."""
    if missing := sorted(name for name in names if not (stored / name).is_file()):
        raise UserError(f"{stored} has no {missing[0]}: give the --result-dir in which {MEASURED.parent} was measured")
    kept.mkdir(exist_ok=True)
    for old in kept.glob("*.jsonl.gz"):
        old.unlink()
    return [Path(shutil.copyfile(stored / name, kept / name)) for name in sorted(names)]


if __name__ == "__main__":
    print(f"{len(keep_followed(Path(sys.argv[1]), paths.COMMITTED / RUNS))} runs are kept in {paths.COMMITTED / RUNS}")


# -- the figure -------------------------------------------------------------------------------------------

SOURCE = "ours; whole blocks and whole Refreshes are Fast-dLLM's dual cache (arXiv:2505.22618)"
RING = Look(color="black", marker="o", linestyle="none")
FEW_POINTS = 5.0
"""We draw points at most this much less accurate than the named ones; only the table has the others."""
PACE_MARKERS = {ONE: "o", THRESHOLD: "^"}
CSV_COLUMNS = (
    *("platform", "setting", "pace", "policy", "preset", "on_front", "seed", "accuracy", "low", "high", "n"),
    *("rows_per_request", "throughput_tok_s", "processor_s", "obtained", "valid", "run_folder"),
)


@dataclass(frozen=True, kw_only=True)
class Point:
    setting: str
    pace: str
    policy: Policy
    runs: tuple[StoredRun, ...]
    against: tuple[StoredRun, ...]
    """Runs of Fast-dLLM's rule at one token a step."""
    is_measured: bool

    @cached_property
    def solved(self) -> Solved | None:
        """The share solved. For a card it is what the embedded model solved in the run that the card follows."""
        return share(self.runs) if self.is_measured else solved_on_cpu(self.setting, self.pace, self.policy)

    @property
    def rows(self) -> float | None:
        """Rows computed per request."""
        return mean_interval([rows_per_request(run) for run in self.runs if run.validity.valid]).mean

    @cached_property
    def speedup(self) -> Interval:
        """Mean over pairs of a seed; by processor time if known, as other work on the machine disturbs that less."""
        bases = {run.cell.seed: run for run in self.against if run.validity.valid}
        pairs = [(run, bases[run.cell.seed]) for run in self.runs if run.validity.valid and run.cell.seed in bases]
        return mean_interval([seconds(other) / seconds(run) for run, other in pairs])

    @property
    def preset(self) -> str | None:
        """Our preset that this point stands for, at the pace that the preset sets."""
        return self.policy.preset if self.pace == next(iter(paces_of(self.policy))) else None

    def is_behind(self, other: "Point") -> bool:
        """Whether the other point is at least as fast and as accurate, and better in one of these."""
        own, theirs = ((each.speedup.mean or 0.0, each.solved.share if each.solved else 0.0) for each in (self, other))
        return theirs != own and all(a <= b for a, b in zip(own, theirs, strict=True))


def rows_per_request(run: StoredRun) -> float:
    column = "num_rows" if run.cell.system == NAME else "query_tokens"
    return run.total(STEPS, column) / run.num_requests


def seconds(run: StoredRun) -> float:
    processor_s = run.facts.get("processor_s")
    return run.total(STEPS, "duration_s") if processor_s is None else float(processor_s)


def points_of(runs: Runs) -> list[Point]:
    view, platform = runs.view, runs.view.platform
    return [
        Point(
            setting=setting,
            pace=pace,
            policy=policy,
            runs=runs.of(cell_of(view, setting, pace, policy)),
            against=runs.of(cell_of(view, setting, ONE, FAST_DLLM)),
            is_measured=platform.gpu is None,
        )
        for setting, pace, policy in asked(platform)
    ]


def front(points: Sequence[Point], setting: str) -> list[Point]:
    """Return the points of a setting that no other of the same model beats, the slowest first."""
    candidates = [
        point
        for point in points
        if point.setting == setting and point.policy is not BLOCK_DIFFUSION and point.speedup.mean and point.solved
    ]
    unbeaten = [point for point in candidates if not any(map(point.is_behind, candidates))]
    return sorted(unbeaten, key=lambda each: each.speedup.mean or 0.0)


def cells(view: View) -> list[Cell]:
    """Send all requests of a run at once. At one token a step, two settings with blocks of 8 are the same cell on a card."""
    return cell_by_cell(dict.fromkeys(cell_of(view, *point) for point in asked(view.platform)), view)


def page(runs: Runs) -> Page:
    platform, points = runs.view.platform, points_of(runs)
    complete = [point for point in points if point.runs]
    on_front = {id(point) for setting in settings(platform) for point in front(complete, setting)}
    return Page(
        table=Table(
            columns=("setting", "pace", "rows computed", "accuracy %", "rows/request", "speed-up", "obtained", "valid"),
            rows=[table_row(point, id(point) in on_front) for point in complete],
        ),
        csv=Table(
            columns=CSV_COLUMNS,
            rows=[csv_row(platform, point, id(point) in on_front, run) for point in complete for run in point.runs],
        ),
        picture=Picture(
            panels=[panel(setting, complete) for setting in settings(platform)], caption=said_of(platform), columns=2
        ),
        notes=said_of(platform),
        after_heading=f" - {platform.title}",
    )


def said_of(where: Platform) -> list[str]:
    is_measured = where.gpu is None
    return [
        "The engine, scheduler and batching are the same for all"
        + (" but block diffusion and dLLM-Cache, which runs in padded batches" if is_measured else "")
        + ", dLLM-Serve's; Sparse-dLLM and dLLM-Cache know no threshold. Speed-up: over Fast-dLLM's rule at one token a step, "
        + ("in processor time, " if is_measured else "")
        + "mean of pairs of a seed with its 95 % interval. Rings are our presets; on "
        "the front (blue, and * in the table) is what no other of the same model is ahead of by the means. Names: those on the front, presets, "
        "and Fast-dLLM's rule. Points more than five percent points below all of these are in the table alone.",
        (
            "Accuracy: problems of all seeds, with Wilson's 95 % interval. mini-chain is asked of tiny-long, block diffusion of "
            "tiny-block, the others of tiny. Block diffusion ends with the block that has its end of text; the others denoise all "
            "tokens that are asked for."
        )
        if is_measured
        else (
            "Accuracy is the embedded model's on a CPU, of the same policy and pace. With a threshold each block of Burst's 64 requests, "
            "256 tokens each, commits as a block of that run did, drawn evenly; so it is said how a card serves such steps, not what its "
            "model would answer. In the last panel tokens a step are fixed, and nothing is answered."
        ),
    ]


def table_row(point: Point, is_on_front: bool) -> tuple[str, ...]:
    faster = point.speedup
    width = "" if faster.half_width is None else f" ± {faster.half_width:.2f}"
    return (
        point.setting,
        point.pace,
        f"{point.policy.name}{' *' if is_on_front else ''}",
        "-" if point.solved is None else str(point.solved),
        shown(point.rows, ".0f"),
        f"{shown(faster.mean, '.2f')}{width}",
        obtained_text(point.runs),
        validity_text(point.runs),
    )


def csv_row(where: Platform, point: Point, is_on_front: bool, run: StoredRun) -> tuple[object, ...]:
    graded = numbers_of(share((run,)) if point.is_measured else point.solved)
    return (
        *(where.name, point.setting, point.pace, point.policy.name, point.preset, is_on_front, run.cell.seed, *graded),
        *(rows_per_request(run), run.summary["throughput_tok_s"], run.facts.get("processor_s")),
        *(run.obtained, run.validity.valid, run.cell.folder_name),
    )


def panel(setting: str, complete: Sequence[Point]) -> Panel:
    """Draw accuracy over the speed-up; if nothing is answered, the speed-up over the rows computed."""
    points = [point for point in complete if point.setting == setting and point.speedup.mean is not None]
    if not points:
        return Panel(title=setting, layers=[Text(text="no valid runs")])
    if setting == FIXED:
        x, y = Axis(label="rows a request computes", better="lower"), Axis(label="speed-up", better="higher")
        return Panel(title=setting, layers=fixed_lines(points), x=x, y=y)
    best = front(complete, setting)
    base = FAST_DLLM, ONE  # speed-ups are relative to this
    named = [point for point in points if point in best or point.preset or (point.policy, point.pace) == base]
    floor = min(percent(point.solved).mean or 0.0 for point in named) - FEW_POINTS
    layers: list[Layer] = [Guide(value=1.0, is_upright=True)]
    for pace, marker in PACE_MARKERS.items():
        others = [each for each in points if each.pace == pace and each not in best and solved_percent(each) >= floor]
        look = Look(color=GUIDE_COLOR, marker=marker, linestyle="none")
        places, values = coordinates(others)
        layers.append(Points(label=f"not on it, {pace}", places=places, values=values, look=look, size=3.5))
    accuracies, look = [percent(point.solved) for point in best], Look(color="#0072B2", marker="")
    layers.append(Line(label="the front", places=coordinates(best)[0], at=accuracies, look=look, zorder=4))
    for pace, marker in PACE_MARKERS.items():
        places, values = coordinates([point for point in best if point.pace == pace])
        look = Look(color="#0072B2", marker=marker, linestyle="none")
        layers.append(Points(label=f"on the front, {pace}", places=places, values=values, look=look, zorder=5))
    places, values = coordinates([point for point in points if point.preset is not None])
    layers.append(Points(label="a preset", places=places, values=values, look=RING, size=9, zorder=5, is_ring=True))
    layers.append(labels_of(named))
    suffix = "" if all(point.is_measured for point in points) else " of the tiny model"
    return Panel(
        title=setting,
        layers=layers,
        x=Axis(label="speed-up over Fast-dLLM's rule", better="higher"),
        y=Axis(label=f"accuracy{suffix} (%)", better="higher"),
    )


def fixed_lines(own: Sequence[Point]) -> list[Layer]:
    """Draw a line per policy, named at its end, over the rows that a request computes."""
    layers: list[Layer] = []
    for policy in POLICIES:
        line = [point for point in own if point.policy is policy]
        if line:
            places, speedups = [point.rows or 0.0 for point in line], [point.speedup for point in line]
            layers.append(Line(label="_nolegend_", places=places, at=speedups, look=policy.look))
            last, value = places[-1], speedups[-1].mean or 0.0
            layers.append(Labels(texts=[policy.name], places=[last], values=[value], color=policy.look.color))
    return layers


def coordinates(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """Speed-ups and accuracies in percent."""
    return [point.speedup.mean or 0.0 for point in points], list(map(solved_percent, points))


def solved_percent(point: Point) -> float:
    return percent(point.solved).mean or 0.0


def labels_of(points: Sequence[Point]) -> Labels:
    """Name policies and presets; points in one place share a label."""
    names: dict[tuple[float, float], dict[str, None]] = {}
    for point in points:
        (place,), (value,) = coordinates([point])
        names.setdefault((round(place, 1), round(value, 1)), {})[point.preset or point.policy.name] = None
    texts = [" / ".join(labels) for labels in names.values()]
    return Labels(texts=texts, places=[place for place, _ in names], values=[value for _, value in names])


def percent(solved: Solved | None) -> Interval:
    if solved is None:
        return mean_interval([])
    low, high = 100 * solved.low, 100 * solved.high
    return Interval(
        mean=100 * solved.share, half_width=(high - low) / 2, n=solved.n, confidence=0.95, bounds=(low, high)
    )


FIGURE = dllm_figure(
    "frontier",
    SOURCE,
    platforms=("cpu-tiny", "rtx4090", "h200"),
    page=page,
    cells=cells,
    num_runs=3,
    decides_on=(),
    under_title=basis_of,
)
