"""dLLM-Serve Figure 6 (§6.4): accuracy of head-level and uniform selection under retention ratios.

The paper asks LLaDA-8B; here the embedded model answers its own held-out tasks, so that every point is measured
on any machine. Engine, scheduler and decoding are the same for all series: only the selection differs.
"""

from engines.errors import UserError
from paper_figures.common.caption import how_obtained, invalid_notes, missing_note, obtained_text, validity_text
from paper_figures.common.figure import Page, Picture, Table, cell_by_cell
from paper_figures.common.panel import Axis, Band, Guide, Layer, Line, Mark, Panel
from paper_figures.common.runs import Runs
from paper_figures.common.style import system_look
from paper_figures.common.words import exactly
from paper_figures.dllm_serve.layout import PAPER, all_valid, dllm_figure
from paper_figures.dllm_serve.retention import (
    DENSE,
    HEAD,
    PAPER_DATASETS,
    SELECTIONS,
    TASKS,
    UNIFORM,
    AccuracyPoint,
    PaperAccuracy,
    RetentionPoints,
    SolvedShare,
    compare,
    load_points,
    paper_values,
)
from repro.reports.claims import Finding
from repro.reports.figures import Knobs, View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import Discordance
from repro.tasks.registry import task_entry

SOURCE = f"{PAPER}, Figure 6, §6.4"
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5)
"""The paper's range."""
TESTED = (0.1, 0.2)
"""Ratios at which the notes say the difference in words."""
PLACES = [(task, ratio) for task in TASKS for ratio in RATIOS]
NUM_PROBLEMS = 500
GENERATION: Knobs = (
    ("gen_length", 40),
    ("block_length", 8),
    ("steps", 40),
    ("stop_at_eos", True),
    ("num_prompts", NUM_PROBLEMS),
)
"""One protocol for both tasks. Answers have up to 38 tokens, so 40 hold them. Blocks of 8 make of an answer three to
five blocks, each denoised over a cache of its own; in one block of 32 nothing could be looked up between its 32 steps.
The rest is the published default: pooling over 3 rows, the cache built at a block's second step."""

PRINTED_BESIDE = 2.2
"""Percent of rows by which printed values stand beside theirs, where they cover none of ours."""
LOOKS = {HEAD: system_look("dllm-serve"), UNIFORM: system_look("sparse-dllm")}
LABELS = {HEAD: "head-level (dLLM-Serve)", UNIFORM: "uniform (Sparse-dLLM's rule)", DENSE: "dense (every row kept)"}
CSV_COLUMNS = (
    *("platform", "task", "selection", "retention_ratio", "criterion", "accuracy", "low", "high", "n"),
    *("obtained", "valid", "run_folder"),
)


def cells(view: View) -> list[Cell]:
    if view.platform.executor != "torch":
        raise UserError(
            f"platform={view.platform.name!r} simulates, and accuracy needs a model that answers: use --platform cpu-tiny"
        )
    choices: list[dict[str, Scalar]] = [
        {"selection": selection, "retention_ratio": ratio} for selection in SELECTIONS for ratio in RATIOS
    ]
    choices.append({"selection": DENSE})
    asked = (
        view.cell(None, "dllm-serve", task, knobs=(*GENERATION, *choice.items()))
        for task in TASKS
        for choice in choices
    )
    return cell_by_cell(asked, view)


def page(runs: Runs) -> Page:
    points, printed = load_points(runs.all), paper_values()
    obtained = how_obtained(runs.all)
    stated = ", ".join(f"{PAPER_DATASETS[value.task]} {value.selection} {value.percent:g} %" for value in printed)
    return Page(
        table=Table(
            columns=(
                *("task", "kept", "head %", "uniform %", "only head / only uniform", "McNemar p", "dense %", "valid"),
            ),
            rows=[table_row(points, *place) for place in PLACES],
        ),
        csv=Table(
            columns=CSV_COLUMNS,
            rows=[*(row for point in points.all for row in csv_rows(point, runs.view)), *map(paper_row, printed)],
        ),
        picture=Picture(
            panels=[panel(points, task, printed) for task in TASKS],
            caption=[
                "Only the selection differs between the series. Bars and band: Wilson's 95 % intervals.",
                "Hollow, beside its ratio: the paper's, of LLaDA-8B on HumanEval and GSM8K, another model and other tasks: not to be compared in height.",
                f"Printed in {SOURCE}: {stated}.",
                protocol(runs),
                *obtained,
            ],
        ),
        notes=[
            *difference_notes(points),
            *match_notes(points),
            *invalid_notes(runs.all),
            *missing(points),
            *obtained,
            protocol(runs),
        ],
    )


def panel(points: RetentionPoints, task: str, printed: list[PaperAccuracy]) -> Panel:
    layers: list[Layer] = []
    for selection in SELECTIONS:
        shares = {ratio: share for ratio in RATIOS if (share := points.share(task, selection, ratio))}
        # An empty or a full share is an end of its own interval, but for rounding.
        spread = [
            (max(0.0, 100 * (share.value - share.low)), max(0.0, 100 * (share.high - share.value)))
            for share in shares.values()
        ]
        if shares:
            layers.append(
                Line(
                    label=LABELS[selection],
                    places=[100 * ratio for ratio in shares],
                    at=[exactly(100 * share.value) for share in shares.values()],
                    spread=spread,
                    look=LOOKS[selection],
                    capsize=2.5,
                    zorder=3,
                )
            )
    if dense := points.share(task, DENSE):
        layers.append(Guide(value=100 * dense.value, label=LABELS[DENSE], width=1.2, zorder=2))
        layers.append(Band(low=100 * dense.low, high=100 * dense.high))
    for value in printed:
        if value.task == task:
            label = f"{value.selection}, paper (LLaDA-8B)"
            place = 100 * value.ratio + PRINTED_BESIDE
            layers.append(Mark(label=label, place=place, value=value.percent, look=LOOKS[value.selection]))
    letter = "ab"[TASKS.index(task)]
    return Panel(
        title=f"({letter}) {task}, {task_entry(task).criterion}",
        layers=layers,
        x=Axis(label="context rows kept (%)", ticks=[100 * ratio for ratio in RATIOS]),
        y=Axis(label="accuracy (%)" if letter == "a" else None, limits=(-3, 108)),
    )


def protocol(runs: Runs) -> str:
    knobs = dict(GENERATION)
    counts = sorted({run.num_requests for run in runs.all})
    seeds = sorted({run.cell.seed for run in runs.all})
    return (
        f"{' or '.join(map(str, counts))} held-out problems a point and seed (seed {', '.join(map(str, seeds))}), the same "
        f"for every series. {knobs['gen_length']} tokens in blocks of "
        f"{knobs['block_length']}, one token a step, temperature 0, scores pooled over 3 rows, cache built at a block's second "
        f"step. The engine is the same for all series, dLLM-Serve's: only the selection differs."
    )


# -- CSV, table, notes ------------------------------------------------------------------------------------


def csv_rows(point: AccuracyPoint, view: View) -> list[tuple[object, ...]]:
    """One row for each criterion; repeats are pooled."""
    entry, rows = task_entry(point.task), list[tuple[object, ...]]()
    folders = " ".join(run.cell.folder_name for run in point.runs)
    for column, criterion in (("correct", entry.criterion), ("correct_strict", entry.strict)):
        share = point.share(column)
        numbers = (None,) * 4 if share is None else (share.value, share.low, share.high, share.n)
        rows.append(
            (
                *(view.platform.name, point.task, point.selection, point.ratio, criterion, *numbers),
                *(obtained_text(point.runs), all_valid(point.runs), folders),
            )
        )
    return rows


def paper_row(value: PaperAccuracy) -> tuple[object, ...]:
    known = {
        "task": PAPER_DATASETS[value.task],
        "selection": value.selection,
        "retention_ratio": value.ratio,
        "accuracy": round(value.percent / 100, 4),
        "obtained": "paper",
    }
    return tuple(known.get(column) for column in CSV_COLUMNS)


def table_row(points: RetentionPoints, task: str, ratio: float) -> tuple[str, ...]:
    head, uniform, dense = (points.of(task, HEAD, ratio), points.of(task, UNIFORM, ratio), points.of(task, DENSE))
    pair = compare(head, uniform)
    runs = [run for point in (head, uniform, dense) if point is not None for run in point.runs]
    return (
        task,
        f"{100 * ratio:g} %",
        text_of(head),
        text_of(uniform),
        "-" if pair is None else f"{pair.only_first} / {pair.only_second}",
        "-" if pair is None else p_value(pair),
        text_of(dense),
        validity_text(runs),
    )


def missing(points: RetentionPoints) -> list[str]:
    asked = [(task, selection, ratio) for task in TASKS for selection in SELECTIONS for ratio in RATIOS]
    found = [
        f"{task} {selection} at {100 * ratio:g} %"
        for task, selection, ratio in asked
        if points.of(task, selection, ratio) is None
    ]
    found += [f"{task} {DENSE}" for task in TASKS if points.of(task, DENSE) is None]
    return missing_note(found, len(asked) + len(TASKS))


def pairs(
    points: RetentionPoints, task: str, ratio: float, uniform_ratio: float
) -> tuple[Discordance, SolvedShare, SolvedShare] | None:
    """Head-level and uniform selection on the same problems."""
    head, uniform = points.of(task, HEAD, ratio), points.of(task, UNIFORM, uniform_ratio)
    pair = compare(head, uniform)
    one, other = points.share(task, HEAD, ratio), points.share(task, UNIFORM, uniform_ratio)
    return None if pair is None or one is None or other is None else (pair, one, other)


def difference_notes(points: RetentionPoints) -> list[str]:
    notes = []
    for task, ratio in PLACES:
        if (found := pairs(points, task, ratio, ratio)) is None:
            continue
        pair, one, other = found
        gain = 100 * (one.value - other.value)
        if ratio in TESTED:
            notes.append(
                f"{task} at {100 * ratio:g} %: head-level {100 * one.value:.1f} %, uniform {100 * other.value:.1f} % "
                f"({gain:+.1f} points; {pair.only_first} problems solved by head-level alone, {pair.only_second} by uniform "
                f"alone of {pair.n}; exact McNemar test {p_value(pair)})."
            )
        elif gain < 0:
            notes.append(
                f"{task} at {100 * ratio:g} %: uniform is ahead by {-gain:.1f} points (exact McNemar test {p_value(pair)})."
            )
    return notes


def match_notes(points: RetentionPoints) -> list[str]:
    """The paper's halving: head-level at 10 % against uniform at 20 %."""
    notes = []
    for task in TASKS:
        if (found := pairs(points, task, *TESTED)) is not None:
            pair, one, other = found
            notes.append(
                f"{task}: head-level at 10 % {100 * one.value:.1f} %, uniform at 20 % {100 * other.value:.1f} % "
                f"(exact McNemar test {p_value(pair)}); the paper has the two equal on GSM8K."
            )
    return notes


def p_value(pair: Discordance) -> str:
    return f"p = {pair.p_value:.2g}" if pair.p_value >= 1e-4 else "p < 0.0001"


def text_of(point: AccuracyPoint | None) -> str:
    share = point.share() if point is not None else None
    return "-" if share is None else f"{100 * share.value:.1f} ({100 * share.low:.1f} to {100 * share.high:.1f})"


# -- claims -------------------------------------------------------------------------------------------------


def findings(runs: Runs) -> list[Finding]:
    """Answered by another model on other tasks: only which ratios were tried can be compared."""
    points = load_points(runs.all)
    tried = f"ratios {', '.join(f'{100 * ratio:g} %' for ratio in RATIOS)} on the embedded model's tasks"
    found = [runs.finding("dllm-retention-sweep", (100 * min(RATIOS), 100 * max(RATIOS)), tried)]
    for task, short in zip(TASKS, ("he", "gsm"), strict=True):
        head, uniform = (points.share(task, selection, TESTED[0]) for selection in (HEAD, UNIFORM))
        if head is None or uniform is None:
            continue
        rows = {
            f"dllm-{short}-head": (100 * head.value, "head-level at 10 %"),
            f"dllm-{short}-uniform": (100 * uniform.value, "uniform at 10 %"),
            **(
                of_code(head, uniform)
                if short == "he"
                else of_math(head, uniform, points.share(task, UNIFORM, TESTED[1]))
            ),
        }
        where = f"on {task}, embedded model; the claim is about LLaDA-8B on {PAPER_DATASETS[task]}"
        for claim, (value, what) in rows.items():
            found.append(runs.finding(claim, value, f"{what} {where}", comparable=False))
    return found


def of_code(head: SolvedShare, uniform: SolvedShare) -> dict[str, tuple[float, str]]:
    if uniform.value > 0:
        return {"dllm-he-ratio": (head.value / uniform.value, "head-level over uniform at 10 %")}
    # None is solved: the ratio is at least that to the most that the interval leaves.
    what = f"head-level over the upper end of uniform's interval ({100 * uniform.high:.2g} %; it solves none) at 10 %"
    return {"dllm-he-ratio": (head.value / uniform.high, what)}


def of_math(head: SolvedShare, uniform: SolvedShare, uniform_twice: SolvedShare | None) -> dict[str, tuple[float, str]]:
    found = {}
    if uniform.value > 0:
        found["dllm-gsm-gain"] = (100 * (head.value / uniform.value - 1), "relative gain at 10 %")
    if uniform_twice is not None:
        match = 100 * (head.value - uniform_twice.value)
        found["dllm-gsm-match"] = (match, "head-level at 10 % less uniform at 20 %")
    return found


FIGURE = dllm_figure("fig6", SOURCE, platforms=("cpu-tiny",), page=page, cells=cells, findings=findings, is_timed=False)
